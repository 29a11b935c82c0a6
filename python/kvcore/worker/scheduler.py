"""Which rows the next step computes: continuous batching with chunked prefill, first in, first out.

Pure: no clock, thread or tensor. Decode rows always run; prompts are cut into chunks that share a
token budget with them. A sequence gets pages for all its tokens on admission and grows by units;
one at a time may start with less when its pages can be sealed as they are computed. When pages run
out, those of the sequence are sealed early, then those of the latest admitted one; at last that is
put back in front of the queue and recomputed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kvcore.errors import InvalidArgument
from kvcore.worker.memory import PageMemory
from kvcore.worker.request import Sequence, State

_MIN_PREFILL_TOKENS = 16  # decode rows may fill the budget, yet prompts go on


@dataclass(frozen=True)
class Row:
    """``count`` tokens of ``seq`` from ``start`` on are computed in this step."""

    seq: Sequence
    start: int
    count: int

    @property
    def samples(self) -> bool:
        """Whether the row ends the sequence's known tokens, so that its logits choose the next."""
        return self.start + self.count == self.seq.num_tokens


class Scheduler:
    """Queues of one engine.

    ``decodes``: sequences here grow beyond their prompt. ``receives``: on its first admission a
    sequence waits for its pages' contents until ``received`` starts it.
    """

    def __init__(
        self,
        memory: PageMemory,
        token_budget: int = 512,
        max_running: int = 64,
        decodes: bool = True,
        receives: bool = False,
    ) -> None:
        for name, value in (("token_budget", token_budget), ("max_running", max_running)):
            if value < 1:
                raise InvalidArgument(f"{name} is {value}; allowed: 1 or more")
        self.memory = memory
        self.token_budget = token_budget
        self.max_running = max_running
        self.preemptions = 0
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.receiving: list[Sequence] = []
        self.stuck: list[Sequence] = []  # alone and without room, twice: for the engine to end
        self._decodes, self._receives = decodes, receives
        self._admitted: list[Sequence] = []

    @property
    def num_live(self) -> int:
        """Sequences that hold pages."""
        return len(self.running) + len(self.receiving)

    @property
    def waiting_tokens(self) -> int:
        """Tokens not computed yet of all sequences here."""
        return sum(s.remaining for s in self.waiting) + sum(s.remaining for s in self.running)

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def remove(self, seq: Sequence) -> None:
        """Takes ``seq`` out of whichever queue it is in and frees its pages."""
        if seq.state is State.WAITING:
            self.waiting.remove(seq)
        elif seq.state is State.RUNNING:
            self.running.remove(seq)
        elif seq.state is State.RECEIVING:
            self.receiving.remove(seq)
        seq.state = State.DONE
        self.memory.release(seq)

    def received(self, seq: Sequence) -> None:
        """``seq``'s pages arrived: it runs from the next step on."""
        self.receiving.remove(seq)
        seq.state = State.RUNNING
        self.running.append(seq)

    def schedule(self) -> list[Row]:
        """The rows of the next step; empty when nothing can run. May preempt and admit."""
        rows = self._decode_rows()
        budget = self.token_budget - len(rows)
        if rows:
            budget = max(budget, min(_MIN_PREFILL_TOKENS, self.token_budget))
        for seq in list(self.running):
            if seq.state is State.RUNNING and seq.remaining > 1 and budget > 0:
                budget -= self._add_chunk(rows, seq, budget)
        # A prompt that grows may have preempted one that has a row.
        rows = [row for row in rows if row.seq.state is State.RUNNING]
        while budget > 0 and self.waiting and self.num_live < self.max_running:
            seq = self.waiting[0]
            if not self._admit(seq):
                break
            if seq.state is State.RUNNING:
                budget -= self._add_chunk(rows, seq, budget)
        return rows

    def take_admitted(self) -> list[Sequence]:
        """Sequences admitted since the last call."""
        admitted, self._admitted = self._admitted, []
        return admitted

    def _decode_rows(self) -> list[Row]:
        rows = []
        for seq in list(self.running):
            # One of an earlier turn of this loop may have preempted it.
            alive = seq.state is State.RUNNING and seq.remaining == 1
            if alive and self._make_room(seq, seq.num_tokens):
                rows.append(Row(seq, seq.num_computed, 1))
        return rows

    def _make_room(self, seq: Sequence, num_tokens: int) -> bool:
        """Room for ``num_tokens`` of ``seq``: by sealing early, then by preempting the latest
        admitted; False if that was it."""
        while not self.memory.grow(seq, num_tokens):
            victim = self.running[-1]
            if self.memory.fill(seq) or self.memory.fill(victim):
                continue
            if victim is seq and self.num_live == 1 and self.memory.settled:
                # Alone and still without room: its own cached prefix pins other frames' pages.
                if seq.skip_match:
                    self.stuck.append(seq)
                seq.skip_match = True
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.memory.publish(seq)
        self.memory.release(seq)
        seq.state = State.WAITING
        self.waiting.appendleft(seq)
        self.preemptions += 1

    def _add_chunk(self, rows: list[Row], seq: Sequence, budget: int) -> int:
        """Adds the next tokens of ``seq``, to their end or, where the budget and memory allow, a
        page's end; how many."""
        end = min(seq.num_tokens, seq.num_computed + budget)
        if end < seq.num_tokens:
            whole_pages = end - end % self.memory.page_size
            end = whole_pages if whole_pages > seq.num_computed else end
        if not self.memory.grow(seq, end):
            there_is = seq.capacity_tokens + self.memory.free_tokens
            end = min(end, max(there_is, seq.num_computed + self.memory.page_size))
            if not self._make_room(seq, end):
                return 0
        rows.append(Row(seq, seq.num_computed, end - seq.num_computed))
        return rows[-1].count

    def _admit(self, seq: Sequence) -> bool:
        """Gives the first waiting sequence its pages, if there is room, and starts it."""
        spare = 1 if self._decodes and self.num_live else 0
        receives = self._receives and seq.admissions == 0
        if not seq.skip_match:
            self.memory.match(seq)
        if not self.memory.grow(seq, seq.num_tokens, spare) and (
            receives or not self._grow_in_part(seq, spare)
        ):
            self.memory.release(seq)
            seq.skip_match = self.num_live == 0 and self.memory.settled
            return False
        self.waiting.popleft()
        if seq.admissions == 0:
            seq.cached_tokens = seq.num_computed
        seq.state = State.RECEIVING if receives else State.RUNNING
        (self.receiving if receives else self.running).append(seq)
        seq.admissions += 1
        self._admitted.append(seq)
        return True

    def _grow_in_part(self, seq: Sequence, spare: int) -> bool:
        """Room for a beginning, where the whole would fit sealed; one sequence at a time, and one
        that was preempted only alone."""
        alone = self.num_live == 0
        partial = any(s.capacity_tokens < s.num_tokens - 1 for s in self.running)
        if partial or (seq.admissions and not alone) or not self.memory.fits_sealed(seq, alone):
            return False
        return self.memory.grow(seq, seq.num_computed + self.memory.page_size, spare)
