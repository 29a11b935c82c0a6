"""``torch.ops.kvcore.*``: kvcore's kernels as PyTorch operators, for CPU and tracing (Meta).

Operators take tensors and integers only, so pools and plans enter as handles:
``register(pool).id``. Every operator that writes KV declares it: its ``arena`` argument,
:func:`arena` of the pool, is marked as mutated. So ``torch.compile`` keeps the order of writes and
reads, and no effect is hidden from it.

    arena = ops.arena(pool)                      # uint8 tensor over the pool's memory, no copy
    step = ops.register(plan)                    # an AttentionPlan or LayerStep, prepared per batch
    out = torch.ops.kvcore.attend_layer(q, k, v, arena, step.id, layer)

Operators (dtypes: float32, float16, bfloat16; q, k, v may have any stride between tokens):

    attend_layer(q [T, Hq, Dk], k [T, H, Dk], v [T, H, Dv], arena!, step, layer) -> out [T, Hq, Dv]
        Appends the batch's new tokens, publishes them where the step streams, attends.
    attend_layer_out(q, k, v, arena!, out! [T, Hq, Dv], step, layer)
        The same into the caller's ``out``, which saves an allocation and torch's wrapping of it.
    append_kv(k [T, H, Dk], v [T, H, Dv], arena!, pool, layer, slot_mapping int64 [T])
        Writes token i to slot page * page_size + place; -1 skips it.
    paged_attention(q [T, Hq, Dk], arena, pool, layer, cu_seqlens_q int32 [S + 1],
                    context_lens int32 [S], block_table int32 [S, max_pages], scale)
            -> out [T, Hq, Dv], lse float32 [T, Hq]
        Causal, bottom-right; natural logarithm; a row that sees nothing is (0, -inf). scale 0 means
        1 / sqrt(Dk).
    merge_states(out_a [..., D], lse_a float32 [...], out_b, lse_b) -> out, lse
    pack_slice(k [P, H, Dk], v [P, H, Dv], arena!, pool, page, layer, first)
    unpack_slice(arena, pool, page, layer) -> k [page_size, H, Dk], v [page_size, H, Dv]
    copy_pages(arena!, pool, from_pages int64 [N], to_pages int64 [N])

Errors are :mod:`kvcore.errors` with the field, its value and what is allowed.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from kvcore import _core, kernels
from kvcore.errors import InvalidArgument, NotFound
from kvcore.pages import Pool

__all__ = ["Handle", "arena", "register"]

_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_PAGE_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
# How C reads tensors without a Python call each; torch releases before it had one do without.
_EXCHANGE = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
_ids = itertools.count(1)
_objects: dict[int, Any] = {}
_steps: dict[int, _Step] = {}


class Handle:
    """Names an object inside operators; the object is known there while the handle lives.

    Attributes:
        id: the integer to pass. target: the object.
    """

    def __init__(self, target: Any) -> None:
        self.id = next(_ids)
        self.target = target
        _objects[self.id] = target
        weakref.finalize(self, _forget, self.id)


def _forget(handle: int) -> None:
    _objects.pop(handle, None)
    _steps.pop(handle, None)


def register(target: Any) -> Handle:
    """A handle for a :class:`kvcore.pages.Pool`, or for something with ``run_ptr`` and ``pool``.

    Raises:
        InvalidArgument: it is neither.
    """
    if not isinstance(target, _core.pages.Pool) and not hasattr(target, "run_ptr"):
        raise InvalidArgument(
            f"target is a {type(target).__name__}: allowed a Pool, an AttentionPlan or a LayerStep"
        )
    return Handle(target)


class _Memory:
    """A pool's arena as numpy sees foreign memory; holds the pool."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.__array_interface__ = {
            "version": 3,
            "shape": (pool.arena.bytes,),
            "typestr": "|u1",
            "data": (pool.arena.address, False),
        }


def arena(pool: Pool) -> torch.Tensor:
    """The pool's memory as a uint8 tensor [bytes], not copied; the tensor keeps the pool alive."""
    return torch.from_numpy(np.asarray(_Memory(pool)))


def _find(field: str, handle: int) -> Any:
    target = _objects.get(handle)
    if target is None:
        raise NotFound(f"{field}={handle} is no live handle: keep what ops.register() returned")
    return target


