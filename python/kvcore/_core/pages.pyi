from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from kvcore._core.base import FaultPlan

class PageSpec:
    """Geometry of pages: layers, KV heads, head dims, tokens per page, number format, layout.

    ``extent_pages`` 0 picks how many consecutive pages a frame has. ``align_bytes``, of frames and
    compressed runs, is 4096, or 64 for small pages that stay in the process. ``latent``: multi-head
    latent attention, one KV head whose V is the first ``head_dim_v`` dims of K and takes no bytes;
    layout "canonical". Raises InvalidArgument naming the field and what is allowed.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim_k: int,
        head_dim_v: int | None = None,
        page_size: int = 64,
        extent_pages: int = 0,
        format: str = "bf16",
        layout: str = "packed",
        align_bytes: int = 4096,
        latent: bool = False,
    ) -> None: ...
    @property
    def latent(self) -> bool:
        """Whether V is the first ``head_dim_v`` dims of K (multi-head latent attention)."""
    @property
    def num_layers(self) -> int:
        """Layers of a page."""
    @property
    def num_kv_heads(self) -> int:
        """KV heads of a layer."""
    @property
    def head_dim_k(self) -> int:
        """Elements of one head's K of one token."""
    @property
    def head_dim_v(self) -> int:
        """Elements of one head's V of one token; ``head_dim_k`` unless given."""
    @property
    def page_size(self) -> int:
        """Tokens of a page: 16, 32, 64 or 128."""
    @property
    def align_bytes(self) -> int:
        """What frames and compressed runs are rounded up to: 4096 or 64."""
    @property
    def extent_pages(self) -> int:
        """Consecutive pages of a frame, 1 to 16; never 0, which picks a number."""
    @property
    def format(self) -> str:
        """Element format of open pages: "bf16", "f16" or "f32"."""
    @property
    def layout(self) -> str:
        """Order of a head's elements: "packed", as kernels read them, or "canonical",
        [tokens, head_dim].
        """
    @property
    def slice_bytes(self) -> int:
        """Bytes of one layer of one open page: a header of 64 and all heads, 64 B aligned."""
    @property
    def layer_stride_bytes(self) -> int:
        """Bytes from a layer of a frame to the next: ``extent_pages * slice_bytes``."""
    @property
    def frame_bytes(self) -> int:
        """Bytes of ``extent_pages`` open pages of all layers, rounded up to ``align_bytes``."""
    @property
    def page_bytes(self) -> int:
        """Bytes of one open page of all layers, not rounded up."""
    def usable_prefix(self, num_tokens: int) -> int:
        """Tokens of a prompt of ``num_tokens`` that a cache may give: :func:`usable_prefix`."""
    def describe(self) -> str:
        """Every field as one line of text; equal specs have equal texts."""
    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...

class PageClass:
    """Formats of K and V by layer and KV head, and the bytes of a page that follow.

    ``formats[layer][head]`` is (K format, V format): the spec's own, "int8", "fp8", "k4" (K only),
    "v4" or "v3" (V only). Raises InvalidArgument naming the entry and what is allowed.
    """

    def __init__(self, spec: PageSpec, formats: Sequence[Sequence[tuple[str, str]]]) -> None: ...
    @staticmethod
    def open(spec: PageSpec) -> PageClass:
        """The class of open pages: the spec's own format in every head."""
    @property
    def spec(self) -> PageSpec:
        """The geometry that the formats are of."""
    @property
    def formats(self) -> list[list[tuple[str, str]]]:
        """``[layer][KV head]`` of (K format, V format)."""
    @property
    def is_open(self) -> bool:
        """Whether every head has the spec's own format."""
    @property
    def page_bytes(self) -> int:
        """Bytes of one page: its slices of all layers, not rounded up."""
    def run_bytes(self, num_pages: int) -> int:
        """Bytes of ``num_pages`` pages that lie together, rounded up to ``align_bytes``."""
    def slice_bytes(self, layer: int) -> int:
        """Bytes of one page's slice of ``layer``. Raises InvalidArgument for no such layer."""
    def block_offsets(self, layer: int) -> list[tuple[int, int]]:
        """Per KV head, where its K and its V begin: bytes from the slice's start.

        Raises InvalidArgument for no such layer.
        """
    @property
    def digest(self) -> bytes:
        """BLAKE2b-256 of :meth:`describe`, 32 bytes: what peers and caches compare."""
    def describe(self) -> str:
        """Geometry and formats as text; equal classes have equal texts."""
    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...

