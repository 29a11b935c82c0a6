"""O57: two paths freed one slot during an overlapped step (sgl-project/sglang-jax PR#982)."""

from __future__ import annotations

import threading

from case_tools import make_pool
from kvcore.pages import SequencePages


def test_finish_and_cancel_release_once() -> None:
    pool = make_pool(8)
    sequence, neighbour = SequencePages(pool), SequencePages(pool)
    sequence.grow(40)
    pages = sequence.pages
    sequence.release()  # finish, while a step still runs
    neighbour.grow(40)  # takes the pages over
    assert set(neighbour.pages) == set(pages)
    sequence.release()  # cancel of the same request
    del sequence  # and its end of life
    assert all(pool.refs(page) == (1, 0) for page in neighbour.pages)
    neighbour.release()
    assert pool.stats().free_frames == 8


def test_many_threads_release_one_sequence_once() -> None:
    pool = make_pool(8)
    for _ in range(200):
        sequence = SequencePages(pool)
        sequence.grow(64)
        pool.incref(sequence.pages)  # another holder: a second release would steal its ref
        pages = sequence.pages
        threads = [threading.Thread(target=sequence.release) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sequence.released and all(pool.refs(page) == (1, 0) for page in pages)
        pool.decref(pages)
