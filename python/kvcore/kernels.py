"""Paged attention and its companions on the CPU: :class:`AttentionPlan`, merge, layout copies.

Tensors may be numpy arrays, torch tensors or anything with ``__dlpack__``, on the CPU. Element
types: float32, float16, bfloat16; numpy arrays of uint16 hold bfloat16 bit patterns. Each function
also has a ``*_ptr`` form that takes addresses and strides in elements: the fast path of
``kvcore.ops``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore import _core
from kvcore._bounds import page_bounds, page_score_bounds
from kvcore._tensors import DTYPE_CODES
from kvcore._tensors import Tensor as _Tensor
from kvcore._tensors import dense_float32 as _lse
from kvcore._tensors import describe as _describe
from kvcore._tensors import int32 as _int32
from kvcore._tensors import rows as _rows
from kvcore._tensors import same_dtype as _same_dtype
from kvcore.errors import InvalidArgument
from kvcore.pages import Pool

__all__ = [
    "DTYPE_CODES",
    "AttentionPlan",
    "TensorPages",
    "TensorSpec",
    "ThreadPool",
    "append_kv",
    "append_kv_ptr",
    "available_isas",
    "block_bytes",
    "check_block",
    "check_block_ptr",
    "copy_pages",
    "decode_block",
    "decode_block_ptr",
    "encode_block",
    "encode_block_ptr",
    "isa",
    "merge_states",
    "merge_states_ptr",
    "pack_slice",
    "page_bounds",
    "page_bounds_ptr",
    "page_score_bounds",
    "page_score_bounds_ptr",
    "rms_norm_ptr",
    "rope_ptr",
    "set_isa",
    "silu_mul_ptr",
    "unpack_slice",
]

append_kv_ptr = _core.kernels.append_kv_ptr
check_block_ptr = _core.kernels.check_block_ptr
decode_block_ptr = _core.kernels.decode_block_ptr
encode_block_ptr = _core.kernels.encode_block_ptr
merge_states_ptr = _core.kernels.merge_states_ptr
page_bounds_ptr = _core.kernels.page_bounds_ptr
page_score_bounds_ptr = _core.kernels.page_score_bounds_ptr
rms_norm_ptr = _core.kernels.rms_norm_ptr
rope_ptr = _core.kernels.rope_ptr
silu_mul_ptr = _core.kernels.silu_mul_ptr


class ThreadPool(_core.kernels.ThreadPool):
    """A fixed team of threads, the caller included: ``ThreadPool(num_threads, cpus=None)``.

    Args:
        num_threads: 1 to 256; 1 runs everything in the calling thread.
        cpus: one CPU number per thread; worker i (from 1) is pinned to ``cpus[i]``. The calling
            thread keeps its own affinity. None: not pinned.

    ``.spins`` tells whether idle workers spin before they sleep: only when the team fits the
    process's affinity mask. Raises InvalidArgument for values out of range.
    """


def isa() -> str:
    """The instruction set level in use: "scalar", "avx2" or "avx512" (environment: KVCORE_ISA)."""
    return _core.kernels.isa()


def set_isa(name: str) -> None:
    """Use the named level from now on. Raises InvalidArgument naming the allowed ones."""
    _core.kernels.set_isa(name)


def available_isas() -> list[str]:
    """The levels this machine and build can run, slowest first."""
    return _core.kernels.available_isas()


@dataclass(frozen=True)
class TensorSpec:
    """Geometry of :class:`TensorPages`; the fields of :class:`kvcore.pages.PageSpec` it has."""

    num_layers: int
    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    page_size: int
    format: str


class TensorPages:
    """Pages in the KV tensors of another engine: every block of a tensor is a page, used in place.

    Args:
        caches: per layer one tensor [num_blocks, 2, block, heads, head_dim] (index 0 is K, 1 is V),
            or a pair (k, v) of [num_blocks, block, heads, head_dim]; with ``order="HND"`` heads
            stand before block. numpy arrays, torch CPU tensors or DLPack objects of float32,
            float16 or bfloat16; only head_dim has to be contiguous. A view of a tensor with another
            order of dimensions does as well.
        order: "NHD" or "HND".
        writable: False for memory that is only to be read, such as what a peer lends
            (:meth:`kvcore.transport.Link.borrow`): appends are refused then.

    ``block`` is 16, 32, 64 or 128. :class:`AttentionPlan` takes it in place of a pool; page ids of
    its block table are block numbers. Blocks are packed on the way to the kernels, which costs
    decoding about the speed of that copy; the pages of a :class:`kvcore.pages.Pool` need none.

    Raises:
        InvalidArgument: names the tensor that does not fit.
        Unsupported: K and V blocks of a layer lie at different distances.
    """

    def __init__(self, caches: Sequence[Any], order: str = "NHD", *, writable: bool = True) -> None:
        if order not in ("NHD", "HND"):
            raise InvalidArgument(f"order={order!r} is unknown: allowed 'NHD', 'HND'")
        if len(caches) == 0:
            raise InvalidArgument("caches is empty: expected one entry per layer")
        parts = [_kv_parts(f"caches[{i}]", cache, writable) for i, cache in enumerate(caches)]
        first, last = parts[0]
        heads_at, tokens_at = (2, 1) if order == "NHD" else (1, 2)
        for i, (k, v) in enumerate(parts):
            for name, part, like in (("k", k, first), ("v", v, last)):
                if (part.dtype, part.shape, part.strides) != (like.dtype, like.shape, like.strides):
                    raise InvalidArgument(
                        f"caches[{i}] {name} is {part.dtype} {list(part.shape)} with strides "
                        f"{list(part.strides)}: expected those of caches[0]"
                    )
        if first.shape[:3] != last.shape[:3] or first.dtype != last.dtype:
            raise InvalidArgument(
                f"k is {first.dtype} {list(first.shape)} and v is {last.dtype} "
                f"{list(last.shape)}: expected the same dtype and all but head_dim equal"
            )
        size = 4 if first.dtype == "float32" else 2

        def strides(part: _Tensor) -> tuple[int, int, int]:
            return (
                part.strides[0] * size,
                part.strides[heads_at] * size,
                part.strides[tokens_at] * size,
            )

        self.caches = list(caches)  # whose memory this is
        self.writable = writable
        self.spec = TensorSpec(
            len(parts),
            first.shape[heads_at],
            first.shape[3],
            last.shape[3],
            first.shape[tokens_at],
            {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}[first.dtype],
        )
        self._pages = _core.kernels.TensorPages(
            [k.ptr for k, _ in parts],
            strides(first),
            first.shape[3],
            [v.ptr for _, v in parts],
            strides(last),
            last.shape[3],
            first.shape[0],
            self.spec.num_kv_heads,
            self.spec.page_size,
            DTYPE_CODES[first.dtype],
        )

    @property
    def view_address(self) -> int:
        """Address of the kernels' view of these pages."""
        return self._pages.view_address


