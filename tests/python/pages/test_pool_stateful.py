"""Pool against a dict of counts, over random sequences of calls, right ones and wrong ones."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from kvcore.errors import InvalidArgument, OutOfPages
from kvcore.pages import PageSpec, Pool

FRAMES = 5
page_lists = st.lists(st.integers(-1, FRAMES * 4), max_size=5)


class PoolMachine(RuleBasedStateMachine):
    @initialize(extent=st.sampled_from([1, 2, 4]))
    def start(self, extent: int) -> None:
        self.extent = extent
        spec = PageSpec(1, 1, 16, page_size=16, extent_pages=extent)
        self.pool = Pool(spec, FRAMES, huge_pages=False)
        self.owner: Counter[int] = Counter()
        self.io: Counter[int] = Counter()
        self.sealed: set[int] = set()
        self.freed = dict.fromkeys(range(FRAMES), 1)

    def pages_of(self, frame: int) -> range:
        return range(frame * self.extent, (frame + 1) * self.extent)

    def is_free(self, frame: int) -> bool:
        return not any(self.owner[p] or self.io[p] for p in self.pages_of(frame))

    def known(self, pages: list[int]) -> bool:
        return all(0 <= p < FRAMES * self.extent for p in pages)

    def drop(self, counts: Counter[int], pages: list[int]) -> None:
        was_free = {f for f in range(FRAMES) if self.is_free(f)}
        counts.subtract(pages)
        for frame in range(FRAMES):
            if self.is_free(frame) and frame not in was_free:
                self.freed[frame] += 1
                self.sealed -= set(self.pages_of(frame))

    @rule(n=st.integers(-1, 9))
    def alloc(self, n: int) -> None:
        free = sum(self.is_free(f) for f in range(FRAMES))
        if n < 0:
            with pytest.raises(InvalidArgument):
                self.pool.alloc(n)
        elif -(-n // self.extent) > free:
            with pytest.raises(OutOfPages):
                self.pool.alloc(n)
        else:
            got = self.pool.alloc(n)
            assert len(got) == -(-n // self.extent) * self.extent == len(set(got))
            assert all(not self.owner[p] and not self.io[p] for p in got), "page given out twice"
            self.owner.update(got)

    @rule(pages=page_lists)
    def incref(self, pages: list[int]) -> None:
        if self.known(pages) and all(self.owner[p] for p in pages):
            self.pool.incref(pages)
            self.owner.update(pages)
        else:
            with pytest.raises(InvalidArgument):
                self.pool.incref(pages)

    @rule(pages=page_lists)
    def decref(self, pages: list[int]) -> None:
        if self.known(pages) and all(self.owner[p] >= n for p, n in Counter(pages).items()):
            self.pool.decref(pages)
            self.drop(self.owner, pages)
        else:
            with pytest.raises(InvalidArgument):
                self.pool.decref(pages)

    @rule(pages=page_lists)
    def io_acquire(self, pages: list[int]) -> None:
        if self.known(pages) and all(self.owner[p] or self.io[p] for p in pages):
            self.pool.io_acquire(pages)
            self.io.update(pages)
        else:
            with pytest.raises(InvalidArgument):
                self.pool.io_acquire(pages)

    @rule(pages=page_lists)
    def io_release(self, pages: list[int]) -> None:
        if self.known(pages) and all(self.io[p] >= n for p, n in Counter(pages).items()):
            self.pool.io_release(pages)
            self.drop(self.io, pages)
        else:
            with pytest.raises(InvalidArgument):
                self.pool.io_release(pages)

    @rule(pages=page_lists)
    def seal(self, pages: list[int]) -> None:
        if self.known(pages) and all(self.owner[p] for p in pages):
            self.pool.seal(pages)
            self.sealed |= set(pages)
        else:
            with pytest.raises(InvalidArgument):
                self.pool.seal(pages)

    @invariant()
    def counts_agree(self) -> None:
        for page in range(FRAMES * self.extent):
            assert self.pool.refs(page) == (self.owner[page], self.io[page])
            assert self.pool.is_sealed(page) == (page in self.sealed)
            assert self.pool.generation(page) == self.freed[page // self.extent]
        stats = self.pool.stats()
        assert stats.free_frames == sum(self.is_free(f) for f in range(FRAMES))
        assert stats.held_pages == sum(n > 0 for n in self.owner.values())
        assert stats.io_pages == sum(n > 0 for n in self.io.values())
        assert stats.sealed_pages == len(self.sealed)


PoolMachine.TestCase.settings = settings(
    max_examples=max(60, settings.default.max_examples), stateful_step_count=40
)
TestPool = PoolMachine.TestCase
