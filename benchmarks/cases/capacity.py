"""Long sequences that one arena holds at once under each KV profile, and tokens/s of them.

The mono engine schedules, admits, seals and decodes for real. Only prompts are not computed each
time: one text is computed once, and a prompt's whole pages are copied from its pages, each sequence
into pages of its own (a namespace each: none is shared) and sealed there. What is left of a prompt
after its last whole page is computed over these. Lengths differ; all prompts begin alike.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import contexts
import numpy as np
import torch
from harness import Context, Result, interleave, now, rate_result
from kvcore import compress, kernels, model
from kvcore.model.calibration import PagedRun
from kvcore.pages import Pool, page_ids_for
from kvcore.worker.engine import Engine
from kvcore.worker.memory import PageMemory
from kvcore.worker.request import Request, State
from kvcore.worker.scheduler import Row

ANSWER = 512  # tokens; no sequence ends meanwhile
IDLE_STEPS = 6  # without an admission, nothing left to seal: the arena is full
TEXT = "module:_pydecimal"


class CopyingEngine(Engine):
    """Copies whole pages of prompts from those of ``source``, which holds the same tokens."""

    source: PagedRun

    def _forward(self, rows: Any) -> torch.Tensor:
        rest = [self._copy(row) if row.count > 1 else row for row in rows]
        real = [row for row in rest if row.count > 0]
        return super()._forward(real) if real else torch.empty(0)

    def _copy(self, row: Row) -> Row:
        """What the copy leaves to compute: nothing but the end of the prompt, if that."""
        pool, page = self.memory.pool, self.memory.page_size
        end = row.start + row.count
        whole = (end - 1 if row.samples else end) // page
        for i in range(row.start // page, whole):
            for layer in range(pool.spec.num_layers):
                ctypes.memmove(
                    pool.slice_address(int(row.seq.pages[i]), layer),
                    self.source.pool.slice_address(self.source.table[i], layer),
                    pool.spec.slice_bytes,
                )
        return Row(row.seq, whole * page, end - whole * page)


class Crowd:
    """As many sequences as an arena of ``num_bytes`` holds under a profile."""

    def __init__(self, source: PagedRun, profile: str, num_bytes: int, lengths: list[int]) -> None:
        lm = source.model
        spec = lm.page_spec()
        frames = num_bytes // spec.frame_bytes
        classes, _ = compress.profile_classes(lm, profile)
        ids = page_ids_for(classes[profile], frames) if classes else 0
        pool = Pool(spec, frames, page_ids=ids)
        plan = kernels.AttentionPlan(
            pool, lm.config.num_q_heads, lm.config.attention_scale, kernels.ThreadPool(1)
        )
        self.engine = CopyingEngine(
            lm, PageMemory(pool, classes=classes), plan, token_budget=8192, max_running=1000
        )
        self.engine.source = source
        tokens = source.tokens.numpy().astype(np.int32)
        for i, length in enumerate(lengths):
            name = i.to_bytes(16, "big")
            self.engine.add(
                Request(name, tokens[:length], ANSWER, namespace=name + name, ignore_eos=1)
            )
        self.held, self.first_preemption = self._fill()

    def _fill(self) -> tuple[int, int]:
        """(most sequences at once before any was preempted, preemptions when nothing moved)."""
        scheduler, sealer, held, idle = self.engine.scheduler, self.engine.memory.sealer, 0, 0
        while idle < IDLE_STEPS and scheduler.waiting:
            before = scheduler.num_live
            self.engine.step()
            if not scheduler.preemptions:
                held = max(held, scheduler.num_live)
            moving = scheduler.num_live != before or (sealer is not None and sealer.waiting)
            idle = 0 if moving else idle + 1
        return held, scheduler.preemptions

    def keep(self, batch: int) -> None:
        """Leaves the ``batch`` oldest sequences that decode and nothing to seal."""
        engine = self.engine
        for seq in [*engine.scheduler.waiting, *engine.scheduler.running[batch:]]:
            engine.cancel(seq.request_id)
        while any(s.remaining > 1 for s in engine.scheduler.running) or (
            engine.memory.sealer is not None and engine.memory.sealer.waiting
        ):
            engine.step()

    def step(self) -> float:
        """Seconds of a step in which every sequence adds a token."""
        running = [s for s in self.engine.scheduler.running if s.state is State.RUNNING]
        start = now()
        made = sum(output.kind == "tokens" for output in self.engine.step())
        taken = now() - start
        assert made == len(running), "a step that is not a decode step of all"
        return taken


def run(context: Context) -> Iterator[Result]:
    """Per profile: sequences held, tokens/s of as many as exact holds, tokens/s of all held."""
    torch.set_num_threads(1)
    lm = model.load(context.model or model.DEFAULT_MODEL)
    least, step, base = (1024, 128, 4) if context.quick else (4096, 384, 8)
    lengths = [least + step * (i % base) + 9 + i for i in range(6 * base)]
    spec, longest = lm.page_spec(), max(lengths)
    ids = np.array(lm.tokenizer(contexts.read(TEXT))["input_ids"], np.int64)
    source = PagedRun(lm, np.resize(ids, longest))
    source.prefill(longest)
    pages = sum(-(-(n + ANSWER // 2) // spec.page_size) for n in lengths[:base])
    crowds = {
        name: Crowd(source, name, pages * spec.page_bytes, lengths) for name in compress.PROFILES
    }
    held = {name: crowd.held for name, crowd in crowds.items()}
    arena = {"model": lm.model_id, "arena_bytes": pages * spec.page_bytes}
    arena["prompts"] = f"{min(lengths)}..{longest}"
    common: dict[str, Any] = {"bytes": 0, "flops": 0, "isa": kernels.isa(), "threads": 1}
    for name, crowd in crowds.items():
        params = {**arena, "profile": name, "preemptions": crowd.first_preemption}
        yield rate_result(
            "capacity", params, [1.0], held[name], "sequences", "exact", [held["exact"]], **common
        )
    for what, batch in (("all held", held), ("equal", dict.fromkeys(held, held["exact"]))):
        for name, crowd in crowds.items():
            crowd.keep(batch[name])
        taken = interleave({n: c.step for n, c in crowds.items()}, context.rounds(16, 6))
        for name in crowds:
            rates = [batch["exact"] / seconds for seconds in taken["exact"]]
            yield rate_result(
                "capacity", {**arena, "profile": name, "what": what, "batch": batch[name]},
                taken[name], batch[name], "tokens/s", "exact", rates, **common,
            )  # fmt: skip
