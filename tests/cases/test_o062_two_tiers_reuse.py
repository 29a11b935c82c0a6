"""O62: reuse of an offloaded block picked another block's state (NVIDIA/TensorRT-LLM PR#8830)."""

from __future__ import annotations

import random

import numpy as np
from case_tools import NS, make_pool, shows_stamp, tokens, write_stamp
from kvcore.pages import Pool
from kvcore.prefix import RadixTree

ROWS = [tokens(48, seed=s) for s in range(3)]
ROWS += [np.concatenate([ROWS[0][:16], tokens(32, seed=9)])]


class Tier:
    def __init__(self) -> None:
        self.pool: Pool = make_pool(4)
        self.tree = RadixTree(self.pool)

    def room(self, n: int) -> list[int] | None:
        if self.pool.stats().free_frames < n:
            self.tree.evict(n)
        return self.pool.alloc(n) if self.pool.stats().free_frames >= n else None


def copy_prefix(source: Tier, target: Tier, row: np.ndarray) -> None:
    """Copies what `source` has of `row` and `target` lacks (demote and onboard are the same)."""
    have = target.tree.match(NS, row)
    found = source.tree.match(NS, row)
    fresh = target.room(max(len(found.pages) - len(have.pages), 0))
    if fresh:
        for i, page in enumerate(fresh, start=len(have.pages)):
            target.pool.write_slice(page, 0, *source.pool.read_slice(found.pages[i], 0))
        target.tree.insert(NS, row[: found.num_tokens], have.pages + fresh)
        target.pool.decref(fresh)
    source.pool.decref(found.pages)
    target.pool.decref(have.pages)


def check(tier: Tier, row: np.ndarray) -> None:
    match = tier.tree.match(NS, row)
    for i, page in enumerate(match.pages):
        assert shows_stamp(tier.pool, page, row[: (i + 1) * 16]), "another prompt's KV"
    tier.pool.decref(match.pages)


def compute(tier: Tier, row: np.ndarray) -> None:
    match = tier.tree.match(NS, row)
    fresh = tier.room(2 - len(match.pages))
    if fresh is not None:
        pages = match.pages + fresh
        for i in range(len(match.pages), 2):
            write_stamp(tier.pool, pages[i], row[: (i + 1) * 16])
        tier.tree.insert(NS, row[:32], pages)
        tier.pool.decref(fresh)
    tier.pool.decref(match.pages)


def test_ten_thousand_seeds_show_no_foreign_content() -> None:
    for seed in range(10_000):
        rng = random.Random(seed)
        if seed % 50 == 0:  # a history long enough for much reuse, started over now and then
            device, host = Tier(), Tier()
        row = rng.choice(ROWS)
        action = rng.randrange(4)
        if action == 0:
            compute(device, row)
        elif action == 1:
            copy_prefix(device, host, row)
            device.tree.evict(rng.randrange(3))
        elif action == 2:
            copy_prefix(host, device, row)
        for tier in (device, host):
            check(tier, rng.choice(ROWS))
            assert tier.pool.stats().held_pages == tier.tree.stats().pages
