from typing import Any

import numpy.typing as npt

class ThreadPool:
    def __init__(self, num_threads: int, cpus: list[int] | None = None) -> None: ...
    @property
    def num_threads(self) -> int:
        """Threads of the team, the caller included."""
    @property
    def spins(self) -> bool:
        """Whether idle workers spin before they sleep."""

class TensorPages:
    def __init__(
        self,
        k_layers: list[int],
        k_strides: tuple[int, int, int],
        k_dim: int,
        v_layers: list[int],
        v_strides: tuple[int, int, int],
        v_dim: int,
        num_blocks: int,
        num_kv_heads: int,
        page_size: int,
        dtype: int,
    ) -> None: ...
    @property
    def view_address(self) -> int: ...

class AttentionPlan:
    def __init__(
        self,
        view_address: int,
        num_q_heads: int,
        scale: float = 0.0,
        threads: ThreadPool | None = None,
        windows: list[int] = [],
        soft_cap: float = 0.0,
    ) -> None: ...
    def prepare(
        self, cu_seqlens_q: npt.ArrayLike, context_lens: npt.ArrayLike, block_table: npt.ArrayLike
    ) -> None: ...
    def append_ptr(
        self, layer: int, k_ptr: int, k_stride: int, v_ptr: int, v_stride: int, dtype: int
    ) -> None:
        """:meth:`append` by address: k and v rows of the batch's tokens to their pages.

        Args:
            layer: 0 to num_layers - 1.
            k_ptr, v_ptr: of the first token; each token's [num_kv_heads, head_dim] is contiguous.
            k_stride, v_stride: elements from one token to the next.
            dtype: of both, a value of ``DTYPE_CODES``.

        Raises InvalidArgument. Addresses are not checked.
        """
    def attend_ptr(
        self,
        layer: int,
        q_ptr: int,
        q_stride: int,
        out_ptr: int,
        out_stride: int,
        lse_ptr: int,
        dtype: int,
        page_scores_ptr: int = 0,
    ) -> None:
        """:meth:`attend` by address; strides in elements from one token to the next.

        Args:
            layer: 0 to num_layers - 1.
            q_ptr: [tokens, num_q_heads, head_dim_k]. out_ptr: [tokens, num_q_heads, head_dim_v],
                written. lse_ptr: float32 [tokens, num_q_heads] contiguous, written; 0: not wanted.
            dtype: of q and out, a value of ``DTYPE_CODES``.
            page_scores_ptr: float32, as ``page_scores`` of :meth:`attend`; 0: not wanted.

        Raises InvalidArgument. Addresses are not checked.
        """
    def run_ptr(
        self,
        layer: int,
        q_ptr: int,
        q_stride: int,
        k_ptr: int,
        k_stride: int,
        v_ptr: int,
        v_stride: int,
        out_ptr: int,
        lse_ptr: int,
        dtype: int,
    ) -> None:
        """:meth:`append_ptr` followed by :meth:`attend_ptr`; out is contiguous."""
    @property
    def num_seqs(self) -> int:
        """Sequences of the prepared batch."""
    @property
    def num_tokens(self) -> int:
        """New tokens of the prepared batch, over all sequences."""
    @property
    def max_pages(self) -> int:
        """Columns of the prepared batch's block table."""
    @property
    def num_q_heads(self) -> int:
        """Query heads."""

def isa() -> str: ...
def set_isa(name: str) -> None: ...
def available_isas() -> list[str]: ...
def describe_dlpack(capsule: Any) -> tuple[int, tuple[int, ...], tuple[int, ...], str]: ...
def merge_states_ptr(
    out_a: int,
    lse_a: int,
    out_b: int,
    lse_b: int,
    out: int,
    lse: int,
    rows: int,
    dim: int,
    dtype: int,
) -> None:
    """``merge_states`` by address: out [rows, dim] contiguous, lse float32 [rows]."""

def append_kv_ptr(
    view_address: int,
    layer: int,
    k_ptr: int,
    k_stride: int,
    v_ptr: int,
    v_stride: int,
    dtype: int,
    slot_mapping_ptr: int,
    num_tokens: int,
) -> None:
    """``append_kv`` by address: k and v rows to the pages of a pool, strides in elements."""

def pack_slice_ptr(
    view_address: int,
    page: int,
    layer: int,
    first: int,
    count: int,
    k_ptr: int,
    k_stride: int,
    v_ptr: int,
    v_stride: int,
    dtype: int,
) -> None: ...
def unpack_slice_ptr(
    view_address: int,
    page: int,
    layer: int,
    first: int,
    count: int,
    k_ptr: int,
    k_stride: int,
    v_ptr: int,
    v_stride: int,
    dtype: int,
) -> None: ...
def copy_pages(view_address: int, from_pages: list[int], to_pages: list[int]) -> None: ...
def page_bounds_ptr(
    view_address: int,
    layer: int,
    page_ids: npt.ArrayLike,
    valid_tokens: npt.ArrayLike,
    out_ptr: int,
) -> None:
    """``page_bounds`` by address: out float32 [pages, num_kv_heads, 2, head_dim_k] contiguous."""

def page_score_bounds_ptr(
    q_ptr: int,
    q_stride: int,
    dtype: int,
    rows: int,
    num_q_heads: int,
    bounds_ptr: int,
    num_pages: int,
    num_kv_heads: int,
    head_dim: int,
    scale: float,
    out_ptr: int,
) -> None:
    """``page_score_bounds`` by address: q rows ``q_stride`` elements apart, out contiguous."""

def rms_norm_ptr(
    x: int,
    x_stride: int,
    delta: int,
    weight: int,
    out: int,
    rows: int,
    dim: int,
    eps: float,
    dtype: int,
) -> None:
    """Residual add and RMS norm by address: ``x += delta``, ``out = x / rms(x) * weight``."""

def rope_ptr(
    x: int,
    x_stride: int,
    rotation: int,
    q_weight: int,
    k_weight: int,
    rows: int,
    q_heads: int,
    k_heads: int,
    dim: int,
    eps: float,
    dtype: int,
) -> None:
    """Rotary embedding in place by address, after an RMS norm per head where weights are given."""

def silu_mul_ptr(gate_up: int, out: int, rows: int, dim: int, dtype: int) -> None:
    """SiLU gate by address: ``out = silu(gate) * up``, gate_up [rows, 2 * dim]."""

def block_bytes(format: str, part: str, tokens: int, dim: int) -> int:
    """Bytes of one head's compressed block, metadata counted."""

def encode_block_ptr(
    format: str,
    part: str,
    tokens: int,
    dim: int,
    rows_ptr: int,
    stride: int,
    dtype: int,
    block_ptr: int,
    bytes: int,
    count: int = 1,
    rows_step: int = 0,
    block_step: int = 0,
) -> None:
    """Encode ``count`` heads by address: rows [tokens, dim] ``rows_step`` elements apart to blocks
    ``block_step`` bytes apart."""

def decode_block_ptr(
    format: str,
    part: str,
    tokens: int,
    dim: int,
    block_ptr: int,
    bytes: int,
    rows_ptr: int,
    stride: int,
    dtype: int,
    count: int = 1,
    rows_step: int = 0,
    block_step: int = 0,
) -> None:
    """The reverse of :func:`encode_block_ptr`."""

def check_block_ptr(
    format: str, part: str, tokens: int, dim: int, block_ptr: int, bytes: int
) -> None:
    """Refuse a block that no encoder writes, by address."""
