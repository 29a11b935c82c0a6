"""Engine: one model over one pool of pages; requests in, tokens out, one step at a time.

Holds no socket or thread and reads time only through ``clock``. Not thread-safe.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Rows
from typing import Any

import torch

from kvcore.compress import page_share
from kvcore.errors import InvalidArgument, KvcoreError, OutOfPages
from kvcore.model.sampling import Sampled, sample
from kvcore.worker.batch import BatchArrays
from kvcore.worker.memory import PageMemory
from kvcore.worker.request import Output, Request, Sequence, State
from kvcore.worker.scheduler import Row, Scheduler

log = logging.getLogger(__name__)

_DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # as in kvcore.kernels

_COUNTERS = (
    "steps", "generated_tokens", "computed_prompt_tokens", "recomputed_tokens", "cached_tokens",
    "kv_bytes_sent", "kv_bytes_received",
)  # fmt: skip


def snake(name: str) -> str:
    """The wire's name of an error class: ``InvalidArgument`` is ``invalid_argument``."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class Engine:
    """Continuous batching of a model over pages (the mono role; the base of the other two).

    Args:
        model: ``config``, and ``forward(tokens [T], positions [T], attend, logits_rows [R])`` ->
            float32 [R, vocab].
        memory: the pages; plan: a ``kernels.AttentionPlan`` over the same pool.
        token_budget: tokens per step shared by decode rows and prompt chunks.
        max_running: sequences that hold pages at once.
    """

    decodes = True
    receives = False

    def __init__(
        self,
        model: Any,
        memory: PageMemory,
        plan: Any,
        *,
        token_budget: int = 512,
        max_running: int = 64,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model, self.memory, self.plan, self.clock = model, memory, plan, clock
        self.max_context = int(model.config.max_position)
        self.scheduler = Scheduler(
            memory, token_budget, max_running, decodes=self.decodes, receives=self.receives
        )
        self.counters = dict.fromkeys(_COUNTERS, 0)
        self._live: dict[bytes, Sequence] = {}
        self._outputs: list[Output] = []

    # Requests in, outputs out.

    @property
    def has_work(self) -> bool:
        return bool(self._live) or bool(self._outputs)

    def add(self, request: Request, extra: Any = None) -> Sequence:
        """Queues a request. Raises InvalidArgument or OutOfPages when it can never be answered."""
        request.check(self.model.config.vocab_size, self.max_context)
        if request.request_id in self._live:
            raise InvalidArgument(f"request_id {request.request_id.hex()} is already in use here")
        capacity, num_prompt = self.memory.capacity(request.kv_profile), int(request.tokens.size)
        most = self.memory.capacity_tokens if self.receives else capacity  # no open page may lack
        if num_prompt > most:
            raise OutOfPages(
                f"tokens has {num_prompt} entries; the pool holds {most} tokens in all"
            )
        # The last token generated needs no KV: one more than the pool holds may come out.
        max_total = min(num_prompt + request.max_tokens, self.max_context, capacity + 1)
        table = self.memory.table(request.kv_profile)
        seq = Sequence(request, max_total, self.memory.page_size, self.clock(), extra, table)
        self._live[request.request_id] = seq
        self.scheduler.add(seq)
        return seq

    def cancel(self, request_id: bytes) -> bool:
        """Ends a request and frees its pages; False when it is unknown (already over)."""
        seq = self._live.get(request_id)
        if seq is None:
            return False
        self._finish(seq, "cancelled")
        return True

    def cancel_all(self) -> None:
        for seq in list(self._live.values()):
            self._finish(seq, "cancelled")

    def step(self) -> list[Output]:
        """Computes one batch, if there is one, and returns what happened since the last call."""
        self.compute(self.begin())
        return self.drain()

    def begin(self) -> list[Row]:
        """The rows of the next batch; what this brings about should be told before computing."""
        self.poll()
        self._check_deadlines()
        if self.memory.sealer:
            self.memory.sealer.step(busy=bool(self.scheduler.running))
        rows = self.scheduler.schedule()
        while self.scheduler.stuck:
            text = "the KV of this request fits only compressed, and that could not be done"
            self._fail(self.scheduler.stuck.pop(), "kv_cannot_be_compressed", text)
        for seq in self.scheduler.take_admitted():
            try:
                self._admitted(seq)
            except KvcoreError as error:
                self._fail(seq, snake(type(error).__name__), str(error), retryable=True)
        return [row for row in rows if row.seq.state is State.RUNNING]

    def compute(self, rows: list[Row]) -> None:
        """One forward step over ``rows``; its failure ends their requests and nothing else."""
        if not rows:
            return
        try:
            self._run(rows)
        except (KvcoreError, RuntimeError, MemoryError) as error:
            log.exception("a step of %d rows failed", len(rows))
            for row in rows:
                if row.seq.state is not State.DONE:
                    self._fail(row.seq, "internal", f"the step failed: {error}", retryable=True)

    def drain(self) -> list[Output]:
        """Outputs not taken yet."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def stats(self) -> dict[str, float]:
        """Counters and gauges by name."""
        pool = self.memory.pool.stats()
        gauges = {
            "running": self.scheduler.num_live,
            "waiting": len(self.scheduler.waiting),
            "waiting_tokens": self.scheduler.waiting_tokens,
            "free_frames": pool.free_frames,
            "num_frames": self.memory.num_frames,
            "owned_pages": self.memory.owned_pages,
            "free_bytes": pool.free_bytes,
            "open_bytes": pool.open_bytes,
            "compressed_bytes": pool.compressed_bytes,
            "compressed_pages": sum(self.memory.pool.class_pages()[1:]),
            "kv_page_share": page_share(self.memory.page_class),
            "kv_drift": self.memory.sealer.regret if self.memory.sealer else 1.0,
            "preemptions": self.scheduler.preemptions,
        }
        return {name: float(value) for name, value in (gauges | self.counters).items()}

    # One step.

    def _run(self, rows: list[Row]) -> None:
        logits = self._forward(rows)
        sampling = [row.seq for row in rows if row.samples]
        for row in rows:
            self._computed(row)
        if not sampling:
            return
        chosen = sample(logits, [s.request for s in sampling], [s.num_tokens for s in sampling])
        for seq, token in zip(sampling, chosen, strict=True):
            if token is None:
                self._fail(seq, "internal", "the model gave logits that are not finite")
            else:
                self._sampled(seq, token)

    def _forward(self, rows: list[Row]) -> torch.Tensor:
        arrays = BatchArrays.of(rows)
        self.plan.prepare(arrays.cu_seqlens_q, arrays.context_lens, arrays.block_table)
        attention = self._attention(rows)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out = torch.empty(q.shape[0], q.shape[1] * v.shape[2], dtype=q.dtype)
            attention.run_ptr(
                layer, q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0), v.data_ptr(),
                v.stride(0), out.data_ptr(), 0, _DTYPE_CODES[q.dtype],
            )  # fmt: skip
            return out

        with torch.inference_mode():
            logits: torch.Tensor = self.model.forward(
                arrays.tokens, arrays.positions, attend, arrays.logits_rows
            )
        self.counters["steps"] += 1
        return logits

    def _computed(self, row: Row) -> None:
        seq = row.seq
        before = seq.computed_prompt_tokens, seq.recomputed_tokens
        seq.computed(row.count)
        self.counters["computed_prompt_tokens"] += seq.computed_prompt_tokens - before[0]
        self.counters["recomputed_tokens"] += seq.recomputed_tokens - before[1]
        if seq.num_computed <= seq.num_prompt:
            self.memory.publish(seq)
        if row.samples:  # no prompt chunk will read its pages any more
            self.memory.fill(seq)

    def _accept(self, seq: Sequence, chosen: Sampled) -> None:
        """Appends a generated token, tells it, and ends the request when it is the last."""
        self._tell("tokens", seq, first_index=seq.num_tokens - seq.num_prompt, **vars(chosen))
        (token,) = chosen.token_ids
        seq.token_ids[seq.num_tokens] = token
        seq.num_tokens += 1
        self.counters["generated_tokens"] += 1
        request = seq.request
        stops: Iterable[int] = () if request.ignore_eos else self.model.config.eos_ids
        if token in request.stop_token_ids or token in stops:
            self._finish(seq, "stop")
        elif seq.num_tokens >= seq.max_total:
            self._finish(seq, "length")

    # Ends: each gives back the pages once.

    def _finish(self, seq: Sequence, reason: str) -> None:
        if reason != "cancelled":
            self.memory.publish(seq)
        self._remove(seq)
        self._tell_finished(seq, reason)

    def _tell_finished(self, seq: Sequence, reason: str) -> None:
        facts = {
            "reason": reason,
            "prompt_tokens": seq.num_prompt,
            "completion_tokens": seq.num_tokens - seq.num_prompt,
            "cached_tokens": seq.cached_tokens,
            "computed_prompt_tokens": seq.computed_prompt_tokens,
        }
        self._tell("finished", seq, **(facts | self._facts(seq)))

    def _fail(self, seq: Sequence, code: str, message: str, retryable: bool = False) -> None:
        self._remove(seq)
        self._tell("failed", seq, code=code, message=message, retryable=int(retryable))

    def _tell(self, kind: str, seq: Sequence, **fields: Any) -> None:
        self._outputs.append(Output(kind, {"request_id": seq.request_id, **fields}))

    def _remove(self, seq: Sequence) -> None:
        del self._live[seq.request_id]
        self._ended(seq)
        self.scheduler.remove(seq)

    def _check_deadlines(self) -> None:
        now = self.clock()
        late = [
            seq for seq in self._live.values() if 0.0 < seq.request.deadline_s < now - seq.arrival_s
        ]
        for seq in late:
            self._fail(seq, "timeout", f"deadline_s of {seq.request.deadline_s} passed")

    # What the prefill and decode roles do differently.

    event_fd = -1

    def close(self) -> None:
        """Ends what the role has opened."""

    def poll(self) -> None:
        """Takes the events of a stream; ``event_fd`` is readable when there are any."""

    def _admitted(self, seq: Sequence) -> None:
        """Called when ``seq`` got its pages."""
        if seq.admissions == 1:
            seq.started_s = self.clock()
            self.counters["cached_tokens"] += seq.cached_tokens

    def _facts(self, seq: Sequence) -> dict[str, Any]:
        """Fields of ``finished`` that the role knows better."""
        return {}

    def _attention(self, rows: Rows[Row]) -> Any:
        return self.plan

    def _sampled(self, seq: Sequence, token: Sampled) -> None:
        if seq.num_tokens == seq.num_prompt:
            self._tell("prefilled", seq, **self._prefilled(seq))
        self._accept(seq, token)

    def _prefilled(self, seq: Sequence) -> dict[str, Any]:
        """What this worker did for a prompt that is computed now."""
        done = {"cached_tokens": seq.cached_tokens, "computed_tokens": seq.computed_prompt_tokens}
        began = seq.started_s
        return done | {"prefill_s": self.clock() - began, "queue_s": began - seq.arrival_s}

    def _ended(self, seq: Sequence) -> None:
        """Called once as ``seq`` ends, before its pages are given back."""
