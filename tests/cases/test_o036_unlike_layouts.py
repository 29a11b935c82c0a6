"""O36 (vllm#23587), O33 (vllm#45330), O35 (sglang#15674): unlike sides of a hand-over.

A difference in layout or in the number of KV heads a rank holds crashed a server, tripped an assert
or was accepted and collapsed under load. A hand-over between pages that differ in anything is
refused when it is opened, by name, and both sides serve on.
"""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
from kvcore import stream
from kvcore.errors import Unsupported
from kvcore.pages import PageSpec, Pool

DEFAULT: dict[str, Any] = {
    "num_layers": 4, "num_kv_heads": 8, "head_dim_k": 64, "head_dim_v": 64, "page_size": 16,
    "extent_pages": 2, "format": "bf16", "layout": "packed",
}  # fmt: skip
OTHERS: list[dict[str, Any]] = [
    {"num_layers": 5},
    {"head_dim_k": 128},
    {"head_dim_v": 128},
    {"page_size": 32},
    {"format": "f16"},
    {"format": "f32"},
    {"layout": "canonical"},
    *({"num_kv_heads": heads} for heads in (1, 2, 3, 4, 10, 16)),  # as of other tensor parallelism
]


def make_pool(**fields: Any) -> Pool:
    return Pool(PageSpec(**{**DEFAULT, **fields}), 8, huge_pages=False)


def hand_over(
    sender: stream.Endpoint, receiver: stream.Endpoint, ours: Pool, theirs: Pool
) -> stream.Sender:
    to = theirs.alloc(2)[:2]
    pages = ours.alloc(2)[:2]
    try:
        grant = receiver.grant(os.urandom(16), to, 2 * theirs.spec.page_size)
        return sender.open(grant, pages)
    finally:
        theirs.decref(to)
        ours.decref(pages)


@pytest.mark.parametrize("fields", OTHERS, ids=lambda f: "-".join(f"{k}={v}" for k, v in f.items()))
def test_every_difference_is_refused_by_name_and_both_serve_on(fields: dict[str, Any]) -> None:
    hub = stream.LoopbackHub()
    ours, like, unlike = make_pool(), make_pool(), make_pool(**fields)
    with (
        stream.Endpoint(ours, hub=hub) as sender,
        stream.Endpoint(unlike, ["loopback:unlike"], hub=hub) as receiver,
        stream.Endpoint(like, ["loopback:like"], hub=hub) as friend,
    ):
        started = time.monotonic()
        (name,) = fields
        with pytest.raises(Unsupported, match=f"{name}={fields[name]}"):
            hand_over(sender, receiver, ours, unlike)
        assert time.monotonic() - started < 1
        assert ours.stats().io_pages == 0
        assert hand_over(sender, friend, ours, like).state in ("connecting", "streaming")
    assert ours.stats().io_pages == like.stats().io_pages == unlike.stats().io_pages == 0


def test_runs_of_pages_may_differ() -> None:
    """Extents are each side's own business: the slices are alike."""
    hub = stream.LoopbackHub()
    ours, theirs = make_pool(), make_pool(extent_pages=4)
    with (
        stream.Endpoint(ours, hub=hub) as sender,
        stream.Endpoint(theirs, ["loopback:other"], hub=hub) as receiver,
    ):
        assert hand_over(sender, receiver, ours, theirs).state in ("connecting", "streaming")
