"""O103 (TensorRT-LLM PR#15546): a staging buffer was written anew while its copy was under way.

Encoded slices leave from staging memory that is used again and again. On a slow link, with room for
few of them, every slice still arrives as it was encoded, because its place is given to the next one
only when the receiver has it. Then two steps of one attention plan with disjoint block tables: what
the first one published stays the first one's although the plan's tables are the second's by the
time it leaves.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import select

import numpy as np
import pytest
from kvcore import kernels, stream
from kvcore.compress import seal_pages
from kvcore.pages import PageClass, PageSpec, Pool

SPEC = PageSpec(4, 2, 64, page_size=64, extent_pages=1)
CLASS = PageClass(SPEC, [[("k4", "v4")] * 2] * 4)
PAGES = 12
TOKENS = PAGES * SPEC.page_size
STAGED = 2  # slices that fit into the staging memory
RATE = 4_000_000


def filled(pool: Pool, pages: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    for page in pages:
        for layer in range(SPEC.num_layers):
            k, v = rng.standard_normal((2, 64, 2, 64), dtype=np.float32).view(np.uint32) >> 16
            pool.write_slice(page, layer, k.astype(np.uint16), v.astype(np.uint16))


def slices(pool: Pool, pages: list[int], nbytes: int) -> list[bytes]:
    return [
        ctypes.string_at(pool.slice_address(page, layer), nbytes)
        for page in pages
        for layer in range(SPEC.num_layers)
    ]


@pytest.mark.parametrize("link", ["shm", "tcp"])
def test_every_staged_slice_arrives_as_it_was_encoded(tmp_path: pathlib.Path, link: str) -> None:
    address = f"shm:{tmp_path}/d" if link == "shm" else "tcp:127.0.0.1:0"
    ours, theirs = Pool(SPEC, 16, huge_pages=False), Pool(SPEC, 32, huge_pages=False)
    number = theirs.add_class(CLASS)
    pages, to = ours.alloc(PAGES), theirs.alloc_in_class(PAGES, number)
    filled(ours, pages, 103)
    room = STAGED * SPEC.slice_bytes
    with (
        stream.Endpoint(theirs, [address], checksums="all") as receiver,
        stream.Endpoint(
            ours, checksums="all", staging_bytes=room, max_write_bytes=1, pacing_bytes_per_s=RATE
        ) as sender,
    ):
        port = sender.open(receiver.grant(os.urandom(16), to, TOKENS), pages)
        port.push_cached_upto(TOKENS)
        port.commit()
        most = 0
        while not select.select([receiver.event_fd], [], [], 0.002)[0]:
            most = max(most, sender.stats().staged_bytes)
        ((kind, *_),) = receiver.poll()
        assert kind == "complete"
        assert 0 < most <= room
    twins = theirs.alloc(PAGES, run_pages=1)
    filled(theirs, twins, 103)
    seal_pages(theirs, twins, number)
    nbytes = CLASS.slice_bytes(0)
    assert slices(theirs, to, nbytes) == slices(theirs, twins, nbytes)


def test_a_step_that_is_still_leaving_keeps_its_block_table() -> None:
    """Two prompts in turn over one plan, on a link that takes longer than the steps."""
    ours, theirs = Pool(SPEC, 16, huge_pages=False), Pool(SPEC, 16, huge_pages=False)
    plan = kernels.AttentionPlan(ours, 4)
    rng = np.random.default_rng(7)
    tokens = 3 * SPEC.page_size
    q, out = np.zeros((2, tokens, 4, 64), np.float32)
    with (
        stream.Endpoint(theirs, ["tcp:127.0.0.1:0"], checksums="all") as receiver,
        stream.Endpoint(ours, checksums="all", pacing_bytes_per_s=RATE) as sender,
    ):
        runs = []
        for _ in range(2):
            pages, to = ours.alloc(3), theirs.alloc(3)
            port = sender.open(receiver.grant(os.urandom(16), to, tokens), pages)
            plan.prepare([0, tokens], [tokens], np.array([pages], np.int32))
            step = stream.LayerStep(plan, [(port, 0)])
            for layer in range(SPEC.num_layers):
                k, v = rng.standard_normal((2, tokens, 2, 64), dtype=np.float32)
                step.run_ptr(layer, q.ctypes.data, 256, k.ctypes.data, 128, v.ctypes.data, 128,
                             out.ctypes.data, 0, 0)  # fmt: skip
            port.commit()
            runs.append((port, pages, to))
        assert runs[0][0].state != "done"  # the second step was prepared while the first one left
        ends = 0
        while ends < 2:
            assert select.select([receiver.event_fd], [], [], 20)[0]
            for kind, *_ in receiver.poll():
                assert kind == "complete"
                ends += 1
        for _, pages, to in runs:
            body = slice(64, None)  # the receiver's headers are its own
            for mine, his in zip(
                slices(ours, pages, SPEC.slice_bytes), slices(theirs, to, SPEC.slice_bytes),
                strict=True,
            ):  # fmt: skip
                assert mine[body] == his[body]
