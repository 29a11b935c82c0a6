"""What a worker is asked and what it answers, and the state of one request in between."""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvcore.compress import PROFILES
from kvcore.errors import InvalidArgument

MAX_LOGPROBS = 20


@dataclass(frozen=True)
class Request:
    """One request; the fields are those of the ``generate`` message (``csrc/wire/messages.cpp``).

    ``tokens`` int32 [prompt]; ``namespace`` 32 bytes, or empty: uncacheable; ``temperature`` 0 is
    greedy; ``num_logprobs`` -1 asks for none; ``deadline_s`` counts from arrival, 0 = none;
    ``kv_profile`` "" = the worker's own, which is also what a less faithful one gets.
    """

    request_id: bytes
    tokens: npt.NDArray[np.int32]
    max_tokens: int
    namespace: bytes = b""
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: Collection[int] = ()
    ignore_eos: int = 0
    num_logprobs: int = -1
    deadline_s: float = 0.0
    kv_profile: str = ""

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Request:
        """From a message's fields; its page keys are for the router's own use."""
        known = {name: value for name, value in fields.items() if name != "keys"}
        return cls(**{**known, "tokens": np.asarray(fields["tokens"], dtype=np.int32)})

    def check(self, vocab_size: int, max_context: int) -> None:
        """Raises InvalidArgument for a request that this model cannot answer."""
        size = self.tokens.size
        if not 1 <= size < max_context:
            raise InvalidArgument(
                f"tokens has {size} entries; allowed: 1..{max_context - 1}"
                f" (context of {max_context} tokens, one left to generate)"
            )
        low, high = int(self.tokens.min()), int(self.tokens.max())
        if low < 0 or high >= vocab_size:
            raise InvalidArgument(f"tokens spans {low}..{high}; allowed: 0..{vocab_size - 1}")
        if len(self.namespace) not in (0, 32):
            raise InvalidArgument(f"namespace has {len(self.namespace)} bytes; allowed: 0 or 32")
        if self.kv_profile not in ("", *PROFILES):
            allowed = ", ".join(PROFILES)
            raise InvalidArgument(f"kv_profile is {self.kv_profile!r}; allowed: {allowed}")
        for name, low_limit, high_limit in (
            ("max_tokens", 1, math.inf),
            ("temperature", 0.0, 1e9),
            ("top_p", math.ulp(0.0), 1.0),
            ("seed", 0, (1 << 64) - 1),
            ("num_logprobs", -1, MAX_LOGPROBS),
            ("deadline_s", 0.0, 1e9),
        ):
            value = getattr(self, name)
            if not low_limit <= value <= high_limit:
                raise InvalidArgument(f"{name} is {value}; allowed: {low_limit}..{high_limit}")


class Output(NamedTuple):
    """One message to the router: ``prefilled`` before the first ``tokens`` (a stop token included),
    ``finished``, ``failed`` or ``reserved``, with the fields of that message."""

    kind: str
    fields: dict[str, Any]


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
    ``num_computed`` ever reached: work below it is recomputation. ``started_s``: first had pages;
    ``extra`` is the role's own; ``kv_table``: of the sealer, from arrival on, 0 = pages stay open.
    """

    request: Request
    max_total: int
    page_size: int
    arrival_s: float = 0.0
    extra: Any = None
    kv_table: int = 0
    state: State = State.WAITING
    num_computed: int = 0
    num_published: int = 0
    num_pages: int = 0
    num_filled: int = 0
    computed_mark: int = 0
    started_s: float = 0.0
    cached_tokens: int = 0
    computed_prompt_tokens: int = 0
    recomputed_tokens: int = 0
    admissions: int = 0
    skip_match: bool = False
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
    def capacity_tokens(self) -> int:
        return self.num_pages * self.page_size

    def hold(self, pages: list[int]) -> None:
        """Appends pages this sequence holds a reference of."""
        end = self.num_pages + len(pages)
        if end > self.pages.size:
            self.pages = np.resize(self.pages, 2 * end)
        self.pages[self.num_pages : end] = pages
        self.num_pages = end

    def computed(self, count: int) -> None:
        """Accounts for ``count`` more tokens with KV in pages, computed here."""
        end = self.num_computed + count
        fresh = max(self.num_computed, min(end, self.computed_mark))  # computed before, up to here
        self.recomputed_tokens += fresh - self.num_computed
        self.computed_prompt_tokens += max(0, min(end, self.num_prompt) - fresh)
        self.num_computed = end
        self.computed_mark = max(self.computed_mark, end)
