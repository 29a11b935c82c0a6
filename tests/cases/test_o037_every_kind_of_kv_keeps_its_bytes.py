"""O37 (LMCache#722): latent (MLA) KV was moved in the format of ordinary KV and broke its reader.

Whatever the kind of KV (one head for each query head, grouped, one, latent, unequal dims, odd
layouts), every byte of it arrives as it was, over every link between processes' pools.
"""

from __future__ import annotations

import ctypes
import os
import select
from pathlib import Path

import numpy as np
import pytest
from kvcore import stream
from kvcore.pages import PageSpec, Pool

TOKENS = 72  # four pages and a half
KINDS = {
    "mha": PageSpec(3, 8, 64, page_size=16),
    "gqa": PageSpec(3, 2, 128, page_size=16),
    "mqa": PageSpec(3, 1, 64, page_size=16),
    "unequal dims": PageSpec(3, 2, 96, 64, page_size=16),
    "canonical f32": PageSpec(3, 2, 48, page_size=16, format="f32", layout="canonical"),
    "latent": PageSpec(3, 1, 576, 512, page_size=16, layout="canonical", latent=True),
}


def content(pool: Pool, page: int, layer: int) -> np.ndarray:
    """The slice's bytes behind its header, writable."""
    nbytes = pool.spec.slice_bytes
    memory = (ctypes.c_uint8 * nbytes).from_address(pool.slice_address(page, layer))
    return np.frombuffer(memory, np.uint8)[64:]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("link", ["shm", "tcp"])
def test_every_byte_arrives_as_it_was(link: str, kind: str, tmp_path: Path) -> None:
    spec = KINDS[kind]
    address = f"shm:{tmp_path}/d" if link == "shm" else "tcp:127.0.0.1:0"
    ours, theirs = Pool(spec, 8, huge_pages=False), Pool(spec, 8, huge_pages=False)
    count = -(-TOKENS // spec.page_size)
    pages, to = ours.alloc(count), theirs.alloc(count)
    rng = np.random.default_rng(37)
    for page in pages[:count]:
        for layer in range(spec.num_layers):
            body = content(ours, page, layer)
            body[:] = rng.integers(0, 256, body.size, dtype=np.uint8)
    with (
        stream.Endpoint(theirs, [address], checksums="all") as receiver,
        stream.Endpoint(ours, checksums="all") as sender,
    ):
        grant = receiver.grant(os.urandom(16), to[:count], TOKENS)
        port = sender.open(grant, pages[:count])
        port.push_cached_upto(TOKENS)
        port.commit()
        assert select.select([receiver.event_fd], [], [], 10)[0]
        ((ended, *_),) = receiver.poll()
        assert ended == "complete"
        for mine, his in zip(pages[:count], to[:count], strict=True):
            for layer in range(spec.num_layers):
                assert np.array_equal(content(ours, mine, layer), content(theirs, his, layer))
