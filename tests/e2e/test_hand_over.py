"""Prefill and decode engines joined by a stream give what one process gives, token for token."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvcore import stream
from kvcore.errors import InvalidArgument
from kvcore.pages import PageSpec, Pool
from pair import (
    Pair,
    assert_baseline,
    make_mono,
    prompt,
    request,
    run_mono,
)

BOUNDARIES = {
    16: [1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65],
    64: [1, 2, 63, 64, 65, 127, 128, 129, 255, 256, 257],
}


def kv_bytes(pair: Pair, num_tokens: int, start: int = 0) -> int:
    """Whole slices of all layers from ``start`` on, headers included."""
    spec = pair.decode.memory.pool.spec
    pages = -(-num_tokens // spec.page_size) - start // spec.page_size
    return spec.num_layers * pages * spec.slice_bytes


def check_equal(model: Any, pair: Pair, sizes: list[int], page_size: int) -> None:
    """One after the other, each prompt new to both sides."""
    mono = make_mono(model, page_size)
    for size in sizes:
        tokens = prompt(size, seed=9)
        (want,) = run_mono(mono, request(tokens, 5))
        (got,) = pair.run(request(tokens, 5))
        assert got.tokens == want.tokens, size
        assert got.end["computed_prompt_tokens"] == 0
        assert got.end["prompt_tokens"] == size and got.end["reason"] == "length"
        assert got.end["kv_bytes"] == got.prefilled["kv_bytes"] == kv_bytes(pair, size)
        assert got.prefilled["computed_tokens"] == want.prefilled["computed_tokens"] == size
        assert got.prefilled["prefill_s"] > 0 and want.prefilled["prefill_s"] > 0
        waited = {"queue_s": got.prefilled["queue_s"]}  # for pages on both sides
        told = pair.sent[got.end["request_id"]]
        assert got.prefilled == told | waited and waited["queue_s"] > told["queue_s"] > 0
        for engine in (mono, pair.prefill, pair.decode):
            engine.memory.tree.clear()
    assert pair.decode.counters["computed_prompt_tokens"] == 0
    assert pair.decode.counters["recomputed_tokens"] == 0


@pytest.mark.parametrize("page_size", [16, 64])
def test_every_boundary_equals_mono(tiny: Any, page_size: int) -> None:
    with Pair(tiny, page_size=page_size, token_budget=48) as pair:
        check_equal(tiny, pair, BOUNDARIES[page_size], page_size)


@pytest.mark.nightly
@pytest.mark.parametrize("link", ["loopback", "shm", "tcp"])
@pytest.mark.parametrize("budget", [16, 48, 512])
@pytest.mark.parametrize("page_size", [16, 64])
def test_every_length_equals_mono(
    tiny: Any, tmp_path: Path, page_size: int, budget: int, link: str
) -> None:
    with Pair(tiny, link, page_size, directory=tmp_path, token_budget=budget) as pair:
        check_equal(tiny, pair, list(range(1, 4 * page_size + 2)), page_size)


@pytest.mark.parametrize("link", ["shm", "tcp"])
def test_real_links_equal_mono(tiny: Any, tmp_path: Path, link: str) -> None:
    with Pair(tiny, link, 16, directory=tmp_path, token_budget=64) as pair:
        check_equal(tiny, pair, [1, 16, 33, 200], 16)
        (answer,) = pair.run(request(prompt(40), 2))
        assert answer.end["transport"] == answer.prefilled["transport"] == link
        assert 0.0 <= answer.end["arrived_fraction"] <= 1.0 and answer.end["exposed_s"] >= 0.0


def test_an_empty_prompt_is_refused(tiny: Any) -> None:
    with Pair(tiny) as pair, pytest.raises(InvalidArgument, match="tokens has 0 entries"):
        pair.submit(request([]))


def test_several_in_flight_equal_mono(tiny: Any) -> None:
    prompts = [prompt(size, seed) for seed in range(2) for size in (3, 40, 64, 130, 250)]
    options = [{"temperature": 1.0, "seed": i} if i % 2 else {} for i in range(len(prompts))]
    requests = [request(p, 12, **o) for p, o in zip(prompts, options, strict=True)]
    want = [run_mono(make_mono(tiny), each)[0].tokens for each in requests]
    with Pair(tiny, token_budget=64, max_running=6) as pair:
        assert [answer.tokens for answer in pair.run(*requests)] == want
        assert pair.decode.counters["computed_prompt_tokens"] == 0


def test_logprobs_and_the_first_token_equal_mono(tiny: Any) -> None:
    each = request(prompt(50), 3, num_logprobs=2)
    (want,) = run_mono(make_mono(tiny), each)
    with Pair(tiny) as pair:
        (got,) = pair.run(each)
    assert got.told == want.told
    assert [len(fields["top_ids"]) for fields in got.told] == [2, 2, 2]


def test_one_token_and_stop_at_the_first_token(tiny: Any) -> None:
    with Pair(tiny) as pair:
        tokens = prompt(30)
        (one,) = pair.run(request(tokens, 1))
        assert len(one.tokens) == 1 and one.end["reason"] == "length"
        (stopped,) = pair.run(request(tokens, 9, stop_token_ids=one.tokens))
        assert stopped.tokens == one.tokens and stopped.end["reason"] == "stop"


@pytest.mark.parametrize("page_size", [16, 64])
def test_pages_the_decode_side_holds_are_not_sent_again(tiny: Any, page_size: int) -> None:
    document = prompt(300)
    with Pair(tiny, page_size=page_size) as pair:
        pair.run(request(document, 4))
        question = [*document, *prompt(20)]
        (again,) = pair.run(request(question, 6))
        cached = 300 // page_size * page_size
        assert again.prefilled["cached_tokens"] == again.end["cached_tokens"] == cached
        assert again.end["kv_bytes"] == kv_bytes(pair, 320, cached)
        assert again.tokens == run_mono(make_mono(tiny, page_size), request(question, 6))[0].tokens


def test_a_prefill_cache_is_pushed_to_a_decode_side_without_it(tiny: Any) -> None:
    document = prompt(300)
    with Pair(tiny) as pair:
        (cold,) = pair.run(request(document, 6))
        pair.decode.memory.tree.clear()
        (pushed,) = pair.run(request(document, 6))
        assert pushed.prefilled["computed_tokens"] == 300 - 288
        assert pushed.end["kv_bytes"] == kv_bytes(pair, 300)
        assert pushed.tokens == cold.tokens


def test_a_decode_cache_is_used_although_the_prefill_side_lost_it(tiny: Any) -> None:
    document = prompt(300)
    with Pair(tiny) as pair:
        (cold,) = pair.run(request(document, 6))
        pair.prefill.memory.tree.clear()
        (again,) = pair.run(request(document, 6))
        assert again.prefilled["computed_tokens"] == 300
        assert again.end["kv_bytes"] == kv_bytes(pair, 300, 288)
        assert again.tokens == cold.tokens


def test_a_conversation_grows_turn_by_turn(tiny: Any) -> None:
    tokens = prompt(70)
    with Pair(tiny) as pair:
        for turn in range(3):
            (answer,) = pair.run(request(tokens, 20))
            assert answer.tokens == run_mono(make_mono(tiny), request(tokens, 20))[0].tokens
            moved = answer.end["kv_bytes"]
            assert turn == 0 or moved < kv_bytes(pair, len(tokens)) / 2
            tokens = tokens + answer.tokens + prompt(15, turn)


def test_a_flipped_slice_changes_the_answer_and_checksums_find_it(tiny: Any) -> None:
    each = request(prompt(200), 40)
    want = run_mono(make_mono(tiny), each)[0].tokens
    off = {"checksums": "off"}
    changed = 0
    for run in range(1, 6):
        flip = {"checksums": "off", "flip_slice": run}
        with Pair(tiny, decode_endpoint=flip, prefill_endpoint=off) as pair:
            changed += pair.run(request(prompt(200), 40))[0].tokens != want
    assert changed > 0
    sure = {"checksums": "all"}
    with Pair(tiny, decode_endpoint=sure | {"flip_slice": 3}, prefill_endpoint=sure) as pair:
        (failed,) = pair.run(each)
        assert failed.failed["code"] == "corrupt" and failed.failed["retryable"] == 1
        assert failed.tokens == []


def test_preemption_on_the_decode_side_recomputes_and_changes_nothing(tiny: Any) -> None:
    prompts = [prompt(size) for size in (120, 100, 90, 110)]
    want = [run_mono(make_mono(tiny), request(p, 60))[0].tokens for p in prompts]
    with Pair(tiny, decode_frames=10) as pair:
        answers = pair.run(*(request(p, 60) for p in prompts))
        assert [answer.tokens for answer in answers] == want
        assert pair.decode.scheduler.preemptions > 0
        assert pair.decode.counters["recomputed_tokens"] > 0
        assert pair.decode.counters["computed_prompt_tokens"] == 0


def test_a_closed_receiver_fails_the_prefill_and_frees_its_pages(tiny: Any) -> None:
    pair = Pair(tiny, token_budget=16)
    each = request(prompt(300), 4)
    pair.submit(each)
    for _ in range(5):
        pair.turn()
    pair.receiver.close()
    ended = []
    while pair.prefill.has_work:
        ended += pair.prefill.step()
    assert [(o.kind, o.fields["retryable"]) for o in ended] == [("failed", 1)]
    pair.sender.close()
    assert_baseline(pair.prefill)


def test_a_closed_sender_fails_the_reservation_and_frees_its_pages(tiny: Any) -> None:
    pair = Pair(tiny, token_budget=16)
    each = request(prompt(300), 4)
    pair.submit(each)
    for _ in range(5):
        pair.turn()
    pair.sender.close()
    while pair.decode.has_work:
        for output in pair.decode.step():
            assert output.kind == "failed" and output.fields["retryable"] == 1
    pair.receiver.close()
    assert_baseline(pair.decode)


def test_a_reservation_nobody_fills_ends_at_its_deadline(tiny: Any) -> None:
    with Pair(tiny) as pair:
        pair.decode.grant_limit_s = 0.05
        pair.decode.add(request(prompt(40)))
        seen = []
        while pair.decode.has_work:
            seen += pair.decode.step()
        assert [output.kind for output in seen] == ["reserved", "failed"]
        assert seen[1].fields["code"] == "timeout" and seen[1].fields["retryable"] == 1


@pytest.mark.parametrize(("ours", "theirs"), [(16, 64), (64, 16)])
def test_pages_of_another_size_are_converted(tiny_f32: Any, ours: int, theirs: int) -> None:
    """Prompts in parts found in the decode side's cache too: they begin inside a page here."""
    tokens = prompt(200)
    with Pair(tiny_f32, page_size=theirs, prefill_page_size=ours, token_budget=64) as pair:
        for size in (1, 40, 64, 150, 151, 200):
            (want,) = run_mono(make_mono(tiny_f32, theirs), request(tokens[:size], 12))
            (got,) = pair.run(request(tokens[:size], 12))
            assert got.tokens == want.tokens
        assert got.end["cached_tokens"] >= 128