def _pool(handle: int) -> Pool:
    target = _find("pool", handle)
    if not isinstance(target, _core.pages.Pool):
        raise InvalidArgument(
            f"pool={handle} is a handle of a {type(target).__name__}, not of a Pool"
        )
    return target  # type: ignore[return-value]


def _check_arena(arena: torch.Tensor, pool: Pool) -> None:
    if arena.dtype != torch.uint8 or arena.numel() != pool.arena.bytes or not arena.is_contiguous():
        raise InvalidArgument(
            f"arena is {arena.dtype} {list(arena.shape)}: expected contiguous torch.uint8 "
            f"[{pool.arena.bytes}], as ops.arena(pool) gives it"
        )


def _moved(arena: torch.Tensor, pool: Pool) -> Any:
    """The pool's pages in the bytes of ``arena``: the pool's own memory, or a clone of it."""
    _check_arena(arena, pool)
    return _core.ops.MovedPages(pool.view_address, arena.data_ptr())


def _rows(field: str, x: torch.Tensor, heads: int, dim: int) -> torch.Tensor:
    """``x`` with its last two dimensions dense; a copy only where they are not."""
    if x.dim() != 3 or x.shape[1] != heads or x.shape[2] != dim:
        raise InvalidArgument(
            f"{field} has shape {list(x.shape)}: expected [tokens, {heads}, {dim}]"
        )
    if x.dtype not in _CODES:
        raise InvalidArgument(f"{field} is {x.dtype}: expected float32, float16 or bfloat16")
    _, head_stride, dim_stride = x.stride()
    dense = (dim_stride == 1 or dim == 1) and (head_stride == dim or heads == 1)
    return x if dense else x.contiguous()


def _kv(k: torch.Tensor, v: torch.Tensor, pool: Pool) -> tuple[torch.Tensor, torch.Tensor]:
    spec = pool.spec
    k = _rows("k", k, spec.num_kv_heads, spec.head_dim_k)
    v = _rows("v", v, spec.num_kv_heads, spec.head_dim_v)
    if k.dtype != v.dtype or k.shape[0] != v.shape[0]:
        raise InvalidArgument(
            f"v is {v.dtype} [{v.shape[0]}, ...]: expected as k, {k.dtype} [{k.shape[0]}, ...]"
        )
    return k, v


# --- operators -----------------------------------------------------------------------------------


def _attend_layer(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arena: torch.Tensor, step: int, layer: int
) -> torch.Tensor:
    # Runs once per layer and step, so the usual case asks nothing of Python.
    known = _steps.get(step) or _step(step)
    out: torch.Tensor | None = known.call(q, k, v, arena, layer)
    return _attend_any(known.target, q, k, v, arena, layer) if out is None else out


def _attend_layer_out(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    arena: torch.Tensor,
    out: torch.Tensor,
    step: int,
    layer: int,
) -> None:
    known = _steps.get(step) or _step(step)
    if known.call(q, k, v, arena, layer, out) is None:
        _attend_any(known.target, q, k, v, arena, layer, out)


class _Step(NamedTuple):
    """A plan or step as :func:`_attend_layer` wants it."""

    target: Any
    call: Callable[..., torch.Tensor | None]  # None: the tensors lie otherwise than usual


def _step(handle: int) -> _Step:
    target = _find("step", handle)
    if not hasattr(target, "run_ptr"):
        raise InvalidArgument(f"step={handle} is a handle of a {type(target).__name__}, not a step")
    call: Callable[..., Any] = lambda *_: None  # noqa: E731
    memory = target.pool.arena.address
    if _EXCHANGE and isinstance(target, _core.kernels.AttentionPlan | _core.stream.LayerStep):
        call = _core.ops.LayerCall(_EXCHANGE, target, memory)
    _steps[handle] = _Step(target, call)
    return _steps[handle]


