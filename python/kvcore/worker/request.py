"""What a worker is asked and what it answers, and the state of one request in between."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from kvcore.errors import InvalidArgument

MAX_LOGPROBS = 20


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen. ``temperature`` 0 is greedy; ``num_logprobs`` -1 asks for none."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    num_logprobs: int = -1

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0.0):
            raise InvalidArgument(f"temperature is {self.temperature}; allowed: finite and >= 0")
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidArgument(f"top_p is {self.top_p}; allowed: above 0, up to 1")
        if not 0 <= self.seed < 1 << 64:
            raise InvalidArgument(f"seed is {self.seed}; allowed: 0..2^64-1")
        if not -1 <= self.num_logprobs <= MAX_LOGPROBS:
            raise InvalidArgument(
                f"num_logprobs is {self.num_logprobs}; allowed: -1 (none)..{MAX_LOGPROBS}"
            )


@dataclass(frozen=True)
class Request:
    """One request as it arrives.

    ``tokens`` int32 [prompt]; ``keys`` the page keys of the prompt's whole key units (may be empty:
    then its pages are not announced); ``namespace`` the key namespace's digest; ``deadline_s``
    seconds from arrival, 0 = none.
    """

    request_id: bytes
    tokens: npt.NDArray[np.int32]
    max_tokens: int
    namespace: bytes = b""
    keys: tuple[bytes, ...] = ()
    sampling: SamplingParams = SamplingParams()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    deadline_s: float = 0.0

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Request:
        """From the fields of a ``generate``, ``reserve`` or ``prefill`` message."""
        return cls(
            request_id=bytes(fields["request_id"]),
            tokens=np.asarray(fields["tokens"], dtype=np.int32),
            max_tokens=int(fields["max_tokens"]),
            namespace=bytes(fields["namespace"]),
            keys=tuple(fields["keys"]),
            sampling=SamplingParams(
                temperature=float(fields["temperature"]),
                top_p=float(fields["top_p"]),
                seed=int(fields["seed"]),
                num_logprobs=int(fields["num_logprobs"]),
            ),
            stop_token_ids=frozenset(fields["stop_token_ids"]),
            ignore_eos=bool(fields["ignore_eos"]),
            deadline_s=float(fields["deadline_s"]),
        )

    def check(self, vocab_size: int, max_context: int) -> None:
        """Raises InvalidArgument for a request that this model cannot answer."""
        if self.tokens.ndim != 1 or not 1 <= self.tokens.size < max_context:
            raise InvalidArgument(
                f"tokens has {self.tokens.size} entries; allowed: 1..{max_context - 1}"
                f" (context of {max_context} tokens, one left to generate)"
            )
        low, high = int(self.tokens.min()), int(self.tokens.max())
        if low < 0 or high >= vocab_size:
            raise InvalidArgument(f"tokens spans {low}..{high}; allowed: 0..{vocab_size - 1}")
        if self.max_tokens < 1:
            raise InvalidArgument(f"max_tokens is {self.max_tokens}; allowed: 1 or more")
        if not (math.isfinite(self.deadline_s) and self.deadline_s >= 0.0):
            raise InvalidArgument(f"deadline_s is {self.deadline_s}; allowed: finite and >= 0")


class State(enum.Enum):
    """Where a sequence is; pages are held from RECEIVING on and given back on the way out."""

    WAITING = enum.auto()
    RECEIVING = enum.auto()
    RUNNING = enum.auto()
    DONE = enum.auto()


@dataclass(eq=False)
class Sequence:
    """A request under way: its tokens so far, and how many of them have their KV in pages.

    ``token_ids`` int32 [max_total] holds the prompt and then what was generated; ``pages`` int32
    page ids in order, of which the first ``num_pages`` are held. ``computed_mark`` is the highest
    ``num_computed`` ever reached: work below it is recomputation.
    """

    request: Request
    max_total: int
    page_size: int
    arrival_s: float = 0.0
    state: State = State.WAITING
    num_computed: int = 0
    num_published: int = 0
    num_pages: int = 0
    num_frames: int = 0
    computed_mark: int = 0
    cached_tokens: int = 0
    computed_prompt_tokens: int = 0
    recomputed_tokens: int = 0
    admissions: int = 0
    skip_match: bool = False
    extra: Any = None
    num_prompt: int = field(init=False)
    num_tokens: int = field(init=False)
    token_ids: npt.NDArray[np.int32] = field(init=False)
    pages: npt.NDArray[np.int32] = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt = self.num_tokens = int(self.request.tokens.size)
        self.token_ids = np.empty(max(self.max_total, self.num_prompt), dtype=np.int32)
        self.token_ids[: self.num_prompt] = self.request.tokens
        self.pages = np.zeros(64, dtype=np.int32)

    @property
    def request_id(self) -> bytes:
        return self.request.request_id

    @property
    def remaining(self) -> int:
        """Tokens whose KV is not computed yet; 1 means a decode row."""
        return self.num_tokens - self.num_computed

    @property
    def num_completion(self) -> int:
        return self.num_tokens - self.num_prompt

    @property
    def capacity_tokens(self) -> int:
        return self.num_pages * self.page_size

    def hold(self, pages: list[int]) -> None:
        """Appends pages this sequence holds a reference of."""
        end = self.num_pages + len(pages)
        if end > self.pages.size:
            grown = np.zeros(max(end, 2 * self.pages.size), dtype=np.int32)
            grown[: self.num_pages] = self.pages[: self.num_pages]
            self.pages = grown
        self.pages[self.num_pages : end] = pages
        self.num_pages = end

    def computed(self, count: int) -> None:
        """Accounts for ``count`` more tokens with KV in pages, computed here."""
        end = self.num_computed + count
        fresh = max(0, end - max(self.num_computed, self.computed_mark))
        self.recomputed_tokens += count - fresh
        start = max(self.num_computed, self.computed_mark)
        self.computed_prompt_tokens += max(0, min(end, self.num_prompt) - start)
        self.num_computed = end
        self.computed_mark = max(self.computed_mark, end)


@dataclass(frozen=True)
class Tokens:
    """Tokens of a request from ``first_index`` (0 = first generated); a stop token is included."""

    kind: ClassVar[str] = "tokens"
    request_id: bytes
    first_index: int
    token_ids: list[int]
    logprobs: list[float] = field(default_factory=list)
    top_ids: list[int] = field(default_factory=list)
    top_logprobs: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Finished:
    """The end of a request: ``reason`` is stop, length or cancelled."""

    kind: ClassVar[str] = "finished"
    request_id: bytes
    reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    computed_prompt_tokens: int
    kv_bytes: int = 0
    arrived_fraction: float = 0.0
    exposed_s: float = 0.0
    transport: str = ""


@dataclass(frozen=True)
class Failed:
    """A request that ended without an answer; ``retryable`` when another worker may do it."""

    kind: ClassVar[str] = "failed"
    request_id: bytes
    code: str
    message: str
    retryable: int = 0


@dataclass(frozen=True)
class Reserved:
    """A decode worker holds pages for the request and grants the uncached ones."""

    kind: ClassVar[str] = "reserved"
    request_id: bytes
    grant: bytes
    cached_tokens: int


@dataclass(frozen=True)
class Prefilled:
    """A prefill worker has handed over the request."""

    kind: ClassVar[str] = "prefilled"
    request_id: bytes
    cached_tokens: int
    computed_tokens: int
    kv_bytes: int
    transport: str
    prefill_s: float
    queue_s: float


Output = Tokens | Finished | Failed | Reserved | Prefilled
