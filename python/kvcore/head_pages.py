"""Pruned sequences: every (layer, KV head) keeps tokens of its own, and the bytes really fall.

:func:`compact` copies the kept tokens of a sequence into *head pages*, pages of one layer and one
KV head in a pool of their own (:func:`head_pool`); :class:`HeadAttention` appends to them and
attends to them. Which tokens to keep is the caller's choice. See ``csrc/compress/head_pages.h`` and
``docs/kernels.md``. A decoding step::

    heads.grow(1)
    attention.prepare([heads])
    for layer in range(num_layers):
        attention.run(layer, q, k, v, out)  # tensors of [tokens, heads, head_dim], as unpruned
    heads.seal(classes)  # where head pages are to be compressed
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore import _core
from kvcore._tensors import dense_float32, rows, same_dtype
from kvcore.errors import InvalidArgument
from kvcore.pages import PageClass, PageSpec, Pool

__all__ = ["HeadAttention", "HeadPages", "compact", "head_classes", "head_pool"]

HeadPages = _core.compress.HeadPages


def head_pool(
    spec: PageSpec,
    num_pages: int,
    page_size: int | None = None,
    *,
    page_ids: int = 0,
    huge_pages: bool = True,
) -> Pool:
    """A pool of head pages for sequences whose pages are those of ``spec``.

    Args:
        spec: of the sequences to prune.
        num_pages: open head pages that the bytes hold: K and V of ``page_size`` tokens of one head
            and a header of 64 bytes each, without any rounding.
        page_size: None = that of ``spec``. A head has half a page free on average, so heads that
            keep a few hundred tokens want 16 or 32.
        page_ids: see :class:`kvcore.pages.Pool`; compressed head pages need more than the default.
    """
    size = page_size or spec.page_size
    head = PageSpec(
        1, 1, spec.head_dim_k, spec.head_dim_v, size, 1, spec.format, spec.layout, align_bytes=64
    )
    return Pool(head, num_pages, huge_pages=huge_pages, page_ids=page_ids)


def head_classes(pool: Pool, table: PageClass) -> list[int]:
    """What :meth:`HeadPages.seal` wants, for the formats of a model's pages.

    Args:
        pool: of head pages; gets a class for each pair of formats.
        table: of the sequences to prune, say ``compress.profile_class(model, "balanced")``.
    """
    own = pool.spec.format
    return [
        0 if pair == (own, own) else pool.add_class(PageClass(pool.spec, [[pair]]))
        for layer in table.formats
        for pair in layer
    ]


def compact(
    pool: Pool,
    pages: Sequence[int],
    num_tokens: int,
    kept: npt.NDArray[np.bool_] | Sequence[Sequence[npt.ArrayLike]],
    head_pool: Pool,
) -> HeadPages:
    """Head pages with the kept tokens of a sequence, closed up in order; its pages stay.

    Args:
        pool, pages: of the sequence, in order; open or compressed, owned by the caller.
        num_tokens: in these pages.
        kept: a mask [num_layers, num_kv_heads, num_tokens], or per layer and KV head the positions,
            ascending from 0 to num_tokens - 1. None at all is allowed: such a head attends to
            tokens that come later.
        head_pool: from :func:`head_pool`; a smaller page_size is allowed.

    Raises:
        InvalidArgument: names the head, the position and what is allowed.
        OutOfPages: nothing was taken.
    """
    layers, heads = pool.spec.num_layers, pool.spec.num_kv_heads
    if isinstance(kept, np.ndarray) and kept.dtype == np.bool_:
        if kept.shape != (layers, heads, num_tokens):
            raise InvalidArgument(
                f"kept has shape {list(kept.shape)}: expected {[layers, heads, num_tokens]}"
            )
        positions = np.nonzero(kept)[2].astype(np.int32)
        counts = kept.sum(axis=2).reshape(-1)
    else:
        if len(kept) != layers or any(len(layer) != heads for layer in kept):
            raise InvalidArgument(f"kept has other entries than {layers} layers of {heads} heads")
        each = [_positions(head) for layer in kept for head in layer]
        positions = np.concatenate(each)
        counts = np.array([len(head) for head in each])
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return _core.compress.compact(pool, pages, num_tokens, positions, offsets, head_pool)


def _positions(x: npt.ArrayLike) -> npt.NDArray[np.int32]:
    array = np.asarray(x)
    if array.size == 0:
        return np.empty(0, np.int32)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise InvalidArgument(
            f"positions are {array.dtype} {list(array.shape)}: expected integers in one dimension"
        )
    bounds = np.iinfo(np.int32)
    within = np.clip(array, bounds.min, bounds.max)  # out of range still, where it was
    return np.asarray(within, np.int32)


class HeadAttention(_core.compress.HeadAttention):
    """Paged attention of a batch of pruned sequences, prepared once and run for every layer.

    Args:
        pool: of the head pages.
        num_layers, num_kv_heads: of the sequences.
        num_q_heads: a multiple of ``num_kv_heads``.
        scale: softmax scale; None = 1 / sqrt(head_dim_k).
        threads: a :class:`kvcore.kernels.ThreadPool`, or None for the calling thread alone.

    A row's bits depend only on its query and its head's pages, and equal those of
    :class:`kvcore.kernels.AttentionPlan` over the same tokens. Used by one thread at a time.
    """

    def __init__(
        self,
        pool: Pool,
        num_layers: int,
        num_kv_heads: int,
        num_q_heads: int,
        scale: float | None = None,
        threads: _core.kernels.ThreadPool | None = None,
    ) -> None:
        if scale is not None and not scale > 0:
            raise InvalidArgument(f"scale={scale} is out of range: allowed above 0")
        super().__init__(pool, num_layers, num_kv_heads, num_q_heads, scale or 0.0, threads)
        self.pool = pool

    def prepare(
        self, sequences: Sequence[HeadPages], cu_seqlens_q: Sequence[int] | None = None
    ) -> None:
        """Describe the batch of the next calls; tables and lengths are copied.

        Args:
            sequences: after :meth:`HeadPages.grow`, which has counted their new tokens.
            cu_seqlens_q: [num_seqs + 1], 0 first: new tokens of sequence s are rows
                cu_seqlens_q[s] to cu_seqlens_q[s + 1], the last ones of every head. None: one each.

        Raises:
            InvalidArgument: released, or pages of another pool or model.
        """
        starts = range(len(sequences) + 1) if cu_seqlens_q is None else cu_seqlens_q
        super().prepare(sequences, list(starts))

    def append(self, layer: int, k: Any, v: Any) -> None:
        """Write the batch's new tokens into every head's pages.

        Args:
            layer: 0 to num_layers - 1.
            k: [tokens, num_kv_heads, head_dim_k] (or the last two flattened), any float dtype.
            v: [tokens, num_kv_heads, head_dim_v], same dtype as k.
        """
        s = self.pool.spec
        kt = rows("k", k, (self.num_tokens, self.num_kv_heads, s.head_dim_k))
        vt = rows("v", v, (self.num_tokens, self.num_kv_heads, s.head_dim_v))
        code = same_dtype("k", kt, "v", vt)
        self.append_ptr(layer, kt.ptr, kt.strides[0], vt.ptr, vt.strides[0], code)

    def attend(self, layer: int, q: Any, out: Any, lse: Any = None) -> None:
        """Causal attention of the batch's new tokens over what each head holds.

        Args:
            layer: 0 to num_layers - 1.
            q: [tokens, num_q_heads, head_dim_k] (or the last two flattened).
            out: [tokens, num_q_heads, head_dim_v], written; same dtype as q.
            lse: float32 [tokens, num_q_heads], written: natural log of the softmax denominator.
        """
        s, n = self.pool.spec, self.num_tokens
        qt = rows("q", q, (n, self.num_q_heads, s.head_dim_k))
        ot = rows("out", out, (n, self.num_q_heads, s.head_dim_v), write=True)
        code = same_dtype("q", qt, "out", ot)
        lse_ptr = (
            0 if lse is None else dense_float32("lse", lse, (n, self.num_q_heads), write=True).ptr
        )
        self.attend_ptr(layer, qt.ptr, qt.strides[0], ot.ptr, ot.strides[0], lse_ptr, code)

    def run(self, layer: int, q: Any, k: Any, v: Any, out: Any, lse: Any = None) -> None:
        """:meth:`append` followed by :meth:`attend`."""
        self.append(layer, k, v)
        self.attend(layer, q, out, lse)
