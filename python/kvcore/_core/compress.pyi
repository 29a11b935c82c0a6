from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from kvcore._core.kernels import ThreadPool
from kvcore._core.pages import PageClass, PageSpec, Pool

def choose(
    spec: PageSpec, statistics: Any, budget_bytes: int, max_key_error: float = 0.05
) -> PageClass: ...
def predicted_error(table: PageClass, statistics: Any) -> npt.NDArray[np.float64]: ...
def budget_bytes(spec: PageSpec, profile: str) -> int: ...
def seal_pages(pool: Pool, pages: Sequence[int], class_number: int) -> None:
    """Encodes full open pages into a class of the pool, in order; their ids stay, their open bytes
    come free.

    No kernel may read the pages meanwhile. Raises InvalidArgument for a page that is not open or
    not owned and for numbers that cannot be encoded, OutOfPages where no run of bytes is free: that
    page and those behind it stay open.
    """

class Sealer:
    """See ``kvcore.compress.Sealer``. A *table* is 0 for open pages, else one of ``tables``."""

    def __init__(self, pool: Pool, classes: Sequence[PageClass], measure: bool = False) -> None: ...
    def offer(self, classes: Sequence[PageClass]) -> None:
        """Other classes for later sequences, as many as before: :attr:`tables` names them.

        Raises InvalidArgument for classes of other pages and for more than the pool can know.
        """
    def observed(self) -> dict[str, Any]:
        """Fields of ``PageStatistics``: means over the slices measured since :meth:`restart`.

        Empty before a round is complete.
        """
    def restart(self) -> None:
        """Forgets what was measured."""
    @property
    def rounds(self) -> int:
        """Times that each layer was measured since :meth:`restart`; one takes 64 sealed pages."""
    def hold(self, pages: Sequence[int], table: int) -> None:
        """A sequence of ``table`` holds ``pages``, until :meth:`drop`."""
    def drop(self, pages: Sequence[int], table: int) -> None:
        """Ends what :meth:`hold` began. Raises InvalidArgument where nothing did."""
    def faithful(self, pages: Sequence[int], table: int) -> int:
        """How many leading ``pages`` a sequence of ``table`` can take."""
    def computed(self, pages: Sequence[int]) -> None:
        """``pages``, in order, are one sequence: each counts as the least faithful before it."""
    def add(self, pages: Sequence[int], table: int = 0, high_first: bool = False) -> int:
        """Queues pages, all tokens of which are in place; how many of them are new here.

        ``table``: 0 = the least faithful one. Pages stay as they are that a sequence of a more
        faithful table holds. ``high_first``: from the highest address down, not in their order.
        """
    def exchange(self, pages: Sequence[int], table: int) -> list[int]:
        """Pages of the table's class in place of open single ones that hold nothing yet.

        For content that arrives compressed (``kvcore.stream``); held as those were. Table 0, or no
        bytes for them: open ones.
        """
    def step(self, busy: bool) -> None:
        """A step's share of the queue; ``busy``: sequences decode, so keep it short."""
    def run(self, max_pages: int) -> int:
        """Seals up to ``max_pages``; fewer when none are left or no bytes are free for one."""
    @property
    def tables(self) -> list[int]:
        """What new sequences get: open pages, then by faithfulness."""
    @property
    def class_number(self) -> int:
        """The pool's number of the least faithful table's class."""
    @property
    def waiting(self) -> int:
        """Pages queued, those that :meth:`run` will pass over among them."""
    @property
    def held(self) -> int:
        """Pages that :meth:`hold` keeps from being sealed, once for each time."""
    @property
    def sealed(self) -> int:
        """Pages sealed so far."""
    @property
    def refused(self) -> int:
        """Pages that hold a number which cannot be encoded."""
    @property
    def under_way(self) -> bool:
        """The last step made the queue shorter, not empty."""
    step_pages: int
    """Pages of a step while sequences decode: about two milliseconds' worth."""

class HeadPages:
    """KV of a pruned sequence: pages and a length for each (layer, KV head), in a pool of
    :func:`kvcore.head_pages.head_pool`; from nothing, or from ``compact``.

    A call that fails changes nothing. Raises InvalidArgument for a pool of other pages and after
    ``release``. When the object goes, its pages are released.
    """

    def __init__(self, pool: Pool, num_layers: int, num_kv_heads: int) -> None: ...
    def grow(self, num_tokens: int) -> None:
        """Makes room for new tokens in every head. Raises OutOfPages."""
    def seal(self, class_numbers: Sequence[int]) -> int:
        """Seals what has become full, but a head's first page, into class ``class_numbers[layer *
        num_kv_heads + head]`` of the pool (0: stays open). Returns how many pages were sealed.

        All tokens that ``grow`` counted have been appended, and no kernel reads the pages
        meanwhile. A page with numbers that cannot be encoded stays open; without free bytes the
        rest waits.
        """
    def release(self) -> None:
        """Gives all pages back; the second time it does nothing."""
    def pages(self, layer: int, head: int) -> list[int]:
        """Page ids that hold one head's tokens, in order. Raises InvalidArgument."""
    @property
    def num_layers(self) -> int:
        """Layers of the sequence."""
    @property
    def num_kv_heads(self) -> int:
        """KV heads of a layer."""
    @property
    def num_tokens(self) -> npt.NDArray[np.int64]:
        """Tokens that each head holds: int64 [num_layers, num_kv_heads]."""
    @property
    def num_pages(self) -> int:
        """Pages held, of all heads."""
    @property
    def released(self) -> bool:
        """Whether :meth:`release` has been called."""

def compact(
    pool: Pool,
    pages: Sequence[int],
    num_tokens: int,
    positions: npt.NDArray[np.int32],
    offsets: npt.NDArray[np.int64],
    head_pool: Pool,
) -> HeadPages: ...

class HeadAttention:
    def __init__(
        self,
        pool: Pool,
        num_layers: int,
        num_kv_heads: int,
        num_q_heads: int,
        scale: float = 0.0,
        threads: ThreadPool | None = None,
    ) -> None: ...
    def prepare(self, sequences: Sequence[HeadPages], cu_seqlens_q: Sequence[int]) -> None: ...
    def append_ptr(
        self, layer: int, k_ptr: int, k_stride: int, v_ptr: int, v_stride: int, dtype: int
    ) -> None:
        """:meth:`append` by address; arguments as ``AttentionPlan.append_ptr``."""
    def attend_ptr(
        self,
        layer: int,
        q_ptr: int,
        q_stride: int,
        out_ptr: int,
        out_stride: int,
        lse_ptr: int,
        dtype: int,
    ) -> None:
        """:meth:`attend` by address; arguments as ``AttentionPlan.attend_ptr``."""
    @property
    def num_seqs(self) -> int:
        """Sequences of the prepared batch."""
    @property
    def num_tokens(self) -> int:
        """New tokens of the prepared batch, over all sequences."""
    @property
    def num_layers(self) -> int:
        """Layers of the sequences."""
    @property
    def num_kv_heads(self) -> int:
        """KV heads of a layer."""
    @property
    def num_q_heads(self) -> int:
        """Query heads."""
