"""ClusterIndex: soft state that is rebuilt from events, with gaps seen."""

from __future__ import annotations

import hashlib
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvcore.errors import InvalidArgument
from kvcore.prefix import ClusterIndex


def key(i: int) -> bytes:
    return hashlib.blake2b(bytes([i]), digest_size=32).digest()


KEYS = [key(i) for i in range(6)]


def test_leading_units_per_worker_in_one_query() -> None:
    index = ClusterIndex()
    assert index.apply(b"a", 1, 0, KEYS[:4], []) == "ok"
    assert index.apply(b"b", 1, 0, KEYS[:2], []) == "ok"
    assert index.apply(b"c", 1, 0, KEYS[1:], []) == "ok"  # lacks the first: useless here
    assert index.query(KEYS) == {b"a": 4, b"b": 2}
    assert index.query(KEYS[1:]) == {b"a": 3, b"b": 1, b"c": 5}
    assert index.query([]) == {} and index.query([key(99)]) == {}


def test_a_gap_empties_the_worker_until_its_snapshot() -> None:
    index = ClusterIndex()
    index.apply(b"a", 1, 0, KEYS[:2], [])
    assert index.apply(b"a", 1, 2, KEYS[2:3], []) == "resync"
    assert index.query(KEYS) == {}
    assert index.apply(b"a", 1, 3, KEYS[:1], []) == "resync"  # not before a snapshot
    assert index.apply_snapshot(b"a", 1, 4, KEYS[:3]) == "ok"
    assert index.apply(b"a", 1, 5, KEYS[3:4], []) == "ok"
    assert index.query(KEYS) == {b"a": 4}


def test_repeated_and_old_events_are_dropped() -> None:
    index = ClusterIndex()
    index.apply(b"a", 5, 0, KEYS[:2], [])
    index.apply(b"a", 5, 1, [], KEYS[1:2])
    assert index.apply(b"a", 5, 0, KEYS[:2], []) == "stale"
    assert index.apply(b"a", 4, 9, KEYS, []) == "stale"
    assert index.apply_snapshot(b"a", 4, 9, KEYS) == "stale"
    assert index.query(KEYS) == {b"a": 1}


def test_a_new_incarnation_starts_empty() -> None:
    index = ClusterIndex()
    index.apply(b"a", 1, 0, KEYS, [])
    assert index.apply(b"a", 2, 0, KEYS[:1], []) == "ok"
    assert index.query(KEYS) == {b"a": 1}
    assert index.apply(b"b", 7, 3, KEYS, []) == "resync"  # its beginning was not seen
    assert index.query(KEYS) == {b"a": 1}


def test_drop_forgets_everything_of_a_worker() -> None:
    index = ClusterIndex()
    index.apply(b"a", 1, 0, KEYS[:3], [])
    index.apply(b"b", 1, 0, KEYS[:1], [])
    assert index.drop(b"a") and not index.drop(b"a")
    assert index.query(KEYS) == {b"b": 1}
    assert (index.num_workers, index.num_keys) == (1, 1)


def test_keys_of_the_wrong_size_change_nothing() -> None:
    index = ClusterIndex()
    with pytest.raises(InvalidArgument, match=r"stored\[1\] is 31 bytes: allowed 32"):
        index.apply(b"a", 1, 0, [KEYS[0], KEYS[1][:31]], [])
    with pytest.raises(InvalidArgument, match=r"removed\[0\] is not bytes"):
        index.apply(b"a", 1, 0, [], ["x"])  # type: ignore[list-item]
    assert index.num_workers == 0


operations = st.tuples(
    st.sampled_from(["events", "snapshot", "drop", "skip"]),
    st.sampled_from([b"a", b"b"]),
    st.lists(st.integers(0, 5), max_size=4, unique=True),
    st.lists(st.integers(0, 5), max_size=3, unique=True),
)


@given(st.lists(operations, max_size=30))
def test_equals_a_dict_of_sets(steps: list[tuple[str, bytes, list[int], list[int]]]) -> None:
    index = ClusterIndex()
    held: dict[bytes, set[int]] = {}
    seq = {b"a": 0, b"b": 0}
    broken: set[bytes] = set()
    for kind, worker, add, take in steps:
        if kind == "drop":
            assert index.drop(worker) == (worker in held)
            held.pop(worker, None)
            broken.discard(worker)
            if seq[worker]:
                broken.add(worker)  # it goes on counting; the index starts over
            continue
        if kind == "skip":
            seq[worker] += 1
            broken.add(worker)
            continue
        keys = [KEYS[i] for i in add]
        if kind == "snapshot":
            assert index.apply_snapshot(worker, 1, seq[worker], keys) == "ok"
            held[worker] = set(add)
            broken.discard(worker)
        else:
            removed = [KEYS[i] for i in take if i not in add]
            want = "resync" if worker in broken else "ok"
            assert index.apply(worker, 1, seq[worker], keys, removed) == want
            held.setdefault(worker, set())
            if worker in broken:
                held[worker] = set()
            else:
                held[worker] = (held[worker] - set(take)) | set(add)
        seq[worker] += 1
    for worker, first in product(held, range(6)):
        run = 0
        while first + run < 6 and first + run in held[worker] and worker not in broken:
            run += 1
        if worker not in broken:
            assert index.query(KEYS[first:]).get(worker, 0) == run
