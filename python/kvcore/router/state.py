"""The router's vocabulary: what a client asks, what it gets back, and what a worker is. No I/O."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Ask:
    """One prompt to continue: token ids, sampling, limits. ``deadline``: router's clock;
    ``kv_profile``: "" = the workers' own."""

    request_id: bytes
    tokens: tuple[int, ...]
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int = -1
    kv_profile: str = ""
    deadline: float = float("inf")


@dataclasses.dataclass(frozen=True)
class Tokens:
    """New tokens; when asked for, one logprob each and num_logprobs ``top_*`` each."""

    ids: Sequence[int]
    logprobs: Sequence[float] = ()
    top_ids: Sequence[int] = ()
    top_logprobs: Sequence[float] = ()


@dataclasses.dataclass(frozen=True)
class Done:
    """The end of an answer and how it was made. ``reason`` is "stop" or "length"."""

    reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    computed_prompt_tokens: int = 0
    kv_bytes: int = 0
    transport: str = ""
    arrived_fraction: float | None = None
    exposed_s: float = 0.0
    prefill_s: float = 0.0
    queue_s: float = 0.0
    attempts: int = 1


@dataclasses.dataclass(frozen=True)
class Failure:
    """The request failed; ``code`` is one word, ``retry_after_s`` > 0 invites to return."""

    code: str
    message: str
    retry_after_s: float = 0.0


Output = Tokens | Done | Failure


@dataclasses.dataclass(frozen=True)
class Send:
    """Action: send one message to a worker."""

    worker_id: bytes
    type: str
    fields: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Deliver:
    """Action: hand an output to the client of a request."""

    request_id: bytes
    output: Output


Action = Send | Deliver


@dataclasses.dataclass
class Load:
    """What one attempt weighs at a worker: prompt tokens not computed yet, frames promised."""

    pending: int
    frames: int


@dataclasses.dataclass(eq=False)
class Worker:
    """A live worker as the router sees it; its load counts from dispatch."""

    worker_id: bytes
    incarnation: int
    role: str
    model: str = ""
    model_epoch: str = ""
    page_spec: str = ""
    max_context: int = 0
    num_frames: int = 0
    pid: int = 0
    kv_profile: str = ""
    kv_table: str = ""
    free_frames: int = 0
    running: int = 0
    waiting: int = 0
    last_seen: float = 0.0
    tokens_per_s: float = 0.0
    stats: dict[str, float] = dataclasses.field(default_factory=dict)
    attempts: dict[bytes, Load] = dataclasses.field(default_factory=dict)
    draining: bool = False

    @property
    def name(self) -> str:
        """Short name for logs and metrics, unique in practice."""
        return f"{self.role}-{self.worker_id.hex()[:8]}"

    @property
    def pending_tokens(self) -> int:
        """Prompt tokens dispatched here that are not computed yet."""
        return sum(load.pending for load in self.attempts.values())


class Phase(enum.Enum):
    """Where the current attempt of a request stands."""

    WAITING = "waiting"
    RESERVING = "reserving"
    PREFILLING = "prefilling"
    DECODING = "decoding"


@dataclasses.dataclass(eq=False)
class Flight:
    """The mutable side of one request: its current attempt and what was delivered so far.

    ``base`` is how many tokens were delivered when the attempt began: an attempt starts from the
    prompt and those, and goes on where the last one broke.
    """

    ask: Ask
    since: float
    namespace: bytes = b""
    keys: list[bytes] | None = None
    phase: Phase = Phase.WAITING
    attempt_id: bytes = b""
    attempts: int = 0
    prefill_id: bytes = b""
    decode_id: bytes = b""
    base: int = 0
    emitted: list[int] = dataclasses.field(default_factory=list)
    avoid: set[bytes] = dataclasses.field(default_factory=set)
    give_up: float = float("inf")
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def tokens(self) -> list[int]:
        """What the next attempt starts from: the prompt and all that was delivered."""
        return [*self.ask.tokens, *self.emitted]