def _kv_parts(field: str, cache: Any, write: bool) -> tuple[_Tensor, _Tensor]:
    """K and V of one layer, each [num_blocks, x, y, head_dim]."""
    if isinstance(cache, tuple | list):
        if len(cache) != 2:
            raise InvalidArgument(f"{field} has {len(cache)} entries: expected (k, v)")
        k, v = (_describe(f"{field}[{i}]", part, write=write) for i, part in enumerate(cache))
    else:
        t = _describe(field, cache, write=write)
        if len(t.shape) != 5 or t.shape[1] != 2:
            raise InvalidArgument(
                f"{field} has shape {list(t.shape)}: expected [num_blocks, 2, ., ., head_dim]"
            )
        half = t.strides[1] * (4 if t.dtype == "float32" else 2)
        shape, strides = (t.shape[0], *t.shape[2:]), (t.strides[0], *t.strides[2:])
        k, v = (t._replace(ptr=t.ptr + i * half, shape=shape, strides=strides) for i in (0, 1))
    for name, part in (("k", k), ("v", v)):
        if part.dtype not in DTYPE_CODES:
            raise InvalidArgument(
                f"{field} {name} has dtype {part.dtype}: expected one of {', '.join(DTYPE_CODES)}"
            )
        if len(part.shape) != 4 or 0 in part.shape or part.strides[3] != 1:
            raise InvalidArgument(
                f"{field} {name} has shape {list(part.shape)} and strides {list(part.strides)}: "
                "expected four dimensions, none empty, the last contiguous"
            )
    return k, v