def test_other_geometry_is_refused(tiny: Any) -> None:
    pool = Pool(PageSpec(1, 1, 1024), 2, huge_pages=False)
    other = stream.Endpoint(pool, ["loopback:other"], hub=stream.LoopbackHub())
    with Pair(tiny) as pair, other:
        each = request(prompt(40))
        granted = other.grant(each.request_id, pool.alloc(1)[:1], 40)
        pair.prefill.prefill(each, granted, 0)
        (failed,) = pair.prefill.step()
        assert failed.kind == "failed" and failed.fields["code"] == "unsupported"
        assert "head_dim_k=1024" in failed.fields["message"]
        for grant in (b"", b"junk", granted[:-1]):
            pair.prefill.prefill(request(prompt(40)), grant, 0)
            (failed,) = pair.prefill.step()
            assert failed.kind == "failed" and failed.fields["code"] == "corrupt"
        for start in (-1, 40, 64):
            with pytest.raises(InvalidArgument, match="start_token"):
                pair.prefill.prefill(request(prompt(40)), b"", start)


@pytest.mark.parametrize("link", ["loopback", "shm"])
def test_cancelled_at_random_moments_the_pools_are_at_baseline(
    tiny: Any, tmp_path: Path, link: str
) -> None:
    rng = np.random.default_rng(4)
    total, doomed = 60, {}
    with Pair(tiny, link, directory=tmp_path, token_budget=48, max_running=8) as pair:
        started = 0
        for turn in itertools.count():
            if started < total and turn % 2 == 0:
                each = request(prompt(int(rng.integers(1, 200)), started), int(rng.integers(1, 12)))
                pair.submit(each)
                started += 1
                if rng.random() < 0.4:
                    doomed[each.request_id] = turn + int(rng.integers(0, 12))
            for name in [n for n, at in doomed.items() if at <= turn]:
                pair.cancel(name)
                del doomed[name]
            pair.turn()
            if started == total and not (pair.prefill.has_work or pair.decode.has_work):
                break
        reasons = [answer.end["reason"] for answer in pair.answers.values()]
        assert len(reasons) == total and reasons.count("cancelled") >= 5
        mono = make_mono(tiny)
        for name, answer in pair.answers.items():
            if answer.end["reason"] == "length":
                assert answer.tokens == run_mono(mono, pair.requests[name])[0].tokens
