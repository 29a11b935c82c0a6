"""KV in an arena of bytes: reading and writing slices, appending tokens, gathering a sequence.

An arena is a numpy uint8 array [bytes]; stored elements have the dtype of the page's format.
Source: csrc/base/page_layout.h (layout), DESIGN "The page".
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .formats import STORAGE_DTYPE, Elements, decode
from .geometry import Geometry, pack_k, pack_v, unpack_k, unpack_v

Bytes = NDArray[np.uint8]


def _block(arena: Bytes, offset: int, num_bytes: int, fmt: str) -> Elements:
    return arena[offset : offset + num_bytes].view(STORAGE_DTYPE[fmt])


def read_slice(arena: Bytes, geo: Geometry, page: int, layer: int) -> tuple[Elements, Elements]:
    """Stored elements of one slice, canonical.

    Returns:
        k [page_size, H, Dk], v [page_size, H, Dv]: copies, uint16 bits for bf16.
    """
    size, heads = geo.page_size, geo.num_kv_heads
    k = np.empty((size, heads, geo.head_dim_k), STORAGE_DTYPE[geo.fmt])
    v = np.empty((size, heads, geo.head_dim_v), STORAGE_DTYPE[geo.fmt])
    for head in range(heads):
        k_at, v_at = geo.block_offsets(page, layer, head)
        k_flat = _block(arena, k_at, geo.k_block_bytes, geo.fmt)
        v_flat = _block(arena, v_at, geo.v_block_bytes, geo.fmt)
        if geo.layout == "packed":
            k[:, head] = unpack_k(k_flat, size, geo.head_dim_k, geo.fmt)
            v[:, head] = unpack_v(v_flat, size, geo.head_dim_v, geo.fmt)
        else:
            k[:, head] = k_flat.reshape(size, geo.head_dim_k)
            latent = k[:, head, : geo.head_dim_v]
            v[:, head] = latent if geo.latent else v_flat.reshape(size, geo.head_dim_v)
    return k, v


def write_slice(
    arena: Bytes, geo: Geometry, page: int, layer: int, k: Elements, v: Elements
) -> None:
    """Write one slice from canonical stored elements k [page_size, H, Dk], v [page_size, H, Dv].

    The slice header is left as it is.
    """
    for head in range(geo.num_kv_heads):
        k_at, v_at = geo.block_offsets(page, layer, head)
        k_flat = _block(arena, k_at, geo.k_block_bytes, geo.fmt)
        v_flat = _block(arena, v_at, geo.v_block_bytes, geo.fmt)
        if geo.layout == "packed":
            k_flat[:] = pack_k(k[:, head], geo.fmt)
            v_flat[:] = pack_v(v[:, head], geo.fmt)
        else:
            k_flat[:] = k[:, head].reshape(-1)
            if not geo.latent:
                v_flat[:] = v[:, head].reshape(-1)


def append_by_slots(
    arena: Bytes,
    geo: Geometry,
    layer: int,
    k: Elements,
    v: Elements,
    slot_mapping: NDArray[np.int64],
) -> None:
    """Write token i of k [T, H, Dk], v [T, H, Dv] (stored elements) to slot ``slot_mapping[i]``.

    A slot is page * page_size + place in the page; a negative slot is a token that is not stored.
    """
    for token, slot in enumerate(np.asarray(slot_mapping, np.int64).tolist()):
        if slot < 0:
            continue
        page, place = divmod(slot, geo.page_size)
        page_k, page_v = read_slice(arena, geo, page, layer)
        page_k[place], page_v[place] = k[token], v[token]
        write_slice(arena, geo, page, layer, page_k, page_v)


def slots_of(
    geo: Geometry,
    cu_seqlens_q: NDArray[np.int32],
    context_lens: NDArray[np.int32],
    block_table: NDArray[np.int32],
) -> NDArray[np.int64]:
    """Slots of a batch's new tokens: token i of sequence s stands at context_len - q_len + i.

    Args:
        cu_seqlens_q: int32 [num_seqs + 1], first query row of each sequence, then the total.
        context_lens: int32 [num_seqs], tokens in the KV with the new ones counted.
        block_table: int32 [num_seqs, max_pages], page ids.
    Returns:
        int64 [total tokens]; -1 for a token in front of position 0 (q_len > context_len).
    """
    slots = []
    for seq, context in enumerate(np.asarray(context_lens).tolist()):
        q_len = int(cu_seqlens_q[seq + 1]) - int(cu_seqlens_q[seq])
        for position in range(context - q_len, context):
            if position < 0:
                slots.append(-1)
                continue
            page, place = divmod(position, geo.page_size)
            slots.append(int(block_table[seq, page]) * geo.page_size + place)
    return np.asarray(slots, np.int64)


def gather(
    arena: Bytes, geo: Geometry, layer: int, pages: NDArray[np.int32], num_tokens: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The first ``num_tokens`` tokens of a sequence whose pages are ``pages``, as numbers.

    Returns:
        k [num_tokens, H, Dk], v [num_tokens, H, Dv], float64.
    """
    needed = -(-num_tokens // geo.page_size)
    ks = [np.empty((0, geo.num_kv_heads, geo.head_dim_k))]
    vs = [np.empty((0, geo.num_kv_heads, geo.head_dim_v))]
    for page in np.asarray(pages).reshape(-1)[:needed].tolist():
        k, v = read_slice(arena, geo, int(page), layer)
        ks.append(decode(k, geo.fmt))
        vs.append(decode(v, geo.fmt))
    return np.concatenate(ks)[:num_tokens], np.concatenate(vs)[:num_tokens]


def gather_from_blocks(
    cache: Elements,
    fmt: str,
    blocks: NDArray[np.int32],
    num_tokens: int,
    *,
    head_major: bool = False,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The same from another engine's tensor, as a pure definition.

    Args:
        cache: stored elements [num_blocks, 2, block, heads, dim] ("NHD"), or with ``head_major``
            [num_blocks, 2, heads, block, dim] ("HND"); index 0 of axis 1 is K, 1 is V.
        blocks: int32 block ids of the sequence, in order.
        num_tokens: tokens wanted.
    Returns:
        k, v [num_tokens, heads, dim], float64.
    """
    part = np.asarray(cache)[np.asarray(blocks, np.int64)]
    if head_major:
        part = part.transpose(0, 1, 3, 2, 4)
    both = decode(np.ascontiguousarray(part), fmt).transpose(1, 0, 2, 3, 4)
    k, v = both.reshape(2, -1, *both.shape[3:])[:, :num_tokens]
    return k, v
