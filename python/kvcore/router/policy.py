"""Which worker gets a request: the least cost in seconds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from kvcore.router.state import Worker

KEY_UNIT = 64
"""Tokens per page key."""
DEPTH_TOKENS = 2048
"""A worker with this much prompt to compute gets no more: waiting here keeps the choice open, and
decode pages are reserved only for prompts whose turn has come."""
_FIRST_GUESS_TOKENS_PER_S = 1000.0
_STREAM_SHARE = 0.02  # exposed seconds of KV stream per second of prefill it follows
_SEQUENCE_S = 0.002  # what one more sequence adds to a decode step, times a typical answer
_TYPICAL_ANSWER = 100
_PRESSURE_S = 0.5  # cost of a decode worker without a free frame


@dataclasses.dataclass(frozen=True)
class Pair:
    """A choice: a prefill and a decode worker, or one mono worker as both."""

    prefill: Worker
    decode: Worker
    cost_s: float


def choose(
    num_tokens: int,
    matched: Mapping[bytes, int],
    workers: Iterable[Worker],
    avoid: set[bytes],
) -> Pair | None:
    """The cheapest pair for a prompt, or None while nobody has room.

    Args:
        num_tokens: length of the prompt.
        matched: key units each worker holds of it.
        avoid: workers that failed this request before; taken only when there is no other.
    """
    live = [w for w in workers if not w.draining]
    fresh = [w for w in live if w.worker_id not in avoid]
    for group in (fresh, live):
        pairs = [*_pairs(num_tokens, matched, group), *_monos(num_tokens, matched, group)]
        if pairs:
            return min(pairs, key=lambda pair: pair.cost_s)
    return None


def can_serve(workers: Iterable[Worker]) -> bool:
    """Whether the roles at hand can answer at all."""
    roles = {w.role for w in workers if not w.draining}
    return "mono" in roles or roles >= {"prefill", "decode"}


def uncached(num_tokens: int, units: int) -> int:
    """Prompt tokens to compute when ``units`` key units are held; the last token always is."""
    return num_tokens - min(units * KEY_UNIT, (num_tokens - 1) // KEY_UNIT * KEY_UNIT)


def _pairs(num_tokens: int, matched: Mapping[bytes, int], live: list[Worker]) -> Iterable[Pair]:
    decodes = [w for w in live if w.role == "decode"]
    for prefill in live:
        if prefill.role != "prefill" or prefill.pending_tokens >= DEPTH_TOKENS:
            continue
        compute = _prefill_s(prefill, num_tokens, matched)
        for decode in decodes:
            missing = uncached(num_tokens, matched.get(decode.worker_id, 0))
            stream = _STREAM_SHARE * missing / _rate(prefill)
            yield Pair(prefill, decode, compute + stream + _decode_s(decode))


def _monos(num_tokens: int, matched: Mapping[bytes, int], live: list[Worker]) -> Iterable[Pair]:
    for mono in live:
        if mono.role == "mono" and mono.pending_tokens < DEPTH_TOKENS:
            cost = _prefill_s(mono, num_tokens, matched) + _decode_s(mono)
            yield Pair(mono, mono, cost)


def _rate(worker: Worker) -> float:
    return worker.tokens_per_s or _FIRST_GUESS_TOKENS_PER_S


def _prefill_s(worker: Worker, num_tokens: int, matched: Mapping[bytes, int]) -> float:
    missing = uncached(num_tokens, matched.get(worker.worker_id, 0))
    return (worker.pending_tokens + missing) / _rate(worker)


def _decode_s(worker: Worker) -> float:
    used = 1.0 - worker.free_frames / worker.num_frames if worker.num_frames else 0.0
    return len(worker.attempts) * _SEQUENCE_S * _TYPICAL_ANSWER + _PRESSURE_S * used**4