class ReadonlyMapping:
    """A peer's view of an :class:`Arena`, made by :meth:`Arena.map_readonly`."""

    @property
    def bytes(self) -> int:
        """Bytes mapped."""
    @property
    def address(self) -> int:
        """Address of the first byte in this process; valid while the object lives."""

class Arena:
    """One piece of memory behind all pages of a pool, in huge pages where the system gives them.

    Peers on this machine may map it, but only for reading. ``bytes``: 1 to 2**46, rounded up to
    2 MiB; every page is touched at once. Raises InvalidArgument, and IoError where memory cannot be
    had.
    """

    def __init__(self, bytes: int, huge_pages: bool = True) -> None: ...
    @property
    def bytes(self) -> int:
        """Size, a multiple of 2 MiB."""
    @property
    def huge_bytes(self) -> int:
        """The part of it that the system really mapped by 2 MiB pages."""
    @property
    def fd(self) -> int:
        """The memfd behind it; the arena's own, not to be closed."""
    @property
    def address(self) -> int:
        """Address of the first byte."""
    def reopen_readonly(self) -> int:
        """A new descriptor that cannot be mapped for writing; the caller closes it.

        Raises IoError.
        """
    @staticmethod
    def map_readonly(fd: int, bytes: int) -> ReadonlyMapping:
        """Maps ``bytes`` of an arena that another process passed as a descriptor.

        Raises InvalidArgument for a file that can shrink, IoError.
        """

