"""O43 (sglang PR#33970): with chunked prefill a chunk was sent while the forward pass wrote it.

A page is written in two halves with a pause between them. What says that it is ready is its
publication: nothing of it leaves before, and what arrives is what the finished computation left.
Run with the event removed (published before it is written) the same oracle sees the half-written
page, so it can fail.
"""

from __future__ import annotations

import pathlib
import time

import numpy as np
import pytest
from kvcore.pages import Pool
from support.stream_pages import slice_of, wrong_slices
from support.stream_pair import Pair, stream_pair

TOKENS, CHUNK, PAGE = 96, 48, 16
STAMP = 43
HALF_S = 0.01  # between the halves: far longer than a slice takes on its way


def write_slowly(pool: Pool, pages: list[int], layer: int, slots: range) -> None:
    """The chunk's pages of a layer: the first half of the tokens, a pause, the rest."""
    for half in (PAGE // 2, PAGE):
        for slot in slots:
            k, v = slice_of(pool, STAMP, layer, slot)
            k, v = k.copy(), v.copy()
            k[half:] = v[half:] = 0
            pool.write_slice(pages[slot], layer, k, v)
        time.sleep(HALF_S)


def prefill(pair: Pair, event_first: bool) -> tuple[tuple[object, ...], list[int]]:
    """A prompt in two chunks. Returns how the hand-over ended at the decode side, and its pages."""
    sender, request, to, pages = pair.start(TOKENS, stamp=0)
    pool = pair.prefill.pool
    blank = np.zeros((PAGE, pool.spec.num_kv_heads, pool.spec.head_dim_k), np.uint16)
    for page in pages:
        for layer in range(pool.spec.num_layers):
            pool.write_slice(page, layer, blank, blank)
    for end in range(CHUNK, TOKENS + 1, CHUNK):
        for layer in range(pool.spec.num_layers):
            if event_first:
                sender.publish_upto(layer, end)
            write_slowly(pool, pages, layer, range((end - CHUNK) // PAGE, end // PAGE))
            if not event_first:
                sent = sender.bytes_sent
                assert sent <= published_bytes(pool, layer, end)
                sender.publish_upto(layer, end)
    sender.commit()
    return pair.decode.event(request), to


def published_bytes(pool: Pool, layer: int, end: int) -> int:
    """Of all chunks before this one, and of this one's layers before this one."""
    slices = (end - CHUNK) // PAGE * pool.spec.num_layers + CHUNK // PAGE * layer
    return slices * pool.spec.slice_bytes


@pytest.mark.parametrize("link", ["shm", "tcp"])
def test_what_arrives_is_what_the_computation_left(tmp_path: pathlib.Path, link: str) -> None:
    with stream_pair(tmp_path, link, checksums="all") as pair:
        event, to = prefill(pair, event_first=False)
        assert event[0] == "complete"
        assert wrong_slices(pair.decode.pool, to, STAMP) == 0


@pytest.mark.parametrize("link", ["shm", "tcp"])
def test_without_the_event_the_half_written_page_is_seen(tmp_path: pathlib.Path, link: str) -> None:
    with stream_pair(tmp_path, link, checksums="all") as pair:
        event, to = prefill(pair, event_first=True)
        if event[0] == "failed":  # it changed between its checksum and its copy
            assert event[2] == "Corrupt"
        else:
            assert wrong_slices(pair.decode.pool, to, STAMP) > 0
