"""What a sealer notices of the pages it seals, and when later sequences get other tables."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest
from kvcore import compress, reference
from kvcore.compress import PageStatistics, Sealer, Statistics, budget_bytes, choose, measure_pages
from kvcore.pages import PageClass, PageSpec, Pool, page_ids_for

LAYERS, HEADS, DIM, PAGE = 3, 2, 64, 64
SPEC = PageSpec(LAYERS, HEADS, DIM)
EVERY = 64  # pages of a round
WINDOW = EVERY * Sealer.WINDOW_ROUNDS
Rows = np.ndarray
ONE = np.ones((2, 1, 1, PAGE, DIM), np.float32)


def rows_of(rng: np.random.Generator, loud: tuple[int, int]) -> tuple[Rows, Rows]:
    """K and V [layers, page, heads, dim] of a page; the keys of one head change in its midst."""
    k, v = rng.normal(size=(2, LAYERS, PAGE, HEADS, DIM)).astype(np.float32)
    k[loud[0], : PAGE // 2, loud[1]] *= 6
    return k, v


def statistics_of(loud: tuple[int, int]) -> Statistics:
    pages = [rows_of(np.random.default_rng(i), loud) for i in range(16)]
    k, v = (np.stack([page[x] for page in pages]).transpose(1, 3, 0, 2, 4) for x in (0, 1))
    heads = LAYERS * HEADS
    return Statistics(
        **vars(measure_pages(*(x.reshape(heads, 16, PAGE, DIM) for x in (k, v)))),
        spec=SPEC,
        key_weight=np.ones((heads, DIM), np.float32),
        value_weight=np.full(heads, 10, np.float32),
    )


class Text:
    """A pool whose sealer gets pages of one kind or another."""

    def __init__(self, *classes: PageClass, statistics: Statistics | None) -> None:
        frames = 40
        self.pool = Pool(SPEC, frames, huge_pages=False, page_ids=page_ids_for(classes[-1], frames))
        self.sealer = Sealer(self.pool, *classes, statistics=statistics)
        self.rng = np.random.default_rng(3)
        self.kinds: dict[tuple[int, int], list[tuple[Rows, Rows]]] = {}

    def open_page(self, loud: tuple[int, int]) -> tuple[int, Rows, Rows]:
        """A page of one of 12 contents, and its K and V in bf16."""
        if loud not in self.kinds:
            self.kinds[loud] = [
                tuple(reference.encode(x, "bf16") for x in rows_of(self.rng, loud))
                for _ in range(12)
            ]
        k, v = self.kinds[loud][self.rng.integers(12)]
        (page,) = self.pool.alloc(1, run_pages=1)
        for layer in range(LAYERS):
            self.pool.write_slice(page, layer, k[layer], v[layer])
        return page, reference.decode(k, "bf16"), reference.decode(v, "bf16")

    def seal(self, count: int, loud: tuple[int, int]) -> Iterator[float]:
        """Seals pages of a kind, a step for each; the regret after each window."""
        for i in range(count):
            page, _, _ = self.open_page(loud)
            assert self.sealer.add([page]) == 1
            self.sealer.step(True)
            assert self.pool.class_of(page) > 0
            self.pool.decref([page])
            if (i + 1) % WINDOW == 0:
                yield self.sealer.regret


def two_tables(loud: tuple[int, int]) -> tuple[Statistics, list[PageClass]]:
    found = statistics_of(loud)
    spare = 2112  # a head's keys in int8 instead of k4
    return found, [
        choose(found, budget_bytes(SPEC, name) + spare) for name in ("balanced", "small")
    ]


def test_a_sample_says_of_pages_what_measuring_them_says() -> None:
    found, classes = two_tables((0, 0))
    text = Text(*classes, statistics=found)
    seen: list[tuple[Rows, Rows]] = []
    for _ in range(2 * EVERY):
        page, k, v = text.open_page((0, 0))
        seen.append((k, v))
        assert text.sealer.add([page]) == text.sealer.run(1) == 1
        text.pool.decref([page])
    assert text.sealer.rounds == 2
    got = PageStatistics(**text.sealer.observed())
    turns = [-(-EVERY * i // LAYERS) - 1 for i in range(1, 2 * LAYERS + 1)]  # page of each slice
    for layer in range(LAYERS):
        mine = [seen[turns[layer + first]] for first in (0, LAYERS)]
        k, v = (
            np.stack([page[x][layer].transpose(1, 0, 2) for page in mine], 1).astype(np.float32)
            for x in (0, 1)
        )
        want, heads = measure_pages(k, v), slice(HEADS * layer, HEADS * (layer + 1))
        for name in ("key_energy", "constant_share", "value_energy"):
            have = getattr(got, name)[heads]
            np.testing.assert_allclose(have, getattr(want, name), rtol=1e-4, atol=1e-5)
        for have, wanted in ((got.key_error, want.key_error), (got.value_error, want.value_error)):
            assert list(have) == list(wanted)
            for name in wanted:
                np.testing.assert_allclose(have[name][heads], wanted[name], rtol=1e-3)


def test_without_drift_nothing_changes() -> None:
    found, classes = two_tables((0, 0))
    text = Text(*classes, statistics=found)
    tables = text.sealer.tables
    regrets = list(text.seal(4 * WINDOW, (0, 0)))
    assert len(regrets) == 4 and max(regrets) < 1.1
    assert text.sealer.tables == tables and text.sealer.classes == classes
    assert text.sealer.class_number == 2 and len(text.pool.class_pages()) == 3


def test_drifting_pages_raise_the_metric_and_change_the_table_once() -> None:
    found, classes = two_tables((0, 0))
    assert [c.formats[0][0][0] for c in classes] == ["int8", "int8"]
    text = Text(*classes, statistics=found)
    first = text.sealer.tables
    assert max(text.seal(WINDOW, (0, 0))) < 1.1
    (once,) = text.seal(WINDOW, (2, 1))
    assert once > compress.REBUILD_ABOVE
    assert text.sealer.tables == first  # once may be chance
    (twice,) = text.seal(WINDOW, (2, 1))
    assert twice > compress.REBUILD_ABOVE
    second = text.sealer.tables
    assert second[0] == 0 and not set(second[1:]) & set(first)
    assert [c.formats[2][1][0] for c in text.sealer.classes] == ["int8", "int8"]
    for new, old in zip(text.sealer.classes, classes, strict=True):
        assert new.run_bytes(1) <= old.run_bytes(1) and new.digest != old.digest
    assert max(text.seal(4 * WINDOW, (2, 1))) < 1.1
    assert text.sealer.tables == second
    assert text.pool.stats().compressed_bytes == 0


def sealed_bytes(pool: Pool, page: int) -> list[bytes]:
    page_class = pool.page_class(pool.class_of(page))
    return [
        ctypes.string_at(pool.slice_address(page, layer), page_class.slice_bytes(layer))
        for layer in range(LAYERS)
    ]


def test_pages_and_readers_of_an_old_table_stay_as_they_are() -> None:
    found, classes = two_tables((0, 0))
    text = Text(*classes, statistics=found)
    pool, sealer = text.pool, text.sealer
    balanced, small = sealer.tables[1:]
    old, _, _ = text.open_page((0, 0))
    held, _, _ = text.open_page((0, 0))
    late, _, _ = text.open_page((0, 0))
    sealer.add([old], small)
    sealer.run(1)
    sealer.hold([held, late], balanced)
    before = sealed_bytes(pool, old)
    list(text.seal(2 * WINDOW, (2, 1)))
    newer_balanced, newer_small = sealer.tables[1:]
    assert newer_small != small and sealed_bytes(pool, old) == before
    # Ranks say what may be read, whatever the table: nothing below balanced under its readers.
    assert sealer.faithful([old], newer_small) == 1 and sealer.faithful([old], newer_balanced) == 0
    assert sealer.add([held], newer_small) == 0 == sealer.add([held], small)
    sealer.add([held], newer_balanced)
    sealer.add([late], balanced)  # a sequence of before fills a page now
    assert sealer.run(2) == 2
    assert [pool.class_of(p) for p in (old, held, late)] == [2, 3, 1]
    assert pool.page_class(1).digest == classes[0].digest
    assert pool.page_class(3).digest == sealer.classes[0].digest
    stats, numbers = pool.stats(), pool.class_pages()
    sizes = [pool.page_class(n).run_bytes(1) for n in range(1, len(numbers))]
    assert stats.compressed_bytes == sum(
        n * size for n, size in zip(numbers[1:], sizes, strict=True)
    )
    sealer.drop([held, late], balanced)
    pool.decref([old, held, late])
    assert sealer.held == 0 and pool.stats().used_bytes == 0


def test_where_no_other_table_is_possible_the_old_one_stays_and_a_warning_tells(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = statistics_of((0, 0))
    least = PageClass(SPEC, [[("k4", "v3")] * HEADS] * LAYERS)  # no byte more than these have
    text = Text(least, statistics=found)
    list(text.seal(2 * WINDOW, (2, 1)))
    fields = vars(found) | {"key_error": {k: 20 * v for k, v in found.key_error.items()}}
    beyond = PageStatistics(**{name: fields[name] for name in vars(measure_pages(*ONE))})
    for _ in range(2):
        text.sealer._judge(found, beyond)  # no head keeps its variation in 4 bits any more
    assert text.sealer.tables == [0, 1] and text.sealer.classes == [least]
    assert "tables stay" in caplog.text
