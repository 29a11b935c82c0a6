"""Names of pages: a keyed hash chain over units of tokens.

key_0 = parent of the first unit = 32 zero bytes
key_i = BLAKE2b-256(key = secret, message = namespace digest | key_{i-1} | tokens)
tokens are int32, little-endian.
Source: DESIGN "Key"; RFC 7693.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

KEY_BYTES = 32
ROOT = bytes(KEY_BYTES)


def page_keys(
    secret: bytes, namespace: bytes, tokens: Sequence[int], unit: int = 64
) -> list[bytes]:
    """Keys of the whole units of a token sequence.

    Args:
        secret: deployment secret, at most 64 bytes. namespace: digest of what KV depends on besides
            tokens, 32 bytes. tokens: token ids (int32 range). unit: tokens per key.
    Returns:
        32-byte keys, one per whole unit; a rest shorter than a unit has none.
    """
    ids = np.asarray(tokens, "<i4")
    keys, parent = [], ROOT
    for first in range(0, len(ids) - unit + 1, unit):
        message = namespace + parent + ids[first : first + unit].tobytes()
        parent = hashlib.blake2b(message, key=secret, digest_size=KEY_BYTES).digest()
        keys.append(parent)
    return keys
