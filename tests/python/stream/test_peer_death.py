"""SIGKILL of either side at each step of a hand-over: told in 2 s, pages back, no foreign stamp."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.peer_death import LIMIT_S, LINKS, STEPS, VICTIMS, Rounds


@pytest.fixture(
    scope="module", params=[(victim, link) for victim in VICTIMS for link in LINKS], ids="-".join
)
def rounds(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Rounds]:
    victim, link = request.param
    survivor = Rounds(victim, link, tmp_path_factory.mktemp("death"))
    yield survivor
    survivor.close()


@pytest.mark.parametrize("step", STEPS)
def test_sigkill(rounds: Rounds, step: str) -> None:
    assert rounds.round(step) <= LIMIT_S


@pytest.mark.nightly
@pytest.mark.parametrize("step", STEPS)
def test_sigkill_100_times(rounds: Rounds, step: str) -> None:
    for _ in range(100):
        assert rounds.round(step) <= LIMIT_S
