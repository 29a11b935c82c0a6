"""O36 (vllm#23587): unlike sides of a hand-over.

A difference in layout crashed a server. Pages whose KV cannot become the receiver's are refused
when the hand-over is opened, by name, and both sides serve on; other differences are converted, to
the same values.
"""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import pytest
from kvcore import stream
from kvcore.errors import Unsupported
from kvcore.pages import PageSpec, Pool

DEFAULT: dict[str, Any] = {
    "num_layers": 4, "num_kv_heads": 8, "head_dim_k": 64, "head_dim_v": 64, "page_size": 16,
    "extent_pages": 2, "format": "bf16", "layout": "packed",
}  # fmt: skip
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"num_layers": 5}, r"layers \[0, 5\), the sender's pages hold \[0, 4\)"),
    ({"num_kv_heads": 10}, r"KV heads \[0, 10\), the sender's pages hold \[0, 8\)"),
    ({"num_kv_heads": 16}, r"KV heads \[0, 16\), the sender's pages hold \[0, 8\)"),
    ({"head_dim_k": 128}, "head_dim_k=128, the sender's have head_dim_k=64"),
    ({"head_dim_v": 128}, "head_dim_v=128, the sender's have head_dim_v=64"),
    ({"num_kv_heads": 1, "layout": "canonical", "latent": True}, "latent=1, .* latent=0"),
]
CONVERTED: list[dict[str, Any]] = [
    {"page_size": 64},
    {"format": "f16"},
    {"format": "f32"},
    {"layout": "canonical"},
    {"page_size": 32, "format": "f32", "layout": "canonical", "num_layers": 3},
    *({"num_kv_heads": heads} for heads in (1, 2, 3, 4)),  # as of more tensor parallelism
]


def ids(value: Any) -> str | None:
    return "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else None


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


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=ids)
def test_other_kv_is_refused_by_name_and_both_serve_on(
    fields: dict[str, Any], message: str
) -> None:
    hub = stream.LoopbackHub()
    ours, like, unlike = make_pool(), make_pool(), make_pool(**fields)
    with (
        stream.Endpoint(ours, hub=hub) as sender,
        stream.Endpoint(unlike, ["loopback:unlike"], hub=hub) as receiver,
        stream.Endpoint(like, ["loopback:like"], hub=hub) as friend,
    ):
        started = time.monotonic()
        with pytest.raises(Unsupported, match=message):
            hand_over(sender, receiver, ours, unlike)
        assert time.monotonic() - started < 1
        assert ours.stats().io_pages == 0
        assert hand_over(sender, friend, ours, like).state in ("connecting", "streaming")
    assert ours.stats().io_pages == like.stats().io_pages == unlike.stats().io_pages == 0


def values(pool: Pool, pages: list[int], layer: int, num_tokens: int) -> np.ndarray:
    """The first tokens of one layer as float32 [tokens, KV heads, dims of K and V]."""
    rows = [np.concatenate(pool.read_slice(page, layer), axis=-1) for page in pages]
    bits = np.concatenate(rows)[:num_tokens]
    if pool.spec.format == "bf16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view({"f16": np.float16, "f32": np.float32}[pool.spec.format]).astype(np.float32)


@pytest.mark.parametrize("fields", CONVERTED, ids=ids)
def test_other_pages_are_converted_to_the_same_values(fields: dict[str, Any]) -> None:
    hub = stream.LoopbackHub()
    ours, theirs = make_pool(), make_pool(**fields)
    rng = np.random.default_rng(3)
    num_tokens = 75
    pages = ours.alloc(-(-num_tokens // ours.spec.page_size))
    for page in pages:
        for layer in range(ours.spec.num_layers):
            k, v = (rng.integers(-99, 99, (16, 8, 64)).astype(np.float32) / 8 for _ in "kv")
            bits = [(x.view(np.uint32) >> 16).astype(np.uint16) for x in (k, v)]
            ours.write_slice(page, layer, *bits)
    with (
        stream.Endpoint(ours, hub=hub, checksums="all") as sender,
        stream.Endpoint(theirs, ["loopback:other"], hub=hub, checksums="all") as receiver,
    ):
        to = theirs.alloc(-(-num_tokens // theirs.spec.page_size))
        used = to[: -(-num_tokens // theirs.spec.page_size)]
        port = sender.open(receiver.grant(os.urandom(16), used, num_tokens), pages[:5])
        port.push_cached_upto(num_tokens)
        port.commit()
        events = []
        until = time.monotonic() + 5
        while not events and time.monotonic() < until:
            events = receiver.poll()
            time.sleep(0.001)
        assert [event[0] for event in events] == ["complete"], events
    heads = theirs.spec.num_kv_heads
    for layer in range(theirs.spec.num_layers):
        want = values(ours, pages, layer, num_tokens)[:, :heads]
        assert np.array_equal(values(theirs, used, layer, num_tokens), want)


def test_runs_of_pages_may_differ() -> None:
    """Extents are each side's own business: the slices are alike."""
    hub = stream.LoopbackHub()
    ours, theirs = make_pool(), make_pool(extent_pages=4)
    with (
        stream.Endpoint(ours, hub=hub) as sender,
        stream.Endpoint(theirs, ["loopback:other"], hub=hub) as receiver,
    ):
        assert hand_over(sender, receiver, ours, theirs).state in ("connecting", "streaming")