class Pool:
    def __init__(
        self,
        spec: PageSpec,
        num_frames: int,
        arena: Arena | None = None,
        huge_pages: bool = True,
        page_ids: int = 0,
    ) -> None: ...
    def alloc(self, num_pages: int, run_pages: int = 0) -> list[int]:
        """Page ids for new KV, each with one owner ref; all or nothing.

        Whole frames, so ``ceil(num_pages / extent_pages) * extent_pages`` ids: ``alloc(3)`` gives 4
        where a frame has 4 pages. The ids beyond ``num_pages`` are the caller's too, for the
        sequence to grow into; a frame comes free when all its pages are given back.

        Args:
            num_pages: 0 and up.
            run_pages: 0, or ``extent_pages``: as above. 1: exactly ``num_pages`` single pages.

        Raises:
            OutOfPages: not as many are free. InvalidArgument: a number out of range.
        """
    def alloc_in_class(self, num_pages: int, class_number: int) -> list[int]:
        """``num_pages`` single pages, compressed from the start, each with one owner ref.

        Their bytes are not written: they are for KV that arrives as it is kept (``kvcore.stream``).
        All or nothing. Raises OutOfPages, InvalidArgument.
        """
    def free_pages(self, run_pages: int = 0) -> int:
        """Pages that ``alloc(n, run_pages)`` could give now; 1 also joins free frames."""
    def add_class(self, page_class: PageClass) -> int:
        """The number of a class that pages can be sealed into, from 1; an equal one keeps its own.

        Raises InvalidArgument for a class of another geometry, one that is open, and for too many.
        """
    def page_class(self, class_number: int) -> PageClass:
        """The class of a number that :meth:`add_class` gave; 0: that of open pages.

        Raises InvalidArgument.
        """
    def class_pages(self) -> list[int]:
        """Allocated pages by class number."""
    def class_of(self, page: int) -> int:
        """The class number of a page; 0: open. Raises InvalidArgument for no such page."""
    def slice_address(self, page: int, layer: int) -> int:
        """Address of a page's slice of a layer, its header first. Raises InvalidArgument."""
    def incref(self, pages: Sequence[int]) -> None:
        """One more owner ref for each entry of ``pages``, which may repeat a page.

        Raises InvalidArgument for a page that nobody owns; then nothing has changed.
        """
    def decref(self, pages: Sequence[int]) -> None:
        """One owner ref less for each entry of ``pages``, which may repeat a page.

        A page without owner and io refs is free, with its frame where it has one. Raises
        InvalidArgument for more than there are; then nothing has changed.
        """
    def io_acquire(self, pages: Sequence[int]) -> None:
        """One more io ref each: a transfer reads or writes these bytes, which are not reused.

        Raises InvalidArgument for a page that nobody holds; then nothing has changed.
        """
    def io_release(self, pages: Sequence[int]) -> None:
        """Ends what :meth:`io_acquire` began. Raises InvalidArgument for more than there are."""
    def seal(self, pages: Sequence[int]) -> None:
        """Makes pages immutable until they are free; their bytes stay as they are.

        To compress them see ``kvcore.compress``. Raises InvalidArgument for a page nobody owns.
        """
    def is_sealed(self, page: int) -> bool:
        """Whether a page is immutable. Raises InvalidArgument for no such page."""
    def generation(self, page: int) -> int:
        """Grows by one when the page comes free: an older (page, generation) is stale.

        Raises InvalidArgument for no such page.
        """
    def refs(self, page: int) -> tuple[int, int]:
        """(owner refs, io refs) of a page. Raises InvalidArgument for no such page."""
    def _stats(self) -> tuple[int, int, int, int, int, int, int, int, int, int, int]: ...
    def set_faults(self, faults: FaultPlan | None) -> None:
        """Tests only: allocations and seals fail where the plan says so (points "pool.alloc",
        "pool.seal"); None ends that.
        """
    def read_slice(self, page: int, layer: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """A page's K and V of one layer: [page_size, num_kv_heads, head_dim] each, copied.

        float32 for "f32", else uint16 bit patterns of the spec's format. Raises InvalidArgument.
        """
    def write_slice(self, page: int, layer: int, k: npt.NDArray[Any], v: npt.NDArray[Any]) -> None:
        """Fills one layer of an open page; arrays as :meth:`read_slice` gives them.

        Also float16 arrays for "f16". Raises InvalidArgument naming the array and what is allowed.
        """
    @property
    def spec(self) -> PageSpec:
        """The geometry of its pages."""
    @property
    def arena(self) -> Arena:
        """The memory behind them."""
    @property
    def num_pages(self) -> int:
        """Page ids, 0 to ``num_pages - 1``."""
    @property
    def view_address(self) -> int:
        """Address of what kernels read pages by, for the ``*_ptr`` functions; never changes."""

class SequencePages:
    """The pages of one sequence in order, and the one place that gives them back.

    Gone with the object, if not by :meth:`release`. One thread at a time, but ``release``.
    """

    def __init__(self, pool: Pool) -> None: ...
    def adopt(self, prefix: Sequence[int], num_tokens: int) -> None:
        """Takes over the caller's owner refs of pages that hold the first ``num_tokens`` tokens.

        Such as a prefix match returned. Raises InvalidArgument unless the sequence is empty and the
        tokens fill the pages.
        """
    def grow(self, num_tokens: int) -> None:
        """Room for ``num_tokens`` in all, which count as held from then on; all or nothing.

        Raises OutOfPages, InvalidArgument (fewer than now, or released).
        """
    def truncate(self, num_tokens: int) -> None:
        """Keeps the first ``num_tokens``, 0 to what it holds; pages behind them go back.

        But not the rest of the frame that the last kept token lies in. Raises InvalidArgument.
        """
    def replace_prefix(self, pages: Sequence[int]) -> None:
        """Points the first pages at equal ones, those of the prefix index, and gives the old ones
        back. Raises InvalidArgument for more pages than are full.
        """
    def release(self) -> None:
        """Gives every page back. Any thread, any number of times; the first one counts."""
    @property
    def released(self) -> bool:
        """Whether :meth:`release` has been called."""
    @property
    def pages(self) -> list[int]:
        """Page ids in token order, those beyond ``num_tokens`` included."""
    @property
    def num_tokens(self) -> int:
        """Tokens held."""
    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit without another page: ``len(pages) * page_size``."""

def usable_prefix(num_tokens: int, page_size: int) -> int:
    """Tokens of a prompt that may come from a cache: whole pages, one token left to compute."""

def block_table(
    rows: Sequence[Sequence[int]], max_pages: int | None = None
) -> npt.NDArray[np.int32]:
    """Rows of page ids as int32 [num_seqs, max_pages], filled up with -1."""

def slot_mapping(
    pages: Sequence[int], page_size: int, first_token: int, num_tokens: int
) -> npt.NDArray[np.int64]:
    """Where tokens from ``first_token`` on go: int64 [num_tokens], page * page_size + slot."""
