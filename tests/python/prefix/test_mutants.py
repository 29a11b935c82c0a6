"""Seeded mutants: each is a bug someone shipped; the state machine must find every one of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from kvcore.errors import KvcoreError
from kvcore.prefix import Match, RadixTree
from radix_machine import DIGESTS, SECRET, RadixMachine


class DropsIncref(RadixTree):
    """A match whose pages are not pinned for the caller."""

    def match(self, namespace: Any, tokens: Any) -> Match:
        match = super().match(namespace, tokens)
        self.pool.decref(match.pages)
        return match


class ForgetsDecref(RadixTree):
    """A look-up that pins one ref too many."""

    def match(self, namespace: Any, tokens: Any) -> Match:
        match = super().match(namespace, tokens)
        self.pool.incref(match.pages[:1])
        return match


class MatchesWholePrompt(RadixTree):
    """Forgets that one token must be left to compute."""

    def match(self, namespace: Any, tokens: Any) -> Match:
        return super().match(namespace, [*tokens, 0])


class IgnoresNamespace(RadixTree):
    """One tree for all tenants."""

    def match(self, namespace: Any, tokens: Any) -> Match:
        return super().match(DIGESTS[0], tokens)

    def insert(self, namespace: Any, tokens: Any, pages: Any) -> int:
        return super().insert(DIGESTS[0], tokens, pages)


class ShiftsPages(RadixTree):
    """Stores each page under its neighbour's tokens."""

    def insert(self, namespace: Any, tokens: Any, pages: Any) -> int:
        whole = len(tokens) // 16
        return super().insert(namespace, tokens, [*pages[1:whole], *pages[:1], *pages[whole:]])


class LosesLock(RadixTree):
    """Locks that protect nothing."""

    def lock(self, node: int) -> None:
        super().lock(node)
        super().unlock(node)


class EvictsQuietly(RadixTree):
    """Evicts one page more than it reports."""

    def evict(self, num_pages: int) -> list[int]:
        return super().evict(num_pages)[1:]


MUTANTS = [
    DropsIncref,
    ForgetsDecref,
    MatchesWholePrompt,
    IgnoresNamespace,
    ShiftsPages,
    LosesLock,
    EvictsQuietly,
]


def run(tree_type: type[RadixTree], examples: int) -> None:
    class Machine(RadixMachine):
        def make_tree(self, pool: Any) -> Any:
            tree = tree_type(pool, SECRET)
            tree.pool = pool  # type: ignore[attr-defined]
            return tree

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.__name__)
def test_mutant_is_caught(mutant: type[RadixTree]) -> None:
    with pytest.raises((AssertionError, KvcoreError)):
        run(mutant, examples=400)


def test_the_real_tree_passes_the_same_run() -> None:
    run(RadixTree, examples=60)
