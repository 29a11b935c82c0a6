"""Profiles, statistics on disk, and drift."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from kvcore import compress
from kvcore.errors import Corrupt, InvalidArgument, Unsupported
from kvcore.pages import PageSpec

LAYERS, HEADS, DIM, PAGES, PAGE = 4, 2, 64, 3, 64
SPEC = PageSpec(LAYERS, HEADS, DIM)


def pages(seed: int, wide: dict[int, float] | None = None) -> compress.PageStatistics:
    """Normal keys and values; ``wide``: how much larger the keys of a head are in half a page."""
    rng = np.random.default_rng(seed)
    shape = (LAYERS * HEADS, PAGES, PAGE, DIM)
    k = rng.normal(size=shape).astype(np.float32)
    for head, factor in (wide or {}).items():
        k[head, :, : PAGE // 2] *= factor
    return compress.measure_pages(k, rng.normal(size=shape).astype(np.float32))


def statistics(seed: int = 1, wide: dict[int, float] | None = None) -> compress.Statistics:
    rng = np.random.default_rng(seed)
    heads = LAYERS * HEADS
    return compress.Statistics(
        **vars(pages(seed, wide)),
        spec=SPEC,
        key_weight=np.exp(rng.normal(0, 1, (heads, 1)) + rng.normal(0, 0.3, (heads, DIM))).astype(
            np.float32
        ),
        value_weight=rng.uniform(5, 20, heads).astype(np.float32),
    )


def test_measured_errors_are_those_that_formats_document() -> None:
    found = pages(1)
    relative = found.key_error["k4"].mean(1) / found.key_energy.mean(1)
    assert relative == pytest.approx(0.094**2, rel=0.15)
    assert found.value_error["v3"] == pytest.approx(0.0345, rel=0.1)
    assert found.value_error["v4"] == pytest.approx(0.0095, rel=0.15)
    assert (found.constant_share < 0.05).all()
    assert found.value_energy == pytest.approx(DIM, rel=0.05)


@pytest.mark.parametrize("profile", ["balanced", "small"])
def test_a_profile_keeps_its_bytes_and_beats_one_format_everywhere(profile: str) -> None:
    found = statistics()
    table, fixed = (compress.profile_class(x, profile) for x in (found, SPEC))
    assert table is not None and fixed is not None
    assert table.page_bytes <= compress.budget_bytes(SPEC, profile)
    error = compress.predicted_error(table, found)
    assert error.shape == (LAYERS, HEADS, 2)
    assert error.sum() < compress.predicted_error(fixed, found).sum()
    again = compress.profile_class(found, profile)
    assert again is not None and again.digest == table.digest


def test_exact_has_no_class_and_others_are_refused_by_name() -> None:
    assert compress.profile_class(SPEC, "exact") is None
    with pytest.raises(InvalidArgument, match="kv_profile is 'tiny'; allowed: exact"):
        compress.profile_class(SPEC, "tiny")
    with pytest.raises(Unsupported, match="these are f32"):
        compress.profile_class(PageSpec(1, 1, 64, format="f32"), "small")
    with pytest.raises(Unsupported, match="head_dim"):
        compress.profile_class(PageSpec(1, 1, 272), "small")
    with pytest.raises(InvalidArgument, match="value_weight"):
        broken = vars(statistics()) | {"value_weight": np.full(LAYERS * HEADS, np.nan)}
        compress.choose(compress.Statistics(**broken), 10**9)
    with pytest.raises(Unsupported, match="budget_bytes=1 "):
        compress.choose(statistics(), 1)


def test_a_model_is_asked_for_its_statistics() -> None:
    class Model:
        def kv_statistics(self, page_size: int = 64) -> compress.Statistics:
            assert page_size == 64
            return statistics()

    table = compress.profile_class(Model(), "small")
    direct = compress.profile_class(statistics(), "small")
    assert table is not None and direct is not None and table.digest == direct.digest


def test_statistics_survive_json_bit_for_bit() -> None:
    found = statistics()
    back = compress.Statistics.from_json(found.to_json("epoch"), "epoch", SPEC)
    assert np.array_equal(back.key_weight, found.key_weight)
    assert np.array_equal(back.value_error["v4"], found.value_error["v4"])
    assert compress.choose(back, 40_000).digest == compress.choose(found, 40_000).digest


def test_damage_is_never_read_as_statistics() -> None:
    text = statistics().to_json("epoch")
    for identity, spec in (("other", SPEC), ("epoch", PageSpec(LAYERS, HEADS, 128))):
        with pytest.raises(Corrupt, match=r"identity|spec"):
            compress.Statistics.from_json(text, identity, spec)
    rng = random.Random(1)
    for _ in range(50):
        at = rng.randrange(len(text))
        damaged = text[:at] + rng.choice("A0}\x00") + text[at + 1 :]
        if json_or_none(damaged) == json.loads(text):
            continue
        with pytest.raises(Corrupt):
            compress.Statistics.from_json(damaged, "epoch", SPEC)
    for cut in (0, 1, len(text) // 2, len(text) - 2):
        with pytest.raises(Corrupt):
            compress.Statistics.from_json(text[:cut], "epoch", SPEC)


def json_or_none(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None


def test_drift_is_none_for_the_same_kind_of_text() -> None:
    found = statistics()
    table = compress.choose(found, compress.budget_bytes(SPEC, "small"))
    moved = compress.drift(found, pages(99), table)
    assert 0.8 < moved.level < 1.2 and moved.regret < 1.1 and not moved.rebuild


def test_drift_asks_for_a_table_that_serves_the_new_pages() -> None:
    found = statistics(wide={0: 6.0})
    budget = compress.budget_bytes(SPEC, "small") + 2112
    table = compress.choose(found, budget)
    assert table.formats[0][0][0] == "int8"
    observed = pages(5, wide={7: 6.0})
    moved = compress.drift(found, observed, table)
    assert moved.regret > compress.REBUILD_ABOVE and moved.rebuild and moved.level > 1
    now = found.with_pages(observed)
    rebuilt = compress.choose(now, budget)
    assert rebuilt.formats[3][1][0] == "int8" and rebuilt.formats[0][0][0] == "k4"
    assert not compress.drift(now, observed, rebuilt).rebuild


def test_keys_that_a_format_no_longer_carries_ask_for_another_table() -> None:
    found = statistics()
    table = compress.choose(found, compress.budget_bytes(SPEC, "small"))
    observed = pages(1)
    lost = observed.key_error["k4"].copy()
    lost[3] = 0.1 * observed.key_energy[3]
    broken = vars(observed) | {"key_error": {**observed.key_error, "k4": lost}}
    moved = compress.drift(found, compress.PageStatistics(**broken), table)
    assert moved.refused == (table.formats[1][1][0] == "k4") and moved.rebuild


def test_running_statistics_move_towards_the_newer() -> None:
    old, new = pages(1), pages(2, wide={0: 3.0})
    for _ in range(40):
        old = old.blended(new, 0.2)
    assert old.key_energy == pytest.approx(new.key_energy, rel=0.01)