class AttentionPlan(_core.kernels.AttentionPlan):
    """Paged attention of one batch, prepared once and run for every layer.

    Args:
        pool: a Pool or :class:`TensorPages`; must outlive the plan (which holds a reference).
        num_q_heads: a multiple of the pool's KV heads (grouped-query attention).
        scale: softmax scale; None = 1 / sqrt(head_dim_k).
        threads: a :class:`ThreadPool`, or None for the calling thread alone.
        window: sliding window in tokens, of all layers or one for each; a token at position p sees
            positions above p - window, up to p. 0: all up to p.
        soft_cap: c > 0 turns scaled scores s into c tanh(s / c); 0: they stay as they are.

    A row's bits depend only on its query and the pages it sees, not on the batch, the chunking, the
    page size or the number of threads. Pages that no row's window reaches in any layer are not
    touched. One plan is used by one thread at a time; the GIL is released.
    """

    def __init__(
        self,
        pool: Pool | TensorPages,
        num_q_heads: int,
        scale: float | None = None,
        threads: _core.kernels.ThreadPool | None = None,
        window: int | Sequence[int] = 0,
        soft_cap: float = 0.0,
    ) -> None:
        if scale is not None and not scale > 0:
            raise InvalidArgument(f"scale={scale} is out of range: allowed above 0")
        windows = [window] if isinstance(window, int) else list(window)
        super().__init__(
            pool.view_address, num_q_heads, scale or 0.0, threads, windows, float(soft_cap)
        )
        self.pool = pool

    def prepare(
        self, cu_seqlens_q: npt.ArrayLike, context_lens: npt.ArrayLike, block_table: npt.ArrayLike
    ) -> None:
        """Describe the batch of the next calls; everything is validated here and copied.

        Args:
            cu_seqlens_q: int32 [num_seqs + 1], 0 first: new tokens of sequence s are rows
                cu_seqlens_q[s] to cu_seqlens_q[s + 1].
            context_lens: int32 [num_seqs], tokens in KV, the new ones included.
            block_table: int32 [num_seqs, max_pages] page ids, not read past the context nor before
                the windows of all layers (freed pages there may be -1).

        Raises:
            InvalidArgument: names the entry, its value and the allowed range.
        """
        super().prepare(_int32(cu_seqlens_q), _int32(context_lens), _int32(block_table))

    def append(self, layer: int, k: Any, v: Any = None) -> None:
        """Write the batch's new tokens into their pages.

        Args:
            layer: 0 to num_layers - 1.
            k: [tokens, num_kv_heads, head_dim_k] (or the last two flattened), any float dtype.
            v: [tokens, num_kv_heads, head_dim_v], same dtype as k; not read, and may be None, where
                pages are latent (:class:`kvcore.pages.PageSpec`).
        """
        if isinstance(self.pool, TensorPages) and not self.pool.writable:
            raise InvalidArgument("pages with writable=False cannot be appended to")
        self.append_ptr(layer, *_kv_rows(self.pool, self.num_tokens, k, v))

    def attend(
        self, layer: int, q: Any, out: Any, lse: Any = None, page_scores: Any = None
    ) -> None:
        """Causal attention of the batch's new tokens over their sequences' pages.

        Args:
            layer: 0 to num_layers - 1.
            q: [tokens, num_q_heads, head_dim_k] (or the last two flattened).
            out: [tokens, num_q_heads, head_dim_v], written; same dtype as q.
            lse: float32 [tokens, num_q_heads], written: natural log of the softmax denominator.
            page_scores: float32 [num_seqs, max_pages], written: of a sequence with one new token
                the probability mass of each page, summed over q heads, so that a row sums to
                num_q_heads; 0 for other sequences, and for pages that are not seen.

        A token that sees nothing (more new tokens than context) gets out 0 and lse -inf.
        """
        s, n = self.pool.spec, self.num_tokens
        qt = _rows("q", q, (n, self.num_q_heads, s.head_dim_k))
        ot = _rows("out", out, (n, self.num_q_heads, s.head_dim_v), write=True)
        code = _same_dtype("q", qt, "out", ot)
        lse_ptr = 0 if lse is None else _lse("lse", lse, (n, self.num_q_heads), write=True).ptr
        scores_ptr = 0
        if page_scores is not None:
            shape = (self.num_seqs, self.max_pages)
            scores_ptr = _lse("page_scores", page_scores, shape, write=True).ptr
        rows = (qt.ptr, qt.strides[0], ot.ptr, ot.strides[0])
        self.attend_ptr(layer, *rows, lse_ptr, code, scores_ptr)

    def run(self, layer: int, q: Any, k: Any, v: Any, out: Any, lse: Any = None) -> None:
        """:meth:`append` followed by :meth:`attend`."""
        self.append(layer, k, v)
        self.attend(layer, q, out, lse)


