"""Writes page_keys.json with hashlib only: python tests/python/keys/golden/make_page_keys.py."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

FIELDS = [
    "tenant_salt",
    "model_id",
    "weights_epoch",
    "kv_geometry",
    "dtype",
    "rope",
    "lora",
    "multimodal",
]


def namespace_digest(values: dict[str, str]) -> bytes:
    """BLAKE2b-256 over tag length, tag, value length, value (lengths uint32 little-endian)."""
    message = b""
    for tag in FIELDS:
        for text in (tag, values[tag]):
            raw = text.encode()
            message += struct.pack("<I", len(raw)) + raw
    return hashlib.blake2b(message, digest_size=32).digest()


def page_keys(secret: bytes, digest: bytes, tokens: list[int], unit: int) -> list[bytes]:
    keys, parent = [], bytes(32)
    for i in range(len(tokens) // unit):
        part = struct.pack(f"<{unit}i", *tokens[i * unit : (i + 1) * unit])
        parent = hashlib.blake2b(digest + parent + part, key=secret, digest_size=32).digest()
        keys.append(parent)
    return keys


def tokens_of(n: int, seed: int) -> list[int]:
    return [(i * 7919 + seed * 104_729) % 49_152 for i in range(n)]


def main() -> None:
    cases = []
    for index, (secret, n, unit) in enumerate(
        [(b"", 0, 64), (b"", 200, 64), (b"k" * 64, 129, 64), (b"s", 128, 64), (b"s", 97, 16)]
    ):
        values = {tag: f"{tag}-{index}" for tag in FIELDS}
        values["lora"] = ""
        digest = namespace_digest(values)
        keys = page_keys(secret, digest, tokens_of(n, index), unit)
        cases.append(
            {
                "secret": secret.hex(),
                "namespace": values,
                "digest": digest.hex(),
                "num_tokens": n,
                "seed": index,
                "unit": unit,
                "keys": [key.hex() for key in keys],
            }
        )
    path = Path(__file__).with_name("page_keys.json")
    path.write_text(json.dumps(cases, indent=1) + "\n")


if __name__ == "__main__":
    main()
