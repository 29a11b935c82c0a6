"""SmolLM2 on one thread: a decode step at batch 1 and 8, and the time to a first token.

Ours is the worker's engine (scheduling, attention over pages, sampling; no socket); a peer is its
own engine in its own process, asked in turn, so that only one of them computes at any time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import torch
from harness import Context, Result, clock_name, median, now, time_result
from kvcore import kernels, model
from kvcore.pages import Pool
from kvcore.worker.engine import Engine
from kvcore.worker.memory import PageMemory
from kvcore.worker.request import Request
from peers import Peer

PROMPT, STEPS = 128, 32
COLD, SHARED = 1024, 896
NAMESPACE = b"\x05" * 32
KV_BYTES = 1 << 30


class Ours:
    """The mono engine on one thread."""

    def __init__(self, name: str) -> None:
        torch.set_num_threads(1)
        self.model = model.load(name)
        pool = Pool(spec := self.model.page_spec(), KV_BYTES // spec.frame_bytes)
        config = self.model.config
        self.threads = kernels.ThreadPool(1)
        plan = kernels.AttentionPlan(
            pool, config.num_q_heads, threads=self.threads, **config.attention_options
        )
        self.engine = Engine(self.model, PageMemory(pool, b"secret"), plan)
        self.rng = random.Random(1)
        self.shared = self.tokens(SHARED)

    def tokens(self, count: int) -> list[int]:
        """New random token ids."""
        return [self.rng.randrange(100, 49_000) for _ in range(count)]

    def add(self, tokens: list[int], max_tokens: int) -> None:
        """Queue a request that is generated to its end."""
        self.engine.add(
            Request(
                self.rng.randbytes(16),
                np.array(tokens, np.int32),
                max_tokens,
                namespace=NAMESPACE,
                ignore_eos=1,
            )
        )

    def decode(self, batch: int) -> list[float]:
        """Seconds of every step in which ``batch`` sequences each add one token."""
        for _ in range(batch):
            self.add(self.tokens(PROMPT), STEPS + 1)
        started: set[bytes] = set()
        while len(started) < batch:
            started |= {o.fields["request_id"] for o in self.engine.step() if o.kind == "tokens"}
        taken = []
        while self.engine.has_work:
            start = now()
            made = sum(o.kind == "tokens" for o in self.engine.step())
            if made == batch:
                taken.append(now() - start)
        return taken

    def first_token(self, shared: int) -> float:
        """Seconds from the request to its first token; ``shared`` tokens may be cached."""
        prompt = self.shared[:shared] + self.tokens(COLD - shared)
        start = now()
        self.add(prompt, 1)
        while self.engine.has_work:
            self.engine.step()
        return now() - start


def run(context: Context) -> Iterator[Result]:
    """Decode at batch 1 and 8, then a first token without and with a cached prefix."""
    ours = Ours(context.model or model.DEFAULT_MODEL)
    peers = {
        name: Peer(f"{name}_model.py", python, "--model", str(ours.model.path))
        for name, python in context.peers.items()
    }
    try:
        for batch in (1, 8):
            yield from decode(context, ours, peers, batch)
        for shared in (0, SHARED):
            yield from first_token(context, ours, peers, shared)
    finally:
        for peer in peers.values():
            peer.close()


def decode(context: Context, ours: Ours, peers: dict[str, Peer], batch: int) -> Iterator[Result]:
    """Rounds of ours and of every peer, in turn."""
    request = {
        "op": "decode",
        "batch": batch,
        "prompt": PROMPT,
        "steps": STEPS,
        "clock": clock_name(),
    }
    steps: list[float] = []
    theirs: dict[str, list[float]] = {name: [] for name in peers}
    for round_ in range(context.rounds(6, 2) + 1):
        mine = ours.decode(batch)
        replies = {name: peer.ask(request)["seconds"] for name, peer in peers.items()}
        if round_ > 0:  # the first round warms both up
            steps += mine
            for name, value in replies.items():
                theirs[name].append(value)
    params = {"model": ours.model.model_id, "batch": batch, "prompt": PROMPT, "what": "decode"}
    yield from results(ours, params, steps, peers, theirs)


def first_token(
    context: Context, ours: Ours, peers: dict[str, Peer], shared: int
) -> Iterator[Result]:
    """Time to the first token of a prompt of which ``shared`` tokens are cached."""
    request = {"op": "ttft", "prompt": COLD, "shared": shared, "clock": clock_name()}
    mine: list[float] = []
    theirs: dict[str, list[float]] = {name: [] for name in peers}
    for round_ in range(context.rounds(5, 2) + 1):
        taken = ours.first_token(shared)
        replies = {name: peer.ask(request)["seconds"] for name, peer in peers.items()}
        if round_ > 0:
            mine.append(taken)
            for name, value in replies.items():
                theirs[name].append(value)
    params = {"model": ours.model.model_id, "batch": 1, "prompt": COLD, "cached": shared}
    yield from results(ours, {**params, "what": "first_token"}, mine, peers, theirs)


def results(
    ours: Ours,
    params: dict[str, object],
    mine: list[float],
    peers: dict[str, Peer],
    theirs: dict[str, list[float]],
) -> Iterator[Result]:
    """One line per peer, or one without a limit."""
    rest = {"bytes": 0, "flops": 0, "isa": kernels.isa(), "threads": 1}
    if not theirs:
        yield time_result("model_step", params, mine, "ms", "none", [], **rest)
    for name, values in theirs.items():
        version, threads = peers[name].info["version"], peers[name].info["threads"]
        about = {**params, "peer_version": version, "peer_threads": threads}
        about["peer_median_ms"] = round(median(values) * 1e3, 3)
        yield time_result("model_step", about, mine, "ms", name, values, **rest)
