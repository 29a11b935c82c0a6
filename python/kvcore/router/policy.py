"""Which workers get a request: the least cost in seconds, by ``kvcore.sched``."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet

from kvcore import sched
from kvcore.router.state import Worker

KEY_UNIT = 64
"""Tokens per page key."""
DEPTH_TOKENS = 2048
"""A worker with this much prompt to compute gets no more: waiting here keeps the choice open, and
decode pages are reserved only for prompts whose turn has come."""
TYPICAL_ANSWER = 128
"""Tokens of an answer that count as promised; a longer one grows into what is free by then."""
_ELEMENT_BYTES = {"f32": 4}


def choose(
    prompt_tokens: int,
    max_new_tokens: int,
    matched: Mapping[bytes, int],
    workers: Iterable[Worker],
    avoid: AbstractSet[bytes],
) -> tuple[Worker, Worker] | sched.Rejection:
    """A prefill and a decode worker, or one mono worker as both; else why not now.

    Args:
        matched: key units each worker holds of the prompt.
        avoid: workers that failed this request before; taken only when there is no other.
    """
    live = [w for w in workers if not w.draining]
    fresh = [w for w in live if w.worker_id not in avoid]
    group = fresh if can_serve(fresh) else live
    group = [w for w in group if w.role == "decode" or w.pending_tokens < DEPTH_TOKENS]
    if not can_serve(group):
        return sched.Rejection("no_room", 1.0)
    _, token_bytes = geometry(group[0].page_spec)
    loads = [_load(worker, matched.get(worker.worker_id, 0) * KEY_UNIT) for worker in group]
    answer = min(max_new_tokens, TYPICAL_ANSWER)
    choice = sched.choose(prompt_tokens, answer, token_bytes, loads)
    if isinstance(choice, sched.Rejection):
        return choice
    return group[choice.prefill], group[choice.decode]


def can_serve(workers: Iterable[Worker]) -> bool:
    """Whether the roles at hand can answer at all."""
    roles = {w.role for w in workers if not w.draining}
    return "mono" in roles or roles >= {"prefill", "decode"}


def uncached(num_tokens: int, units: int) -> int:
    """Prompt tokens to compute when ``units`` key units are held; the last token always is."""
    return num_tokens - min(units * KEY_UNIT, (num_tokens - 1) // KEY_UNIT * KEY_UNIT)


def frames(num_tokens: int, worker: Worker) -> int:
    """Frames that many tokens take at a worker."""
    return -(-num_tokens // geometry(worker.page_spec)[0])


@functools.cache
def geometry(page_spec: str) -> tuple[int, float]:
    """(tokens per frame, KV bytes per token) of a ``PageSpec.describe()`` text."""
    parts = dict(part.split("=", 1) for part in page_spec.split() if "=" in part)

    def number(name: str, default: int) -> int:
        text = parts.get(name, "")
        return int(text) if text.isdigit() else default

    dims = number("head_dim_k", 0) + number("head_dim_v", 0)
    elements = number("layers", 1) * number("kv_heads", 1) * dims
    frame_tokens = number("page_size", KEY_UNIT) * number("extent_pages", 1)
    return frame_tokens, float(elements * _ELEMENT_BYTES.get(parts.get("format", ""), 2))


def _load(worker: Worker, matched_tokens: int) -> sched.WorkerLoad:
    """Frames not promised to requests under way are free, or hold prefixes that can be evicted."""
    return sched.WorkerLoad(
        role=worker.role,
        num_frames=max(worker.num_frames, 1),
        frame_tokens=geometry(worker.page_spec)[0],
        free_frames=worker.num_frames - sum(load.frames for load in worker.attempts.values()),
        queued_tokens=worker.pending_tokens,
        running=len(worker.attempts),
        matched_tokens=matched_tokens,
        prefill_tokens_per_s=worker.tokens_per_s,
        max_context=worker.max_context,
    )
