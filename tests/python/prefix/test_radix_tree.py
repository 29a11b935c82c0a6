"""RadixTree: what the stateful test does not show: messages, eviction order, cost, frames."""

from __future__ import annotations

import time

import numpy as np
import pytest
from kvcore.errors import InvalidArgument, NotFound
from kvcore.pages import PageSpec, Pool
from kvcore.prefix import RadixTree
from pool_model import expand, make_pool

NS = b"n" * 32


def fill(pool: Pool, tree: RadixTree, row: np.ndarray) -> list[int]:
    match = tree.match(NS, row)
    pages = match.pages + pool.alloc(len(row) // pool.spec.page_size - len(match.pages))
    tree.insert(NS, row, pages)
    pool.decref(pages)
    return pages


def test_least_recently_used_leaves_go_first_and_from_their_ends() -> None:
    pool = make_pool(12, 1)
    tree = RadixTree(pool)
    a, b = fill(pool, tree, expand([1, 2, 3])), fill(pool, tree, expand([5, 6]))
    pool.decref(tree.match(NS, expand([1, 2, 3, 9])).pages)  # a is younger now
    assert tree.evict(1) == [b[1]]
    assert tree.evict(2) == [b[0], a[2]]
    assert tree.evict(9) == [a[1], a[0]]
    assert tree.stats().nodes == 0


def test_a_parent_becomes_evictable_in_the_same_call() -> None:
    pool = make_pool(12, 1)
    tree = RadixTree(pool)
    fill(pool, tree, expand([1, 2, 3]))
    fill(pool, tree, expand([1, 2, 4]))
    assert tree.stats().nodes == 3
    assert len(tree.evict(100)) == 4
    assert pool.stats().free_frames == 12


def test_eviction_frees_frames_or_keeps_pages() -> None:
    pool = make_pool(4, 4)
    tree = RadixTree(pool)
    fill(pool, tree, expand([1, 2, 3, 4, 5, 6, 7, 8]))
    held = tree.match(NS, expand([1, 2, 3, 4, 5, 9]))  # five pages: into the second frame
    assert tree.evict(1) == []  # no frame would become free
    pool.decref(held.pages[4:])
    assert len(tree.evict(1)) == 4 and pool.stats().free_frames == 3
    pool.decref(held.pages[:4])
    assert len(tree.evict(1)) == 4 and pool.stats().free_frames == 4


def test_io_refs_keep_pages_in_the_tree() -> None:
    pool = make_pool(2, 1)
    tree = RadixTree(pool)
    pages = fill(pool, tree, expand([1, 2]))
    pool.io_acquire(pages[1:])
    assert tree.evict(2) == []
    pool.io_release(pages[1:])
    assert len(tree.evict(2)) == 2


def test_refusals_name_the_cause_and_change_nothing() -> None:
    pool = make_pool(6, 1)
    tree = RadixTree(pool, b"secret")
    pages = fill(pool, tree, expand([1, 2]))
    fresh = pool.alloc(2)
    before = tree.stats(), pool.stats()
    with pytest.raises(InvalidArgument, match="pages has 1 entries: 32 tokens fill 2 pages"):
        tree.insert(NS, expand([3, 4]), fresh[:1])
    with pytest.raises(InvalidArgument, match=f"page={pages[0]} already holds another prefix"):
        tree.insert(NS, expand([3, 4]), [fresh[0], pages[0]])
    with pytest.raises(InvalidArgument, match=f"page={fresh[0]} already holds another prefix"):
        tree.insert(NS, expand([3, 4]), [fresh[0], fresh[0]])
    free = next(p for p in range(6) if pool.refs(p) == (0, 0))
    with pytest.raises(InvalidArgument, match=f"page={free} has no owner"):
        tree.insert(NS, expand([1, 2, 3]), [*pages, free])
    with pytest.raises(InvalidArgument, match="namespace has 3 bytes"):
        tree.insert(b"abc", expand([3, 4]), fresh)
    with pytest.raises(NotFound, match="node=77 is not in the tree"):
        tree.lock(77)
    assert (tree.stats(), pool.stats()) == before


def test_an_uncacheable_namespace_misses_and_stores_nothing() -> None:
    pool = make_pool(2, 1)
    tree = RadixTree(pool)
    pages = pool.alloc(2)
    assert tree.insert(None, expand([1, 2]), pages) == 0
    assert tree.match(None, expand([1, 2, 3])) == ([], 0, None)
    assert tree.peek(None, expand([1, 2, 3])) == 0
    assert pool.refs(pages[0]) == (1, 0)


def test_adopted_pages_are_sealed() -> None:
    pool = make_pool(2, 1)
    tree = RadixTree(pool)
    page = fill(pool, tree, expand([1]))[0]
    k, v = pool.read_slice(page, 0)
    with pytest.raises(InvalidArgument, match="is sealed"):
        pool.write_slice(page, 0, k, v)


def test_the_tree_gives_its_refs_back_when_it_ends() -> None:
    pool = make_pool(4, 1)
    tree = RadixTree(pool)
    fill(pool, tree, expand([1, 2, 3]))
    del tree
    assert pool.stats().free_frames == 4


def test_too_many_undrained_keys_are_reported_as_lost() -> None:
    spec = PageSpec(1, 1, 16, page_size=16, extent_pages=1)
    pool = Pool(spec, (1 << 18) + 2, huge_pages=False)
    tree = RadixTree(pool, b"")
    row = np.arange(pool.num_pages * 16, dtype=np.int32)
    fill(pool, tree, row)
    assert tree.drain_events() == ([], [], True)
    assert tree.drain_events() == ([], [], False)
    assert len(tree.keys()) == pool.num_pages


def best_of(n: int, call: object) -> float:
    times = []
    for _ in range(n):
        start = time.perf_counter()
        call()  # type: ignore[operator]
        times.append(time.perf_counter() - start)
    return min(times)


def test_look_up_and_pin_of_a_document_is_far_below_a_millisecond() -> None:
    pool = Pool(PageSpec(1, 1, 16, page_size=64, extent_pages=4), 64, huge_pages=False)
    tree = RadixTree(pool)
    row = np.random.default_rng(0).integers(0, 50_000, 3000).astype(np.int32)
    pages = pool.alloc(46)
    tree.insert(NS, row, pages)

    def look_up() -> None:
        assert tree.match(NS, row).num_tokens == 2944

    assert best_of(50, look_up) < 200e-6


@pytest.mark.parametrize("at_once", [True, False])
def test_evicting_many_leaves_is_not_quadratic(at_once: bool) -> None:
    def cpu_seconds(leaves: int) -> float:
        pool = make_pool(leaves * 2, 1)
        tree = RadixTree(pool)
        for i in range(leaves * 2):
            pages = pool.alloc(1)
            tree.insert(NS, np.full(16, i, np.int32), pages)
            if i >= leaves:  # the older half stays in use
                pool.decref(pages)

        steps = [leaves] if at_once else [1] * leaves
        start = time.process_time()
        assert sum(len(tree.evict(n)) for n in steps) == leaves
        return time.process_time() - start

    assert cpu_seconds(8000) < 0.5  # looking at every leaf each time takes several seconds
