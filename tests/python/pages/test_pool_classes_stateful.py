"""Pool with classes against a dict: frames, single pages, seals and transfers in any order."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kvcore._core.base import FaultPlan
from kvcore.compress import seal_pages
from kvcore.errors import InvalidArgument, OutOfPages
from kvcore.pages import PageClass, PageSpec, Pool, page_ids_for

FRAMES = 6
picks = st.lists(st.integers(0, 99), min_size=1, max_size=4)


class PoolClassesMachine(RuleBasedStateMachine):
    @initialize(extent=st.sampled_from([1, 2, 4]), align=st.sampled_from([64, 4096]))
    def start(self, extent: int, align: int) -> None:
        self.extent = extent
        self.spec = spec = PageSpec(2, 1, 64, page_size=64, extent_pages=extent, align_bytes=align)
        tables = [[[("k4", "v3")]] * 2, [[("int8", "int8")], [("k4", "v4")]]]
        self.classes = [PageClass(spec, table) for table in tables]
        self.pool = Pool(
            spec, FRAMES, huge_pages=False, page_ids=page_ids_for(self.classes[0], FRAMES)
        )
        self.numbers = [self.pool.add_class(c) for c in self.classes]
        self.plan = FaultPlan(1)
        self.pool.set_faults(self.plan)
        self.owner: Counter[int] = Counter()
        self.io: Counter[int] = Counter()
        self.number: dict[int, int] = {}  # of pages whose ids are taken
        self.frame_of: dict[int, int] = {}  # pages of whole groups
        self.left: dict[int, str] = {}  # sealed while a transfer read them

    # The model: what is held, and the bytes that takes.

    def units(self) -> list[list[int]]:
        groups: dict[int, list[int]] = {}
        for page in self.number:
            groups.setdefault(self.frame_of.get(page, -1 - page), []).append(page)
        return list(groups.values())

    def settle(self) -> None:
        """Frees the units that nobody holds any more."""
        self.left = {p: kind for p, kind in self.left.items() if self.io[p]}
        for unit in self.units():
            if not any(self.owner[p] or self.io[p] for p in unit):
                for page in unit:
                    del self.number[page]
                    self.frame_of.pop(page, None)

    def bytes_used(self) -> tuple[int, int]:
        single = PageClass.open(self.spec).run_bytes(1)
        opened = compressed = 0
        for unit in self.units():
            on_open = [p for p in unit if self.number[p] == 0 or p in self.left]
            whole = unit[0] in self.frame_of
            opened += (self.spec.frame_bytes if on_open else 0) if whole else single * len(on_open)
            compressed += sum(
                self.classes[self.numbers.index(n)].run_bytes(1)
                for n in (self.number[p] for p in unit)
                if n
            )
        return opened, compressed

    def chosen(self, among: list[int], which: list[int]) -> list[int]:
        return [among[i % len(among)] for i in which] if among else []

    # What happens.

    @rule(n=st.integers(0, 7), single=st.booleans(), broken=st.booleans())
    def alloc(self, n: int, single: bool, broken: bool) -> None:
        run = 1 if single else self.extent
        free = self.pool.free_pages(run)
        if broken:
            self.plan.fail_nth("pool.alloc", 1)
        if n > free or broken:
            with pytest.raises(OutOfPages):
                self.pool.alloc(n, run)
            if n > free:
                self.plan.clear()
            return
        got = self.pool.alloc(n, run)
        assert not set(got) & set(self.number) and len(set(got)) == len(got)
        assert len(got) == (n if single else -(-n // self.extent) * self.extent)
        self.owner.update(got)
        self.number |= dict.fromkeys(got, 0)
        if not single or self.extent == 1:
            self.frame_of |= {p: p // self.extent for p in got}

    @rule(which=picks, io=st.booleans())
    def hold(self, which: list[int], io: bool) -> None:
        pages = self.chosen([p for p in self.number if self.owner[p]], which)
        (self.pool.io_acquire if io else self.pool.incref)(pages)
        (self.io if io else self.owner).update(pages)

    @rule(which=picks, io=st.booleans())
    def drop(self, which: list[int], io: bool) -> None:
        counts = self.io if io else self.owner
        pages = list(dict.fromkeys(self.chosen([p for p in self.number if counts[p]], which)))
        (self.pool.io_release if io else self.pool.decref)(pages)
        counts.subtract(pages)
        self.settle()

    @precondition(lambda self: self.number)
    @rule(which=picks, number=st.integers(0, 1), broken=st.booleans())
    def seal(self, which: list[int], number: int, broken: bool) -> None:
        (page,) = self.chosen(list(self.number), which[:1])
        if broken:
            self.plan.fail_nth("pool.seal", 1)
        if not self.owner[page] or self.number[page]:
            with pytest.raises(InvalidArgument):
                seal_pages(self.pool, [page], self.numbers[number])
            self.plan.clear()
            return
        try:
            seal_pages(self.pool, [page], self.numbers[number])
        except OutOfPages:
            widest_needed = self.classes[number].run_bytes(1)
            assert broken or self.pool.stats().free_bytes < 4 * widest_needed * FRAMES
            self.plan.clear()
            return
        assert not broken
        self.number[page] = self.numbers[number]
        if self.io[page]:
            self.left[page] = "open"

    @invariant()
    def counts_and_bytes_agree(self) -> None:
        stats = self.pool.stats()
        assert (stats.open_bytes, stats.compressed_bytes) == self.bytes_used()
        assert stats.free_bytes + stats.used_bytes == FRAMES * self.spec.frame_bytes
        assert self.pool.class_pages() == [
            sum(n == number for n in self.number.values()) for number in (0, *self.numbers)
        ]
        assert stats.held_pages == sum(n > 0 for n in self.owner.values())
        assert stats.io_pages == sum(n > 0 for n in self.io.values())
        for page, number in self.number.items():
            assert self.pool.class_of(page) == number
            assert self.pool.refs(page) == (self.owner[page], self.io[page])

    @invariant()
    def slices_do_not_overlap(self) -> None:
        spans = []
        for page, number in self.number.items():
            page_class = self.pool.page_class(number)
            for layer in range(self.spec.num_layers):
                at = self.pool.slice_address(page, layer)
                spans.append((at, at + page_class.slice_bytes(layer)))
        spans.sort()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
        base = self.pool.arena.address
        assert not spans or (
            spans[0][0] >= base and spans[-1][1] <= base + FRAMES * self.spec.frame_bytes
        )

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.plan.clear()
        self.pool.io_release(list(self.io.elements()))
        self.pool.decref(list(self.owner.elements()))
        stats = self.pool.stats()
        assert stats.free_frames == stats.num_frames and stats.used_bytes == 0
        assert self.pool.class_pages() == [0, 0, 0]
        assert len(self.pool.alloc(FRAMES * self.extent)) == FRAMES * self.extent


PoolClassesMachine.TestCase.settings = settings(
    max_examples=max(60, settings.default.max_examples), stateful_step_count=40, deadline=None
)
TestPoolClasses = PoolClassesMachine.TestCase
