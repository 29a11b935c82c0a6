"""Placement: the cheapest pair or mono worker, and honest refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvcore.errors import InvalidArgument
from kvcore.sched import CostModel, LoadBook, Placement, Rejection, WorkerLoad, choose

KV = 23_000.0


def worker(role: str, **known: object) -> WorkerLoad:
    base = WorkerLoad(role, 100, 256, 100, prefill_tokens_per_s=1000.0)
    return replace(base, **known)  # type: ignore[arg-type]


def placed(tokens: int, workers: list[WorkerLoad], model: CostModel | None = None) -> Placement:
    choice = choose(tokens, 64, KV, workers, model)
    assert isinstance(choice, Placement), choice
    return choice


def refused(tokens: int, workers: list[WorkerLoad], model: CostModel | None = None) -> Rejection:
    choice = choose(tokens, 64, KV, workers, model)
    assert isinstance(choice, Rejection), choice
    return choice


def test_cached_tokens_beat_a_short_queue_and_lose_to_a_long_one() -> None:
    holder = worker("mono", matched_tokens=2944, queued_tokens=1000)
    other = worker("mono")
    assert placed(3000, [other, holder]).prefill == 1
    assert placed(3000, [other, replace(holder, queued_tokens=4000)]).prefill == 0


def test_pairs_take_the_best_of_each_role() -> None:
    workers = [
        worker("decode", running=8),
        worker("prefill", queued_tokens=500),
        worker("decode", running=1),
        worker("prefill"),
    ]
    choice = placed(1000, workers)
    assert (choice.prefill, choice.decode) == (3, 2)
    assert choice.prefill_s == 1.0 and choice.queue_s == 0.0
    assert choice.cost_s == pytest.approx(
        choice.prefill_s + choice.stream_s + choice.decode_s + choice.pressure_s
    )


def test_a_slow_link_makes_the_stream_count() -> None:
    pair = [worker("prefill"), worker("decode")]
    fast, slow = CostModel(), CostModel(link_bytes_per_s=1e7)
    assert placed(1000, pair, fast).stream_s < 0.001
    assert placed(1000, pair, slow).stream_s == pytest.approx(1000 * KV / 1e7 - 1.0)
    held = [pair[0], replace(pair[1], matched_tokens=960)]
    assert placed(1000, held, slow).stream_s < 0.1
    mono = [*pair, worker("mono", queued_tokens=200)]
    assert placed(1000, mono, slow).prefill == placed(1000, mono, slow).decode == 2


def test_full_decode_workers_are_avoided_before_they_overflow() -> None:
    full, empty = worker("mono", free_frames=6), worker("mono", running=1)
    assert placed(1000, [full, empty]).decode == 1


def test_refusals_say_why_and_when_to_come_back() -> None:
    assert refused(10, [worker("prefill")]).reason == "no_workers"
    assert refused(10, []).reason == "no_workers"
    long = refused(25_600, [worker("mono")])
    assert long.reason == "too_long" and long.retry_after_s == 0
    assert refused(500, [worker("mono", max_context=512)]).reason == "too_long"
    room = refused(3000, [worker("mono", free_frames=2, queued_tokens=2000)])
    assert room.reason == "no_room" and room.retry_after_s == 2.0 + 10 * 0.5
    slow = refused(3000, [worker("mono")], CostModel(max_wait_s=2.0))
    assert slow.reason == "too_slow" and slow.retry_after_s == pytest.approx(1.0)


def test_equal_costs_go_to_the_first() -> None:
    assert placed(100, [worker("mono"), worker("mono")]).prefill == 0


@given(
    st.lists(
        st.builds(
            worker,
            st.sampled_from(["mono", "prefill", "decode"]),
            queued_tokens=st.integers(0, 5000),
            running=st.integers(0, 9),
            matched_tokens=st.integers(0, 4000),
            free_frames=st.integers(-3, 100),
        ),
        max_size=6,
    ),
    st.integers(1, 4000),
)
def test_no_other_placement_is_cheaper(workers: list[WorkerLoad], tokens: int) -> None:
    choice = choose(tokens, 64, KV, workers)
    alone = []
    for i, p in enumerate(workers):
        for j, d in enumerate(workers):
            mono = i == j and p.role == "mono"
            if mono or (p.role == "prefill" and d.role == "decode"):
                one = choose(tokens, 64, KV, [p] if mono else [p, d])
                if isinstance(one, Placement):
                    alone.append(one.cost_s)
    if isinstance(choice, Placement):
        assert choice.cost_s == pytest.approx(min(alone))
    else:
        assert not alone and choice.retry_after_s >= 0


def test_bad_numbers_are_named() -> None:
    for field, value in (("queued_tokens", -1), ("num_frames", 0), ("frame_tokens", 0)):
        with pytest.raises(InvalidArgument, match=rf"workers\[1\]\.{field}={value} is out of"):
            choose(10, 1, KV, [worker("mono"), worker("mono", **{field: value})])
    with pytest.raises(InvalidArgument, match="prompt_tokens=0"):
        choose(0, 1, KV, [])
    with pytest.raises(InvalidArgument, match="role='boss' is unknown"):
        choose(1, 1, KV, [worker("boss")])


def test_load_counts_from_dispatch_and_ends_once() -> None:
    book = LoadBook()
    assert book.dispatch(b"w", b"r1", 1000, 5) and book.dispatch(b"w", b"r2", 500, 3)
    assert not book.dispatch(b"w", b"r1", 1000, 5)
    assert book.load(b"w") == (1500, 2, 8)
    assert book.prefilled(b"w", b"r1") and book.prefilled(b"w", b"r1")
    assert book.load(b"w") == (500, 2, 8)
    assert book.finished(b"w", b"r1") and not book.finished(b"w", b"r1")
    assert book.load(b"w") == (500, 1, 3)
    assert not book.finished(b"x", b"r2") and not book.prefilled(b"w", b"r9")
    book.forget_worker(b"w")
    assert book.load(b"w") == (0, 0, 0)
