"""Writes hashes.json: golden vectors of XXH3-64 (PyPI xxhash) and BLAKE2b (hashlib).

Run with `python tests/python/base/golden/make_hashes.py`; needs the xxhash package.
Inputs are rebuilt from the formula in `data`, so the file holds digests only.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import xxhash

XXH3_LENGTHS = [*range(1025), 2047, 2048, 2049, 65_536, 1_000_003]
BLAKE_LENGTHS = [0, 1, 63, 64, 127, 128, 129, 255, 256, 257, 1000]


def data(length: int) -> bytes:
    """Bytes of a linear congruential sequence, the same on every machine."""
    out = bytearray(length)
    state = 12345
    for i in range(length):
        state = (state * 1_103_515_245 + 12_345) & 0x7FFFFFFF
        out[i] = state >> 16 & 0xFF
    return bytes(out)


def main() -> None:
    everything = data(max(XXH3_LENGTHS))
    vectors = {
        "xxh3_64": [[n, xxhash.xxh3_64_hexdigest(everything[:n])] for n in XXH3_LENGTHS],
        "blake2b": [
            [
                n,
                key,
                size,
                hashlib.blake2b(everything[:n], key=everything[:key], digest_size=size).hexdigest(),
            ]
            for n in BLAKE_LENGTHS
            for key in (0, 1, 16, 32, 64)
            for size in (16, 32, 64)
        ],
    }
    path = Path(__file__).with_name("hashes.json")
    path.write_text(json.dumps(vectors, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