def merge_states(
    out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, out: Any = None, lse: Any = None
) -> tuple[Any, Any]:
    """Merge two partial attention results over disjoint tokens by their log-sum-exp.

    Args:
        out_a, out_b: [..., dim] contiguous, same dtype; dim a multiple of 16.
        lse_a, lse_b: float32 [...], natural log; -inf marks an empty part.
        out, lse: where to write; None allocates numpy arrays (bfloat16 as uint16 bits).

    Returns:
        (out, lse). A row whose one part is empty equals the other part bit for bit; merging is what
        attention itself does between segments, so the order "left to right" reproduces its bits.
    """
    a, b = _describe("out_a", out_a), _describe("out_b", out_b)
    if a.shape != b.shape or len(a.shape) < 1:
        raise InvalidArgument(f"out_a has shape {list(a.shape)} and out_b {list(b.shape)}")
    if a.dtype not in DTYPE_CODES:
        raise InvalidArgument(
            f"out_a has dtype {a.dtype}: expected one of {', '.join(DTYPE_CODES)}"
        )
    code = _same_dtype("out_a", a, "out_b", b)
    if out is None:
        kinds: dict[str, Any] = {
            "float32": np.float32,
            "float16": np.float16,
            "bfloat16": np.uint16,
        }
        out = np.empty(a.shape, kinds[a.dtype])
    if lse is None:
        lse = np.empty(a.shape[:-1], np.float32)
    o = _describe("out", out, write=True)
    _same_dtype("out_a", a, "out", o)
    for field, t in (("out_a", a), ("out_b", b), ("out", o)):
        dense = tuple(int(np.prod(a.shape[i + 1 :])) for i in range(len(a.shape)))
        if t.shape != a.shape or any(
            n > 1 and s != d for n, s, d in zip(t.shape, t.strides, dense, strict=True)
        ):
            raise InvalidArgument(
                f"{field} has shape {list(t.shape)} and strides {list(t.strides)}: "
                f"expected contiguous {list(a.shape)}"
            )
    rows = a.shape[:-1]
    la, lb = _lse("lse_a", lse_a, rows), _lse("lse_b", lse_b, rows)
    lo = _lse("lse", lse, rows, write=True)
    count = int(np.prod(rows))
    merge_states_ptr(a.ptr, la.ptr, b.ptr, lb.ptr, o.ptr, lo.ptr, count, a.shape[-1], code)
    return out, lse


def _kv_rows(pool: Any, count: int, k: Any, v: Any) -> tuple[int, int, int, int, int]:
    """Addresses and token strides of K and V rows that are to be written, and their dtype."""
    s = pool.spec
    kt = _rows("k", k, (count, s.num_kv_heads, s.head_dim_k))
    if v is None and getattr(s, "latent", False):
        return kt.ptr, kt.strides[0], 0, 0, DTYPE_CODES[kt.dtype]
    vt = _rows("v", v, (count, s.num_kv_heads, s.head_dim_v))
    return kt.ptr, kt.strides[0], vt.ptr, vt.strides[0], _same_dtype("k", kt, "v", vt)


def append_kv(pool: Pool, layer: int, k: Any, v: Any, slot_mapping: Any) -> None:
    """Write token i to page ``slot_mapping[i] // page_size``, slot ``slot_mapping[i] % page_size``.

    Args:
        k, v: [tokens, num_kv_heads, head_dim], same dtype; converted to the page's format. v may be
            None where pages are latent.
        slot_mapping: int64 [tokens]; -1 skips a token.
    """
    slots = _describe("slot_mapping", slot_mapping)
    if slots.dtype != "int64" or len(slots.shape) != 1 or slots.strides[0] not in (0, 1):
        raise InvalidArgument(
            f"slot_mapping is {slots.dtype} {list(slots.shape)}: expected contiguous int64 [tokens]"
        )
    n = slots.shape[0]
    append_kv_ptr(pool.view_address, layer, *_kv_rows(pool, n, k, v), slots.ptr, n)


def pack_slice(pool: Pool, page: int, layer: int, k: Any, v: Any, first: int = 0) -> None:
    """Write canonical rows into one page of one layer, from slot ``first``.

    Args:
        k, v: [count, num_kv_heads, head_dim], same dtype; ``first + count <= page_size``. v may be
            None where pages are latent.
    """
    count = int(k.shape[0])
    rows = _kv_rows(pool, count, k, v)
    _core.kernels.pack_slice_ptr(pool.view_address, page, layer, first, count, *rows)


def unpack_slice(pool: Pool, page: int, layer: int, k: Any, v: Any, first: int = 0) -> None:
    """Read slots ``first`` to ``first + count`` of one page of one layer into k and v (written)."""
    s, count = pool.spec, int(k.shape[0])
    kt = _rows("k", k, (count, s.num_kv_heads, s.head_dim_k), write=True)
    vt = _rows("v", v, (count, s.num_kv_heads, s.head_dim_v), write=True)
    rows = (kt.ptr, kt.strides[0], vt.ptr, vt.strides[0], _same_dtype("k", kt, "v", vt))
    _core.kernels.unpack_slice_ptr(pool.view_address, page, layer, first, count, *rows)


