"""Formats of sealed pages: the bytes of one head's K or V block, defined step by step in float32.

A block is a list of arrays, each starting at a multiple of 64 bytes with zero bytes between:

====  ====  ===========================================================================
int8  k     mean bf16 [D], scale f16 [P], codes u8 [P/TB][D/4][TB][4]
int8  v     scale f16 [P], codes s8 per dim block [P/4][DB][4]
fp8   k     mean bf16 [D], scale f16 [1], codes e4m3 [P/TB][D/2][TB][2]
fp8   v     scale f16 [1], codes e4m3 per dim block [P/2][DB][2]
k4    k     grid f16 [2], scale e4m3 [D], minimum s8 [D], nibbles [P/TB][D/8][TB][4]
v4    v     norm f16 [P], nibbles per dim block [P/8][DB][4]
v3    v     norm f16 [P], per dim block and 16 tokens: [DB][4] low bits, then high bits
====  ====  ===========================================================================

P = tokens, D = head_dim, TB = min(P, 64), DB = min(D - first, 64). Every operation below is one
IEEE single operation (round to nearest even, no fused multiply-add), so that any implementation
that follows the same steps gives the same bytes.
Source: docs/formats.md; KIVI 2402.02750 (per-channel K), QuaRot 2404.00456 and TurboQuant
2504.19874 (rotated V with a codebook), OCP 8-bit floating point specification (e4m3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .formats import from_bf16, to_bf16

Floats = NDArray[np.float32]
Block = NDArray[np.uint8]
Arrays = dict[str, NDArray[Any]]

CODEC_PARTS = {
    "int8": ("k", "v"), "fp8": ("k", "v"), "k4": ("k",), "v4": ("v",), "v3": ("v",),
}  # fmt: skip
MAX_MAGNITUDE = 65504.0  # largest f16; encoders refuse more
MIN_SCALE = np.float32(2.0**-24)  # smallest f16 above 0: what a scale of 0 becomes
ALIGN = 64
TOKEN_BLOCK = 64
DIM_BLOCK = 64
PAGE_SIZES = (16, 32, 64, 128)
MAX_DIM = 256
# Positive levels of a normal distribution's best codebook (Lloyd-Max), times UNITS, as integers:
# 0.07 % and 0.004 % above the least possible mean square error.
LEVELS = {"v4": (6, 18, 30, 43, 57, 74, 95, 125), "v3": (13, 40, 71, 114)}
UNITS = {"v4": np.float32(45.75), "v3": np.float32(53.0)}
# Signs of the dims in front of the Hadamard transform: bit d % 64 of word d // 64 set = minus.
# The words are the first 256 bits of the fraction of pi.
SIGN_WORDS = (0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89)


def _e4m3_values() -> Floats:
    code = np.arange(0x7F)
    exponent, mantissa = code >> 3, code & 7
    small, normal = mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0)
    return np.where(exponent == 0, small, normal).astype(np.float32)


E4M3 = _e4m3_values()  # of codes 0 to 0x7e: 0, 2^-9, ... 448


def sign_of_dims(dims: int) -> Floats:
    """The fixed signs [dims] of v4 and v3: +1 or -1."""
    bits = [SIGN_WORDS[d // 64] >> (d % 64) & 1 for d in range(dims)]
    return np.where(np.array(bits) == 1, np.float32(-1), np.float32(1))


def hadamard_width(dims: int) -> int:
    """Dims of one Hadamard block: the largest power of two that divides ``dims``."""
    return dims & -dims


def hadamard(rows: Floats) -> Floats:
    """Unnormalised Hadamard transform of rows [P, D] in blocks, float32.

    Stages with distance 1, 2, 4, ...: (a, b) becomes (a + b, a - b).
    """
    tokens, dims = rows.shape
    out = rows.astype(np.float32)
    distance = 1
    while distance < hadamard_width(dims):
        pairs = out.reshape(tokens, -1, 2, distance)
        a, b = pairs[:, :, 0], pairs[:, :, 1]
        out = np.stack([a + b, a - b], axis=2).reshape(tokens, dims)
        distance *= 2
    return out


def f16_up(values: Floats) -> NDArray[np.float16]:
    """Round non-negative float32 up to f16; 0 becomes the smallest f16 above 0."""
    near = values.astype(np.float16)
    up = np.where(near.astype(np.float32) < values, np.nextafter(near, np.float16(np.inf)), near)
    return np.maximum(up, np.float16(MIN_SCALE))


def to_e4m3(values: Floats) -> NDArray[np.uint8]:
    """Round float32 (at most 448 plus rounding) to e4m3, to nearest even code."""
    size = np.abs(values)
    middle = (E4M3[1:] + E4M3[:-1]) / np.float32(2)  # exact
    down, up = np.searchsorted(middle, size, "left"), np.searchsorted(middle, size, "right")
    code = np.where(down % 2 == 0, down, up).astype(np.uint8)
    return code | (np.signbit(values).astype(np.uint8) << np.uint8(7))


def from_e4m3(codes: NDArray[np.uint8]) -> Floats:
    """float32 values of e4m3 codes (NaN for 0x7f and 0xff)."""
    table = np.append(E4M3, np.float32(np.nan))
    sizes = table[codes & 0x7F].astype(np.float32)
    values: Floats = np.where(codes & 0x80, -sizes, sizes)
    return values


# --- where arrays lie --------------------------------------------------------------------------


def _shapes(fmt: str, part: str, tokens: int, dims: int) -> list[tuple[str, str, int]]:
    """(name, numpy dtype, elements) of a block's arrays, in order; the last one is the codes."""
    groups = sum(-(-min(dims - first, DIM_BLOCK) // 16) for first in range(0, dims, DIM_BLOCK))
    codes = {
        "int8": tokens * dims,
        "fp8": tokens * dims,
        "k4": tokens * dims // 2,
        "v4": tokens * dims // 2,
        "v3": tokens * dims // 4 + tokens // 16 * groups * 32,
    }[fmt]
    mean = [("mean", "<u2", dims)] if part == "k" and fmt != "k4" else []
    scales: list[tuple[str, str, int]] = {
        "int8": [("scale", "<f2", tokens)],
        "fp8": [("scale", "<f2", 1)],
        "k4": [("grid", "<f2", 2), ("scale", "|u1", dims), ("minimum", "|i1", dims)],
        "v4": [("norm", "<f2", tokens)],
        "v3": [("norm", "<f2", tokens)],
    }[fmt]
    return [*mean, *scales, ("codes", "|u1", codes)]


def _check_shape(fmt: str, part: str, tokens: int, dims: int) -> None:
    if part not in CODEC_PARTS.get(fmt, ()):
        raise ValueError(f"format {fmt!r} has no part {part!r}: allowed {CODEC_PARTS}")
    if tokens not in PAGE_SIZES:
        raise ValueError(f"tokens={tokens} is not allowed: expected one of {PAGE_SIZES}")
    if not 8 <= dims <= MAX_DIM or dims % 8:
        raise ValueError(f"dim={dims} is not allowed: multiples of 8 from 8 to {MAX_DIM}")


def block_bytes(fmt: str, part: str, tokens: int, dims: int) -> int:
    """Bytes of one head's block with all metadata; a multiple of 64."""
    _check_shape(fmt, part, tokens, dims)
    shapes = _shapes(fmt, part, tokens, dims)
    return sum(-(-count * np.dtype(kind).itemsize // ALIGN) * ALIGN for _, kind, count in shapes)


def split_block(fmt: str, part: str, block: Block, tokens: int, dims: int) -> Arrays:
    """The arrays of a block (uint8 [block_bytes]) by name; see the module's table."""
    arrays, at = {}, 0
    for name, kind, count in _shapes(fmt, part, tokens, dims):
        size = count * np.dtype(kind).itemsize
        arrays[name] = block[at : at + size].view(kind)
        at += -(-size // ALIGN) * ALIGN
    return arrays


def _join(fmt: str, part: str, tokens: int, dims: int, arrays: Arrays) -> Block:
    block = np.zeros(block_bytes(fmt, part, tokens, dims), np.uint8)
    for name, target in split_block(fmt, part, block, tokens, dims).items():
        target[:] = arrays[name].reshape(-1).view(target.dtype)
    return block


def _dim_blocks(dims: int) -> list[slice]:
    return [
        slice(first, min(first + DIM_BLOCK, dims)) for first in range(0, dims, DIM_BLOCK)
    ]  # fmt: skip


# --- order of codes ----------------------------------------------------------------------------
# Each takes or gives codes [P, D], one byte a value.


def _order_k(codes: Block, group: int) -> Block:
    """[P/TB][D/group][TB][group]."""
    tokens, dims = codes.shape
    lanes = min(tokens, TOKEN_BLOCK)
    cut = codes.reshape(tokens // lanes, lanes, dims // group, group)
    return cut.transpose(0, 2, 1, 3).reshape(-1)


def _unorder_k(flat: Block, group: int, tokens: int, dims: int) -> Block:
    lanes = min(tokens, TOKEN_BLOCK)
    cut = flat.reshape(tokens // lanes, dims // group, lanes, group)
    return cut.transpose(0, 2, 1, 3).reshape(tokens, dims)


def _order_v(codes: Block, group: int) -> Block:
    """Per dim block [P/group][DB][group]."""
    tokens = len(codes)
    parts = [
        codes[:, cut].reshape(tokens // group, group, -1).transpose(0, 2, 1).reshape(-1)
        for cut in _dim_blocks(codes.shape[1])
    ]
    return np.concatenate(parts)


def _unorder_v(flat: Block, group: int, tokens: int, dims: int) -> Block:
    codes = np.empty((tokens, dims), np.uint8)
    for cut in _dim_blocks(dims):
        width = cut.stop - cut.start
        part = flat[cut.start * tokens : cut.stop * tokens].reshape(tokens // group, width, group)
        codes[:, cut] = part.transpose(0, 2, 1).reshape(tokens, width)
    return codes


def _order_k4(codes: Block) -> Block:
    """[P/TB][D/8][TB][4]; byte b: low nibble dim 8i + b, high nibble dim 8i + 4 + b."""
    tokens, dims = codes.shape
    pairs = codes.reshape(tokens, dims // 8, 2, 4)
    packed = (pairs[:, :, 0] | pairs[:, :, 1] << 4).astype(np.uint8)
    return _order_k(packed.reshape(tokens, dims // 2), 4)


def _unorder_k4(flat: Block, tokens: int, dims: int) -> Block:
    packed = _unorder_k(flat, 4, tokens, dims // 2).reshape(tokens, dims // 8, 4)
    return np.stack([packed & 15, packed >> 4], axis=2).reshape(tokens, dims)


def _order_v4(codes: Block) -> Block:
    """Per dim block [P/8][DB][4]; byte b: low nibble token 8i + b, high nibble token 8i + 4 + b."""
    tokens, dims = codes.shape
    pairs = codes.reshape(tokens // 8, 2, 4, dims)
    packed = (pairs[:, 0] | pairs[:, 1] << 4).astype(np.uint8)
    return _order_v(packed.reshape(tokens // 2, dims), 4)


def _unorder_v4(flat: Block, tokens: int, dims: int) -> Block:
    packed = _unorder_v(flat, 4, tokens // 2, dims).reshape(tokens // 8, 4, dims)
    return np.stack([packed & 15, packed >> 4], axis=1).reshape(tokens, dims)


def _order_v3(codes: Block) -> Block:
    """Per dim block and 16 tokens: low bits [DB][4], then high bits [DB/16 rounded up][4] u64.

    Low: bits 2j of byte b are token 4j + b. High: bit 4 * lane + b of mask j is token 4j + b of
    dim 16i + lane.
    """
    tokens, dims = codes.shape
    parts = []
    for cut in _dim_blocks(dims):
        width = cut.stop - cut.start
        part = codes[:, cut].reshape(tokens // 16, 4, 4, width)  # group, j, b, dim
        shift = np.array([0, 2, 4, 6], np.uint8)[:, None, None]
        low = np.bitwise_or.reduce((part & 3) << shift, axis=1).transpose(0, 2, 1)
        padded = np.zeros((tokens // 16, 4, 4, -(-width // 16) * 16), np.uint8)
        padded[..., :width] = part >> 2
        lanes = padded.reshape(tokens // 16, 4, 4, -1, 16).transpose(0, 3, 1, 4, 2)
        high = np.packbits(lanes.reshape(tokens // 16, -1), axis=1, bitorder="little")
        parts.append(np.concatenate([low.reshape(tokens // 16, -1), high], axis=1).reshape(-1))
    return np.concatenate(parts)


def _unorder_v3(flat: Block, tokens: int, dims: int) -> Block:
    codes, at = np.empty((tokens, dims), np.uint8), 0
    for cut in _dim_blocks(dims):
        width, masks = cut.stop - cut.start, -(-(cut.stop - cut.start) // 16)
        size = tokens // 16 * (4 * width + 32 * masks)
        groups = flat[at : at + size].reshape(tokens // 16, -1)
        at += size
        bytes_ = groups[:, : 4 * width].reshape(tokens // 16, 1, width, 4).transpose(0, 1, 3, 2)
        low = bytes_ >> np.array([0, 2, 4, 6], np.uint8)[:, None, None] & 3  # group, j, b, dim
        bits = np.unpackbits(groups[:, 4 * width :], axis=1, bitorder="little")
        high = bits.reshape(tokens // 16, masks, 4, 16, 4).transpose(0, 2, 4, 1, 3)
        high = high.reshape(tokens // 16, 4, 4, masks * 16)[..., :width]
        codes[:, cut] = (low | high << 2).reshape(tokens, width)
    return codes


# --- values to codes and back ------------------------------------------------------------------


def _centred(rows: Floats) -> tuple[NDArray[np.uint16], Floats]:
    """bf16 means of the channels (float32 sum in token order; tiny ones become 0), rows minus."""
    total = np.zeros(rows.shape[1], np.float32)
    for row in rows:
        total = total + row
    mean = total / np.float32(len(rows))
    mean = np.where(np.abs(mean) < np.float32(2.0**-126), np.float32(0), mean)
    bits = to_bf16(mean)
    return bits, rows - from_bf16(bits)


def _encode_int8(rows: Floats, part: str) -> Arrays:
    arrays: Arrays = {}
    if part == "k":
        arrays["mean"], rows = _centred(rows)
    arrays["scale"] = f16_up(np.abs(rows).max(axis=1) / np.float32(127))
    inverse = np.float32(1) / arrays["scale"].astype(np.float32)
    codes = np.rint(rows * inverse[:, None]).astype(np.int16)
    stored = codes + 128 if part == "k" else codes & 255
    arrays["codes"] = (_order_k if part == "k" else _order_v)(stored.astype(np.uint8), 4)
    return arrays


def _decode_int8(arrays: Arrays, part: str, tokens: int, dims: int) -> Floats:
    scale = arrays["scale"].astype(np.float32)[:, None]
    if part == "v":
        return scale * _unorder_v(arrays["codes"], 4, tokens, dims).view(np.int8)
    codes = _unorder_k(arrays["codes"], 4, tokens, dims).astype(np.float32) - np.float32(128)
    return from_bf16(arrays["mean"]) + scale * codes


def _encode_fp8(rows: Floats, part: str) -> Arrays:
    arrays: Arrays = {}
    if part == "k":
        arrays["mean"], rows = _centred(rows)
    arrays["scale"] = f16_up(np.abs(rows).max(keepdims=True) / np.float32(448)).reshape(1)
    codes = to_e4m3(rows * (np.float32(1) / arrays["scale"].astype(np.float32)))
    arrays["codes"] = (_order_k if part == "k" else _order_v)(codes, 2)
    return arrays


def _decode_fp8(arrays: Arrays, part: str, tokens: int, dims: int) -> Floats:
    codes = (_unorder_k if part == "k" else _unorder_v)(arrays["codes"], 2, tokens, dims)
    values = from_e4m3(codes) * arrays["scale"].astype(np.float32)
    return from_bf16(arrays["mean"]) + values if part == "k" else values


def k4_channels(arrays: Arrays) -> tuple[Floats, Floats]:
    """Minimum and step of each channel, float32 [D]: a page's keys lie in [z, z + 15 s]."""
    grid_scale, grid_minimum = arrays["grid"].astype(np.float32)
    return arrays["minimum"] * grid_minimum, from_e4m3(arrays["scale"]) * grid_scale


def _encode_k4(rows: Floats, part: str) -> Arrays:
    low, high = rows.min(axis=0), rows.max(axis=0)
    grid_minimum = f16_up(np.abs(low).max(keepdims=True) / np.float32(127))
    grid = grid_minimum.astype(np.float32)
    minimum = np.floor(low / grid)
    minimum = minimum - (minimum * grid > low)  # the quotient was rounded up to an integer
    span = (high - minimum * grid) / np.float32(15)
    grid_scale = f16_up(span.max(keepdims=True) / np.float32(448))
    scale = np.searchsorted(E4M3, span / grid_scale.astype(np.float32), "left").astype(np.uint8)
    arrays: Arrays = {
        "grid": np.concatenate([grid_scale, grid_minimum]),
        "scale": np.maximum(scale, np.uint8(1)),
        "minimum": minimum.astype(np.int8),
    }
    z, step = k4_channels(arrays)
    codes = np.rint((rows - z) * (np.float32(1) / step)).astype(np.uint8)
    arrays["codes"] = _order_k4(codes)
    return arrays


def _decode_k4(arrays: Arrays, part: str, tokens: int, dims: int) -> Floats:
    z, step = k4_channels(arrays)
    return z + step * _unorder_k4(arrays["codes"], tokens, dims).astype(np.float32)


def _signed_levels(fmt: str) -> Floats:
    """Levels of codes 0, 1, ...: ascending."""
    positive = np.array(LEVELS[fmt], np.float32)
    return np.concatenate([-positive[::-1], positive])


def _encode_rotated(rows: Floats, fmt: str) -> Arrays:
    tokens, dims = rows.shape
    rotated = hadamard(rows * sign_of_dims(dims))
    sums = np.zeros((4, tokens), np.float32)
    for dim in range(dims):
        sums[dim % 4] += rotated[:, dim] * rotated[:, dim]
    energy = (sums[0] + sums[1]) + (sums[2] + sums[3])
    with np.errstate(divide="ignore", over="ignore"):
        unit = np.sqrt(np.float32(dims) / energy) * UNITS[fmt]
    unit = np.where(energy >= np.float32(2.0**-60), unit, np.float32(0))
    scaled = rotated * unit[:, None]
    levels = np.array(LEVELS[fmt], np.float32)
    middle = (levels[1:] + levels[:-1]) / np.float32(2)
    size = np.searchsorted(middle, np.abs(scaled), "left")
    half = len(levels)
    codes = np.where(np.signbit(scaled), half - 1 - size, half + size).astype(np.uint8)
    squares = (levels[size].astype(np.float32) ** 2).sum(axis=1, dtype=np.float32)  # exact
    norm = np.sqrt(energy / (squares * np.float32(hadamard_width(dims))))
    return {
        "norm": np.maximum(norm.astype(np.float16), np.float16(MIN_SCALE)),
        "codes": (_order_v4 if fmt == "v4" else _order_v3)(codes),
    }


def _decode_rotated(arrays: Arrays, fmt: str, tokens: int, dims: int) -> Floats:
    codes = (_unorder_v4 if fmt == "v4" else _unorder_v3)(arrays["codes"], tokens, dims)
    values = arrays["norm"].astype(np.float32)[:, None] * _signed_levels(fmt)[codes]
    factor = np.float32(1) / np.sqrt(np.float32(hadamard_width(dims)))
    rows: Floats = hadamard(values) * (sign_of_dims(dims) * factor)
    return rows


# --- the public three --------------------------------------------------------------------------


def encode_block(fmt: str, part: str, rows: NDArray[np.floating]) -> Block:
    """Compress one head's K or V of one whole page.

    Args:
        fmt: "int8", "fp8", "k4" (K only), "v4" or "v3" (V only). part: "k" or "v".
        rows: [P, D] numbers, taken as float32; P is 16, 32, 64 or 128, D a multiple of 8 up to 256.
    Returns:
        uint8 [block_bytes].
    Raises:
        ValueError: a shape that is not allowed; a value that is not finite or above 65504.
    """
    values = np.asarray(rows, np.float32)
    tokens, dims = values.shape
    _check_shape(fmt, part, tokens, dims)
    bad = np.argwhere(~(np.abs(values) <= np.float32(MAX_MAGNITUDE)))
    if len(bad):
        token, dim = bad[0]
        raise ValueError(f"{part}[{token}, {dim}]={values[token, dim]} is not allowed: +-65504")
    encoders: dict[str, Callable[[Floats, str], Arrays]] = {
        "int8": _encode_int8, "fp8": _encode_fp8, "k4": _encode_k4,
    }  # fmt: skip
    encoder = encoders.get(fmt)
    arrays = encoder(values, part) if encoder else _encode_rotated(values, fmt)
    return _join(fmt, part, tokens, dims, arrays)


def decode_block(fmt: str, part: str, block: Block, tokens: int, dims: int) -> Floats:
    """The numbers a block stands for: float32 [tokens, dims]."""
    _check_shape(fmt, part, tokens, dims)
    arrays = split_block(fmt, part, block, tokens, dims)
    decoders: dict[str, Callable[[Arrays, str, int, int], Floats]] = {
        "int8": _decode_int8, "fp8": _decode_fp8, "k4": _decode_k4,
    }  # fmt: skip
    decoder = decoders.get(fmt)
    if decoder:
        return decoder(arrays, part, tokens, dims)
    return _decode_rotated(arrays, fmt, tokens, dims)


def check_block(fmt: str, part: str, block: Block, tokens: int, dims: int) -> None:
    """Refuse a block no encoder writes: ValueError naming the array, place and value.

    Scales, norms and grids must be finite and above 0, means finite, e4m3 codes no NaN.
    """
    if len(block) != block_bytes(fmt, part, tokens, dims):
        raise ValueError(f"block has {len(block)} bytes")
    arrays = split_block(fmt, part, block, tokens, dims)
    for name, array in arrays.items():
        if array.dtype == np.float16:
            bad = ~(np.isfinite(array) & (array > 0))
        elif name == "mean":
            bad = ~np.isfinite(from_bf16(array))
        elif name == "scale":
            bad = (array == 0) | (array >= 0x7F)
        elif name == "codes" and fmt == "fp8":
            bad = array & 0x7F == 0x7F
        else:
            continue
        if bad.any():
            place = int(np.argmax(bad))
            raise ValueError(f"{name}[{place}]={array[place]} is not allowed")
