"""Where a request goes: one cost in seconds over (prefill, decode) pairs and mono workers.

Pure: the same arguments give the same choice, live and in a simulator (csrc/sched/placement.h).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcore import _core

__all__ = ["CostModel", "LoadBook", "Placement", "Rejection", "WorkerLoad", "choose"]

LoadBook = _core.sched.LoadBook


@dataclass(frozen=True)
class WorkerLoad:
    """What is known of a worker when a request is placed.

    Attributes:
        role: "mono", "prefill" or "decode".
        num_frames, frame_tokens: its page memory; ``frame_tokens = page_size * extent_pages``.
        free_frames: free or evictable, less what is promised to requests under way.
        queued_tokens: prompt tokens dispatched there that are not computed yet.
        running: sequences decoding there.
        matched_tokens: tokens of this prompt in its prefix cache.
        prefill_tokens_per_s: measured rate, 0 if unknown.
        max_context: most tokens of prompt and answer, 0 without limit.
    """

    role: str
    num_frames: int
    frame_tokens: int
    free_frames: int
    queued_tokens: int = 0
    running: int = 0
    matched_tokens: int = 0
    prefill_tokens_per_s: float = 0.0
    max_context: int = 0


@dataclass(frozen=True)
class CostModel:
    """Constants of the cost, in seconds unless named otherwise.

    Attributes:
        unknown_tokens_per_s: rate assumed for a worker that was not measured.
        link_bytes_per_s: rate of the KV stream.
        stream_tail: share of the stream that follows the end of prefill on any link.
        sequence_s: what one running sequence costs a newcomer.
        pressure_s: cost of a decode worker without a free frame.
        frame_s: time until a busy worker frees one frame.
        max_wait_s: longest acceptable time to the first token; 0 without limit.
    """

    unknown_tokens_per_s: float = 1000.0
    link_bytes_per_s: float = 1e9
    stream_tail: float = 0.02
    sequence_s: float = 0.2
    pressure_s: float = 0.5
    frame_s: float = 0.5
    max_wait_s: float = 0.0


@dataclass(frozen=True)
class Placement:
    """The choice: positions in the list of workers (equal for a mono worker) and its cost."""

    prefill: int
    decode: int
    queue_s: float
    prefill_s: float
    stream_s: float
    decode_s: float
    pressure_s: float

    @property
    def cost_s(self) -> float:
        """The sum that was minimised."""
        return self.queue_s + self.prefill_s + self.stream_s + self.decode_s + self.pressure_s


@dataclass(frozen=True)
class Rejection:
    """No placement: ``reason`` is "no_workers", "too_long", "no_room" or "too_slow".

    ``retry_after_s`` is 0 when retrying is useless (too_long).
    """

    reason: str
    retry_after_s: float


def choose(
    prompt_tokens: int,
    max_new_tokens: int,
    kv_bytes_per_token: float,
    workers: Sequence[WorkerLoad],
    model: CostModel | None = None,
) -> Placement | Rejection:
    """The cheapest placement of one request, or why there is none.

    Args:
        prompt_tokens: 1 and up. max_new_tokens: 0 and up.
        kv_bytes_per_token: of the KV stream between the workers of a pair.
        workers: candidates; on equal cost the earlier one is taken.
        model: constants, by default those of :class:`CostModel`.

    Raises:
        InvalidArgument: a number out of range, named with its worker.
    """
    out = _core.sched.choose(
        prompt_tokens, max_new_tokens, kv_bytes_per_token, workers, model or CostModel()
    )
    return Rejection(*out) if len(out) == 2 else Placement(*out)
