"""Attention and the merging of partial results, in float64.

Causal masks are aligned bottom-right: the last query row of a sequence sees its whole context.
Every result has its LSE (natural logarithm of the sum of exp of scaled scores); a row that sees
nothing gives out = 0 and lse = -inf.
Source: Vaswani et al. 2017 (3.2.1); FlashInfer 2501.01005, section 2.2 (merge of states).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .geometry import Geometry
from .store import Bytes, gather

Array = NDArray[np.float64]


class Attention(NamedTuple):
    """Result of an attention, float64.

    out [T, Hq, Dv]; lse [T, Hq]; weight_abs [T, Hq, Dv] = sum of p * |v|; weight_square [T, Hq, Dv]
    = sum of (p * v)^2; score_abs [T, Hq] = largest scale * sum of |q_d * k_d| over visible tokens.
    The last three are the condition numbers that rounding-error bounds are made of.
    """

    out: Array
    lse: Array
    weight_abs: Array
    weight_square: Array
    score_abs: Array


def attention(
    q: Array,
    k: Array,
    v: Array,
    positions: NDArray[np.int64],
    scale: float,
    *,
    window: int = 0,
    soft_cap: float = 0.0,
) -> Attention:
    """Attention of rows over the tokens of one sequence.

    Args:
        q: [T, Hq, Dk]. k: [C, H, Dk]. v: [C, H, Dv]. Hq is a multiple of H; query head h reads KV
            head h // (Hq // H).
        positions: int64 [T]; row t sees tokens 0 .. positions[t]; negative sees none.
        scale: factor on the scores.
        window: row t sees tokens above positions[t] - window only; 0: from token 0 on.
        soft_cap: c > 0 turns scaled scores s into c tanh(s / c).
    Returns:
        :class:`Attention`.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    rows, num_q_heads, _ = q.shape
    context, num_kv_heads, dim_v = v.shape
    q = q.reshape(rows, num_kv_heads, num_q_heads // num_kv_heads, q.shape[2])  # [T, H, G, Dk]
    keys, values = k.transpose(1, 2, 0), v.transpose(1, 0, 2)  # [H, Dk, C], [H, C, Dv]
    key_sizes, value_sizes, value_squares = np.abs(keys), np.abs(values), values * values
    shape = q.shape[:3]
    out = np.zeros((*shape, dim_v))
    weight_abs, weight_square = np.zeros_like(out), np.zeros_like(out)
    lse, score_abs = np.full(shape, -np.inf), np.zeros(shape)
    ends = np.asarray(positions, np.int64) + 1
    starts = np.maximum(ends - window, 0) if window else np.zeros_like(ends)
    for row, (start, end) in enumerate(zip(starts, np.minimum(ends, context), strict=True)):
        seen = slice(start, end)
        if end <= start:
            continue
        scores = scale * (q[row] @ keys[:, :, seen])  # [H, G, count]
        if soft_cap:
            scores = soft_cap * np.tanh(scores / soft_cap)
        top = scores.max(axis=2, keepdims=True)
        weights = np.exp(scores - top)
        total = weights.sum(axis=2, keepdims=True)
        p = weights / total
        out[row] = p @ values[:, seen]
        lse[row] = (top + np.log(total))[..., 0]
        weight_abs[row] = p @ value_sizes[:, seen]
        weight_square[row] = (p * p) @ value_squares[:, seen]
        score_abs[row] = scale * (np.abs(q[row]) @ key_sizes[:, :, seen]).max(axis=2)
    flat = (rows, num_q_heads)
    wide = (*flat, dim_v)
    return Attention(
        out.reshape(wide),
        lse.reshape(flat),
        weight_abs.reshape(wide),
        weight_square.reshape(wide),
        score_abs.reshape(flat),
    )


def paged_attention(
    q: Array,
    arena: Bytes,
    geo: Geometry,
    layer: int,
    cu_seqlens_q: NDArray[np.int32],
    context_lens: NDArray[np.int32],
    block_table: NDArray[np.int32],
    scale: float,
    *,
    shift: int = 0,
    window: int = 0,
    soft_cap: float = 0.0,
) -> Attention:
    """Causal attention of a batch over pages.

    Args:
        q: [total tokens, Hq, Dk], rows of all sequences one after the other.
        arena, geo: bytes and their geometry; layer: which layer.
        cu_seqlens_q: int32 [num_seqs + 1]. context_lens: int32 [num_seqs], new tokens counted.
        block_table: int32 [num_seqs, max_pages].
        scale: factor on the scores.
        shift: added to every row's position. 0 is right; +1 and -1 are the classic mistakes of one,
            there so that tests can show that they would notice them.
        window, soft_cap: see :func:`attention`. Pages that no row sees are not read.
    Returns:
        :class:`Attention` over all rows.
    """
    parts = []
    for seq, context in enumerate(np.asarray(context_lens).tolist()):
        first, last = int(cu_seqlens_q[seq]), int(cu_seqlens_q[seq + 1])
        positions = context - (last - first) + np.arange(last - first) + shift
        unseen = max(context - (last - first) + shift + 1 - window, 0) if window else 0
        pages = np.array(block_table[seq])
        first_page = min(unseen // geo.page_size, max(len(pages) - 1, 0))
        pages[:first_page] = pages[first_page:][:1]  # not read: any that is there
        k, v = gather(arena, geo, layer, pages, context)
        rows = q[first:last]
        parts.append(attention(rows, k, v, positions, scale, window=window, soft_cap=soft_cap))
    return Attention(*(np.concatenate(field) for field in zip(*parts, strict=True)))


def merge_states(out_a: Array, lse_a: Array, out_b: Array, lse_b: Array) -> tuple[Array, Array]:
    """Merge two partial results over disjoint tokens.

    Args:
        out_a, out_b: [..., Dv]; lse_a, lse_b: [...], natural logarithm, -inf = saw nothing.
    Returns:
        out [..., Dv], lse [...], float64; an empty side changes nothing.
    """
    out_a, lse_a, out_b, lse_b = (np.asarray(x, np.float64) for x in (out_a, lse_a, out_b, lse_b))
    lse = np.logaddexp(lse_a, lse_b)
    base = np.where(np.isneginf(lse), 0.0, lse)
    weight_a, weight_b = np.exp(lse_a - base), np.exp(lse_b - base)
    return weight_a[..., None] * out_a + weight_b[..., None] * out_b, lse
