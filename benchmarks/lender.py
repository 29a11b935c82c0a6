"""A prefill worker's side of the case ``handover``: pages of finished prompts, lent over shm.

Run as a program it serves one borrower at an address. A message asks for the pages
of one prompt; the answer is the grant's token and the page numbers, in the order of the tokens.
"""

from __future__ import annotations

import sys

import numpy as np
import numpy.typing as npt
from kvcore.errors import KvcoreError
from kvcore.transport import Grant, Transport

KEY = b"benchmark key, 32 bytes in all.."
LAYERS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 30, 3, 64, 64  # SmolLM2-135M in bf16
TOKENS = 3000
PAGES = -(-TOKENS // PAGE_SIZE)
ARENA_PAGES = 128
SHAPE = (LAYERS, 2, PAGE_SIZE, KV_HEADS, HEAD_DIM)  # of a page
PAGE_BYTES = 2 * int(np.prod(SHAPE))


def numbers(seed: int = 0) -> npt.NDArray[np.uint16]:
    """The whole arena's bf16 elements, the same in both processes."""
    rng = np.random.default_rng(seed)
    flat = rng.standard_normal(ARENA_PAGES * PAGE_BYTES // 2, np.float32)
    return (flat.view(np.uint32) >> 16).astype(np.uint16).reshape(ARENA_PAGES, *SHAPE)


def serve(address: str) -> None:
    """One borrower, until it closes its link."""
    with Transport(key=KEY, keepalive_s=0) as transport:
        region = transport.allocate(ARENA_PAGES * PAGE_BYTES)
        region.data[:] = numbers().reshape(-1).view(np.uint8).data
        transport.listen(address)
        print("ready", flush=True)
        link = transport.accept(30)
        rng = np.random.default_rng(1)
        grant: Grant | None = None
        try:
            while True:
                link.recv()
                if grant is not None:
                    grant.revoke(5)  # of the last prompt: given back by now
                pages = rng.permutation(ARENA_PAGES)[:PAGES]
                grant = region.grant([(int(p) * PAGE_BYTES, PAGE_BYTES) for p in pages], "r")
                link.send(grant.token + pages.astype(np.int32).tobytes())
        except KvcoreError:
            return  # the borrower has what it wanted


if __name__ == "__main__":
    serve(sys.argv[1])
