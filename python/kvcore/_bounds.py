"""Bounds of pages for query-aware selection; part of :mod:`kvcore.kernels`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvcore import _core
from kvcore._tensors import DTYPE_CODES, dense_float32, describe, int32, rows
from kvcore.errors import InvalidArgument

if TYPE_CHECKING:
    from kvcore.kernels import TensorPages
    from kvcore.pages import Pool


def page_bounds(
    pool: Pool | TensorPages,
    layer: int,
    page_ids: npt.ArrayLike,
    valid_tokens: npt.ArrayLike,
    out: Any = None,
) -> Any:
    """The least and the largest number of each channel of pages' keys, in one layer.

    Args:
        layer: 0 to num_layers - 1.
        page_ids: int32 [pages]; one is not looked at where there are no valid tokens.
        valid_tokens: int32 [pages], tokens that a page holds, 0 to page_size. Others never show.
        out: float32 [pages, num_kv_heads, 2, head_dim_k] to write, least then largest; None
            allocates a numpy array.

    Returns:
        out. Keys are those that attention reads: decoded, where pages are compressed. ``k4`` keys
        are bounded by their block's minima and scales, all tokens of the page together; other
        bounds are exact. A page without valid tokens has (+inf, -inf).

    Raises:
        InvalidArgument: names the entry, its value and the allowed range.
    """
    ids, tokens = int32(page_ids), int32(valid_tokens)
    s = pool.spec
    shape = (ids.shape[0] if ids.ndim else 0, s.num_kv_heads, 2, s.head_dim_k)
    if out is None:
        out = np.empty(shape, np.float32)
    to = dense_float32("out", out, shape, write=True)
    _core.kernels.page_bounds_ptr(pool.view_address, layer, ids, tokens, to.ptr)
    return out


def page_score_bounds(q: Any, bounds: Any, scale: float | None = None, out: Any = None) -> Any:
    """What queries can at most score on each page: no key of the page scores more.

    ``scale * max over the q heads of a KV head of sum over d of max(q_d least_d, q_d largest_d)``.
    Pages are read for all q heads of a KV head together, hence the largest of the group.

    Args:
        q: [rows, num_q_heads, head_dim], any float dtype; num_q_heads a multiple of num_kv_heads.
        bounds: float32 [pages, num_kv_heads, 2, head_dim] of :func:`page_bounds`; head_dim a
            multiple of 16 from 16 to 1024.
        scale: softmax scale; None = 1 / sqrt(head_dim).
        out: float32 [rows, num_kv_heads, pages] to write; None allocates a numpy array.

    Returns:
        out; -inf for pages without tokens. Sums are float32: a bound may lie below an exact score
        by its rounding, 2 * head_dim * 2^-24 of the sum of its terms' magnitudes at most.

    Raises:
        InvalidArgument: names the field, its value and what is allowed.

    Source: Tang et al. 2024, Quest (2406.10774), section 3.2.
    """
    shape = describe("bounds", bounds).shape
    if len(shape) != 4 or shape[2] != 2:
        raise InvalidArgument(
            f"bounds has shape {list(shape)}: expected [pages, num_kv_heads, 2, head_dim]"
        )
    pages, kv_heads, _, dim = shape
    b = dense_float32("bounds", bounds, shape)
    wanted = describe("q", q).shape
    if len(wanted) != 3:
        raise InvalidArgument(f"q has shape {list(wanted)}: expected [rows, num_q_heads, {dim}]")
    qt = rows("q", q, (wanted[0], wanted[1], dim))
    if out is None:
        out = np.empty((wanted[0], kv_heads, pages), np.float32)
    to = dense_float32("out", out, (wanted[0], kv_heads, pages), write=True)
    _core.kernels.page_score_bounds_ptr(
        qt.ptr, qt.strides[0], DTYPE_CODES[qt.dtype], wanted[0], wanted[1], b.ptr, pages, kv_heads,
        dim, dim**-0.5 if scale is None and dim else scale or 0.0, to.ptr,
    )  # fmt: skip
    return out
