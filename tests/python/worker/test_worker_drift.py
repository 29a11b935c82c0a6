"""An engine whose pages drift: the metric rises, later requests get another table, no one else."""

import numpy as np
import pytest
from hash_model import HashModel, HashPlan, Rig, assert_baseline, make, prompt_of, request
from kvcore import compress, reference
from kvcore.compress import Sealer, Statistics, measure_pages
from kvcore.pages import PageSpec, Pool, page_ids_for
from kvcore.worker.memory import PageMemory

HEADS, DIM, PAGE = 8, 128, 16
SPEC = PageSpec(1, HEADS, DIM, page_size=PAGE, extent_pages=2)
PAGES = 24  # of a prompt


def rows_of(rng: np.random.Generator, loud: int) -> tuple[np.ndarray, np.ndarray]:
    k, v = rng.normal(size=(2, PAGE, HEADS, DIM)).astype(np.float32)
    k[: PAGE // 2, loud] *= 6
    return k, v


class LoudPlan(HashPlan):
    """Also writes keys and values of a kind into every page that is begun."""

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)
        self.pool, self.loud, rng = pool, 0, np.random.default_rng(5)
        self.kinds = {
            loud: [[reference.encode(x, "bf16") for x in rows_of(rng, loud)] for _ in range(8)]
            for loud in (0, 7)
        }
        self.begun = 0

    def run_ptr(self, *args) -> None:
        super().run_ptr(*args)
        for i, context in enumerate(self.context):
            new = int(self.cu[i + 1] - self.cu[i])
            for at in range(context - new, context):
                if at % PAGE == 0:
                    self.begun += 1
                    kind = self.kinds[self.loud][self.begun % 8]
                    self.pool.write_slice(int(self.table[i][at // PAGE]), 0, *kind)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setattr(Sealer, "WINDOW_ROUNDS", 2)
    pages = [rows_of(np.random.default_rng(i), 0) for i in range(16)]
    k, v = (np.stack([page[x] for page in pages]).transpose(2, 0, 1, 3) for x in (0, 1))
    statistics = Statistics(
        **vars(measure_pages(k, v)),
        spec=SPEC,
        key_weight=np.ones((HEADS, DIM), np.float32),
        value_weight=np.full(HEADS, 10, np.float32),
    )
    classes = {
        name: compress.choose(statistics, compress.budget_bytes(SPEC, name) + 1200)
        for name in ("balanced", "small")
    }
    assert [c.formats[0][0][0] for c in classes.values()] == ["int8", "int8"]
    pool = Pool(SPEC, 64, huge_pages=False, page_ids=page_ids_for(classes["small"], 64))
    memory = PageMemory(pool, None, classes, statistics)
    return Rig(pool, memory, LoudPlan(pool), HashModel(8000))


class Talk:
    """An engine that answers prompts one after another beside a sequence that goes on."""

    def __init__(self, parts: Rig) -> None:
        self.parts, self.engine = parts, make(parts, token_budget=512)
        self.rng, self.names = np.random.default_rng(1), iter(range(1, 10**6))
        self.long = self.ask(4000)
        self.engine.step()

    def ask(self, max_tokens: int, profile: str = ""):
        prompt = prompt_of(self.rng, PAGES * PAGE - 1)
        return self.engine.add(
            request(next(self.names), prompt, max_tokens, ignore_eos=True, kv_profile=profile)
        )

    def judged(self, windows: int) -> list[tuple[float, str]]:
        """Prompts until so many windows have been judged; ``kv_drift`` and table after each."""
        sealer, found = self.parts.memory.sealer, []
        while len(found) < windows:
            seq = self.ask(1)
            while seq.num_pages or seq in self.engine.scheduler.waiting or sealer.waiting:
                before = sealer.rounds
                self.engine.step()
                if sealer.rounds < before:
                    table = self.parts.memory.kv_table
                    found.append((self.engine.stats()["kv_drift"], table))
        return found

    def classes_of(self, seq) -> list[int]:
        return [self.parts.pool.class_of(int(p)) for p in seq.pages[: seq.num_pages]]


def test_drift_is_a_stat_and_changes_the_table_of_later_requests_once(parts: Rig) -> None:
    talk, memory = Talk(parts), parts.memory
    first, frames, capacity = memory.kv_table, memory.num_frames, memory.capacity()
    assert first == memory.classes["small"].digest.hex()
    assert talk.engine.stats()["kv_drift"] == 1.0
    calm = talk.judged(3)
    assert max(calm)[0] < 1.1 and {table for _, table in calm} == {first}
    parts.plan.loud = 7
    loud = talk.judged(7)
    high = [regret for regret, _ in loud if regret > compress.REBUILD_ABOVE]
    assert len(high) == 2  # noticed, and believed
    second = memory.kv_table
    assert second != first and max(loud[3:])[0] < 1.1
    changes = [table for _, table in loud]
    assert changes == sorted(changes, key=[first, second].index)  # once

    balanced, small = memory.sealer.tables[1:]
    assert min(balanced, small) > 2
    for profile, number in (("", small), ("small", small), ("balanced", balanced), ("exact", 0)):
        seq = talk.ask(40, profile)
        for _ in range(30):
            talk.engine.step()
        assert talk.classes_of(seq)[1 : PAGES - 1] == [number] * (PAGES - 2)
    # Who was there before keeps its table, old pages and new ones.
    classes = talk.classes_of(talk.long)
    assert len(classes) > PAGES + 1 and set(classes[1:-2]) == {2}
    pool = parts.pool
    used = sum(
        count * pool.page_class(number).run_bytes(1)
        for number, count in enumerate(pool.class_pages())
        if number
    )
    assert pool.stats().compressed_bytes == used > 0
    assert (memory.num_frames, memory.capacity()) == (frames, capacity)
    talk.engine.cancel_all()
    assert_baseline(parts)


def test_without_statistics_nothing_is_measured(parts: Rig) -> None:
    memory = PageMemory(parts.pool, None, parts.memory.classes)
    engine = make(Rig(parts.pool, memory, parts.plan, parts.model), token_budget=512)
    for name in range(12):
        engine.add(request(name, prompt_of(np.random.default_rng(name), 383), 1))
    while engine.has_work or memory.sealer.waiting:
        engine.step()
    assert memory.sealer.sealed > 128 and memory.sealer.rounds == 0
    assert engine.stats()["kv_drift"] == 1.0
    memory.tree.clear()
