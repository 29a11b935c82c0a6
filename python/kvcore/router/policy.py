"""Which workers get a request: the least cost in seconds, by ``kvcore.sched``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet

from kvcore import sched
from kvcore.pages import geometry
from kvcore.router.state import Worker

DEPTH_TOKENS = 2048
"""A worker with this much prompt to compute gets no more: waiting here keeps the choice open, and
decode pages are reserved only for prompts whose turn has come."""
TYPICAL_ANSWER = 128
"""Tokens of an answer that count as promised; a longer one grows into what is free by then."""


def choose(
    prompt_tokens: int,
    max_new_tokens: int,
    matched: Mapping[bytes, int],
    workers: Iterable[Worker],
    avoid: AbstractSet[bytes],
) -> tuple[Worker, Worker] | sched.Rejection:
    """A prefill and a decode worker, or one mono worker as both; else why not now.

    Args:
        matched: pages each worker holds of the prompt.
        avoid: workers that failed this request before; taken only when there is no other.
    """
    live = [w for w in workers if not w.draining]
    fresh = [w for w in live if w.worker_id not in avoid]
    group = fresh if can_serve(fresh) else live
    group = [w for w in group if w.role == "decode" or w.pending_tokens < DEPTH_TOKENS]
    if not can_serve(group):
        return sched.Rejection("no_room", 1.0)
    token_bytes = geometry(group[0].page_spec).token_bytes
    loads = [_load(worker, matched.get(worker.worker_id, 0)) for worker in group]
    answer = min(max_new_tokens, TYPICAL_ANSWER)
    choice = sched.choose(prompt_tokens, answer, token_bytes, loads)
    if isinstance(choice, sched.Rejection):
        return choice
    return group[choice.prefill], group[choice.decode]


def can_serve(workers: Iterable[Worker], more: AbstractSet[str] = frozenset()) -> bool:
    """Whether the roles at hand, and ``more``, can answer at all."""
    roles = {w.role for w in workers if not w.draining} | more
    return "mono" in roles or roles >= {"prefill", "decode"}


def uncached(num_tokens: int, units: int, page_size: int) -> int:
    """Prompt tokens to compute when ``units`` pages are held; the last token always is."""
    return num_tokens - min(units * page_size, (num_tokens - 1) // page_size * page_size)


def frames(num_tokens: int, worker: Worker) -> int:
    """Frames that many tokens take at a worker."""
    return -(-num_tokens // geometry(worker.page_spec).frame_tokens)


def _load(worker: Worker, matched_pages: int) -> sched.WorkerLoad:
    """Frames not promised to requests under way are free, or hold prefixes that can be evicted."""
    shape = geometry(worker.page_spec)
    return sched.WorkerLoad(
        role=worker.role,
        num_frames=max(worker.num_frames, 1),
        frame_tokens=shape.frame_tokens,
        free_frames=worker.num_frames - sum(load.frames for load in worker.attempts.values()),
        queued_tokens=worker.pending_tokens,
        running=len(worker.attempts),
        matched_tokens=matched_pages * shape.page_size,
        prefill_tokens_per_s=worker.tokens_per_s,
        max_context=worker.max_context,
    )