def copy_pages(pool: Pool, from_pages: Sequence[int], to_pages: Sequence[int]) -> None:
    """Copy all layers of page ``from_pages[i]`` to ``to_pages[i]``, in order."""
    _core.kernels.copy_pages(pool.view_address, list(from_pages), list(to_pages))


def block_bytes(format: str, part: str, tokens: int, dim: int) -> int:
    """Bytes of one head's compressed K or V of one page, metadata and padding counted.

    Args:
        format: "int8", "fp8" (both parts), "k4" (keys only), "v4" or "v3" (values only).
        part: "k" or "v". tokens: page size, 16, 32, 64 or 128. dim: multiple of 8 from 8 to 256.

    Raises:
        InvalidArgument: names the field, its value and what is allowed.
    """
    return _core.kernels.block_bytes(format, part, tokens, dim)


def _block(block: Any, *, write: bool = False) -> _Tensor:
    t = _describe("block", block, write=write)
    if t.dtype != "uint8" or len(t.shape) != 1 or (t.shape[0] > 1 and t.strides[0] != 1):
        raise InvalidArgument(
            f"block is {t.dtype} {list(t.shape)} with strides {list(t.strides)}: "
            "expected contiguous uint8 [block_bytes]"
        )
    return t


def _head_rows(rows: Any, *, write: bool = False) -> _Tensor:
    t = _describe("rows", rows, write=write)
    if t.dtype not in DTYPE_CODES:
        raise InvalidArgument(f"rows has dtype {t.dtype}: expected one of {', '.join(DTYPE_CODES)}")
    if len(t.shape) != 2 or (t.shape[1] > 1 and t.strides[1] != 1):
        raise InvalidArgument(
            f"rows has shape {list(t.shape)} and strides {list(t.strides)}: "
            "expected [tokens, dim], dims contiguous"
        )
    return t


def encode_block(format: str, part: str, rows: Any, block: Any = None) -> Any:
    """Compress one head's keys or values of one whole page (docs/formats.md).

    Args:
        format, part: see :func:`block_bytes`.
        rows: [tokens, dim], float32, float16 or bfloat16; dims contiguous, any token stride.
        block: uint8 [block_bytes] to write; None allocates a numpy array.

    Returns:
        block.

    Raises:
        InvalidArgument: a shape that is not allowed, or a number that is not finite or above 65504
            in magnitude, by token and dim (a given block is then undefined).
    """
    r = _head_rows(rows)
    tokens, dim = r.shape
    if block is None:
        block = np.empty(block_bytes(format, part, tokens, dim), np.uint8)
    b = _block(block, write=True)
    code = DTYPE_CODES[r.dtype]
    encode_block_ptr(format, part, tokens, dim, r.ptr, r.strides[0], code, b.ptr, b.shape[0])
    return block


def decode_block(
    format: str, part: str, block: Any, tokens: int, dim: int, rows: Any = None
) -> Any:
    """The numbers that a compressed block stands for.

    Args:
        format, part, tokens, dim: see :func:`block_bytes`. block: uint8 [block_bytes].
        rows: [tokens, dim] to write, float32, float16 or bfloat16 (rounded to nearest even); None
            allocates numpy float32.

    Returns:
        rows. A damaged block gives wrong numbers: :func:`check_block` looks for damage.
    """
    b = _block(block)
    if rows is None:
        block_bytes(format, part, tokens, dim)  # names what is not allowed
        rows = np.empty((tokens, dim), np.float32)
    r = _head_rows(rows, write=True)
    if r.shape != (tokens, dim):
        raise InvalidArgument(f"rows has shape {list(r.shape)}: expected {[tokens, dim]}")
    code = DTYPE_CODES[r.dtype]
    decode_block_ptr(format, part, tokens, dim, b.ptr, b.shape[0], r.ptr, r.strides[0], code)
    return rows


def check_block(format: str, part: str, block: Any, tokens: int, dim: int) -> None:
    """Refuse a block that no encoder writes.

    Raises:
        Corrupt: a scale, norm or grid that is not finite or not above 0, a mean that is not finite,
            a NaN code; names the array, the place and the value.
        InvalidArgument: another size than block_bytes.
    """
    b = _block(block)
    check_block_ptr(format, part, tokens, dim, b.ptr, b.shape[0])