def _attend_any(
    target: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    arena: torch.Tensor,
    layer: int,
    into: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows that need a copy, another arena, or an error that says what is wrong with them."""
    k, v = _kv(k, v, target.pool)
    q = _rows("q", q, target.num_q_heads, target.pool.spec.head_dim_k)
    tokens = target.num_tokens
    if not q.shape[0] == k.shape[0] == tokens or k.dtype != q.dtype:
        raise InvalidArgument(
            f"q has {q.shape[0]} tokens of {q.dtype}, k {k.shape[0]} of {k.dtype}: expected "
            f"{tokens}, as prepared, of one dtype"
        )
    out = q.new_empty(tokens, q.shape[1], target.pool.spec.head_dim_v)
    if into is not None and (into.shape != out.shape or into.dtype != out.dtype):
        raise InvalidArgument(
            f"out is {into.dtype} {list(into.shape)}: expected {out.dtype} {list(out.shape)}"
        )
    if arena.data_ptr() != target.pool.arena.address:
        target = _clone_of(target, _moved(arena, target.pool))
    target.run_ptr(
        layer, q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0),
        out.data_ptr(), 0, _CODES[q.dtype],
    )  # fmt: skip
    return out if into is None else into.copy_(out)


def _clone_of(target: Any, moved: Any) -> Any:
    """The same batch over a clone of the arena, as functionalized graphs ask for."""
    if not isinstance(target, _core.kernels.AttentionPlan):
        raise InvalidArgument(
            f"arena is a copy of the pool's memory, and a {type(target).__name__} publishes bytes "
            "from the pool's own: compile with a backend that reuses mutated inputs (inductor)"
        )
    return _core.ops.plan_like(target, moved)


def _attend_layer_meta(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arena: torch.Tensor, step: int, layer: int
) -> torch.Tensor:
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2])


def _append_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    arena: torch.Tensor,
    pool: int,
    layer: int,
    slot_mapping: torch.Tensor,
) -> None:
    target = _pool(pool)
    k, v = _kv(k, v, target)
    if slot_mapping.dtype != torch.int64 or slot_mapping.shape != k.shape[:1]:
        raise InvalidArgument(
            f"slot_mapping is {slot_mapping.dtype} {list(slot_mapping.shape)}: expected "
            f"torch.int64 [{k.shape[0]}]"
        )
    moved, slots = _moved(arena, target), slot_mapping.contiguous()
    kernels.append_kv_ptr(
        moved.view_address, layer, k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0),
        _CODES[k.dtype], slots.data_ptr(), slots.shape[0],
    )  # fmt: skip


def _nothing(*_: Any) -> None:
    """Tracing an operator whose only effect is on bytes."""


def _int32(x: torch.Tensor) -> Any:
    return x.contiguous().numpy()


def _paged_attention(
    q: torch.Tensor,
    arena: torch.Tensor,
    pool: int,
    layer: int,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    target = _pool(pool)
    if q.dim() != 3:
        raise InvalidArgument(f"q has shape {list(q.shape)}: expected [tokens, heads, head_dim_k]")
    heads, moved = q.shape[1], _moved(arena, target)
    q = _rows("q", q, heads, target.spec.head_dim_k)
    plan = _core.kernels.AttentionPlan(moved.view_address, heads, scale, None)
    plan.prepare(_int32(cu_seqlens_q), _int32(context_lens), _int32(block_table))
    if plan.num_tokens != q.shape[0]:
        raise InvalidArgument(
            f"q has {q.shape[0]} tokens: expected {plan.num_tokens}, the last of cu_seqlens_q"
        )
    out, lse = _paged_attention_meta(
        q, arena, pool, layer, cu_seqlens_q, context_lens, block_table, scale
    )
    plan.attend_ptr(
        layer, q.data_ptr(), q.stride(0), out.data_ptr(), out.stride(0), lse.data_ptr(),
        _CODES[q.dtype],
    )  # fmt: skip
    return out, lse


def _paged_attention_meta(
    q: torch.Tensor,
    arena: torch.Tensor,
    pool: int,
    layer: int,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    out = q.new_empty(q.shape[0], q.shape[1], _pool(pool).spec.head_dim_v)
    return out, q.new_empty(q.shape[0], q.shape[1], dtype=torch.float32)


def _merge_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    out_a, lse_a, out_b, lse_b = (x.contiguous() for x in (out_a, lse_a, out_b, lse_b))
    out, lse = torch.empty_like(out_a), torch.empty_like(lse_a)
    kernels.merge_states(out_a, lse_a, out_b, lse_b, out, lse)
    return out, lse


def _merge_states_meta(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    dense = torch.contiguous_format
    return (
        torch.empty_like(out_a, memory_format=dense),
        torch.empty_like(lse_a, memory_format=dense),
    )


def _pack_slice(
    k: torch.Tensor,
    v: torch.Tensor,
    arena: torch.Tensor,
    pool: int,
    page: int,
    layer: int,
    first: int,
) -> None:
    target = _pool(pool)
    k, v = _kv(k, v, target)
    moved = _moved(arena, target)
    _core.kernels.pack_slice_ptr(
        moved.view_address, page, layer, first, k.shape[0], k.data_ptr(), k.stride(0), v.data_ptr(),
        v.stride(0), _CODES[k.dtype],
    )  # fmt: skip


def _unpack_slice(
    arena: torch.Tensor, pool: int, page: int, layer: int
) -> tuple[torch.Tensor, torch.Tensor]:
    target = _pool(pool)
    moved = _moved(arena, target)
    k, v = _unpack_slice_meta(arena, pool, page, layer)
    _core.kernels.unpack_slice_ptr(
        moved.view_address, page, layer, 0, k.shape[0], k.data_ptr(), k.stride(0), v.data_ptr(),
        v.stride(0), _CODES[k.dtype],
    )  # fmt: skip
    return k, v


def _unpack_slice_meta(
    arena: torch.Tensor, pool: int, page: int, layer: int
) -> tuple[torch.Tensor, torch.Tensor]:
    spec = _pool(pool).spec
    dtype = _PAGE_DTYPES[spec.format]
    k = arena.new_empty(spec.page_size, spec.num_kv_heads, spec.head_dim_k, dtype=dtype)
    return k, arena.new_empty(spec.page_size, spec.num_kv_heads, spec.head_dim_v, dtype=dtype)


def _copy_pages(
    arena: torch.Tensor, pool: int, from_pages: torch.Tensor, to_pages: torch.Tensor
) -> None:
    moved = _moved(arena, _pool(pool))
    _core.kernels.copy_pages(moved.view_address, from_pages.tolist(), to_pages.tolist())


_OPERATORS: list[tuple[str, Callable[..., Any], Callable[..., Any]]] = [
    (
        "attend_layer(Tensor q, Tensor k, Tensor v, Tensor(a!) arena, int step, int layer)"
        " -> Tensor",
        _attend_layer,
        _attend_layer_meta,
    ),
    (
        "attend_layer_out(Tensor q, Tensor k, Tensor v, Tensor(a!) arena, Tensor(b!) out, int step,"
        " int layer) -> ()",
        _attend_layer_out,
        _nothing,
    ),
    (
        "append_kv(Tensor k, Tensor v, Tensor(a!) arena, int pool, int layer, Tensor slot_mapping)"
        " -> ()",
        _append_kv,
        _nothing,
    ),
    (
        "paged_attention(Tensor q, Tensor arena, int pool, int layer, Tensor cu_seqlens_q,"
        " Tensor context_lens, Tensor block_table, float scale) -> (Tensor out, Tensor lse)",
        _paged_attention,
        _paged_attention_meta,
    ),
    (
        "merge_states(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b)"
        " -> (Tensor out, Tensor lse)",
        _merge_states,
        _merge_states_meta,
    ),
    (
        "pack_slice(Tensor k, Tensor v, Tensor(a!) arena, int pool, int page, int layer, int first)"
        " -> ()",
        _pack_slice,
        _nothing,
    ),
    (
        "unpack_slice(Tensor arena, int pool, int page, int layer) -> (Tensor k, Tensor v)",
        _unpack_slice,
        _unpack_slice_meta,
    ),
    (
        "copy_pages(Tensor(a!) arena, int pool, Tensor from_pages, Tensor to_pages) -> ()",
        _copy_pages,
        _nothing,
    ),
]


def _define() -> Any:
    library: Any = torch.library.Library("kvcore", "DEF")  # type: ignore[no-untyped-call]
    for schema, cpu, meta in _OPERATORS:
        name = schema.partition("(")[0]
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, cpu, "CPU")
        library.impl(name, meta, "Meta")
    return library


_library = _define()  # the operators exist while this object does
