"""Slow definitions in numpy float64: what every kernel is tested against.

Imports nothing else of kvcore, so that a mistake there cannot hide here.
"""

from .attention import Attention, attention, merge_states, paged_attention
from .bounds import page_bounds, page_score_bounds
from .codecs import (
    CODEC_PARTS,
    block_bytes,
    check_block,
    decode_block,
    encode_block,
    k4_channels,
    split_block,
)
from .formats import FORMATS, STORAGE_DTYPE, UNIT_ROUNDOFF, decode, encode, from_bf16, to_bf16
from .geometry import Geometry, pack_k, pack_v, unpack_k, unpack_v, usable_prefix
from .keys import page_keys
from .store import (
    append_by_slots,
    gather,
    gather_from_blocks,
    read_slice,
    slots_of,
    write_slice,
)

__all__ = [
    "CODEC_PARTS",
    "FORMATS",
    "STORAGE_DTYPE",
    "UNIT_ROUNDOFF",
    "Attention",
    "Geometry",
    "append_by_slots",
    "attention",
    "block_bytes",
    "check_block",
    "decode",
    "decode_block",
    "encode",
    "encode_block",
    "from_bf16",
    "gather",
    "gather_from_blocks",
    "k4_channels",
    "merge_states",
    "pack_k",
    "pack_v",
    "page_bounds",
    "page_keys",
    "page_score_bounds",
    "paged_attention",
    "read_slice",
    "slots_of",
    "split_block",
    "to_bf16",
    "unpack_k",
    "unpack_v",
    "usable_prefix",
    "write_slice",
]
