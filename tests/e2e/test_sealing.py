"""Decode workers that compress: pages arrive one by one and hold what was computed elsewhere."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvcore import reference
from kvcore._core.base import FaultPlan
from kvcore.config import WorkerConfig, WorkerLaunch
from kvcore.errors import Unsupported
from kvcore.worker.build import build_worker
from pair import Pair, make_mono, prompt, request, run_mono

SIZES = [1, 16, 33, 64, 100, 257]


def cached_pages(engine: Any, tokens: list[int]) -> list[int]:
    found = engine.memory.tree.match(b"n" * 32, np.array([*tokens, 1], np.int32))
    engine.memory.pool.decref(found.pages)
    return list(found.pages)


@pytest.mark.parametrize("link", ["loopback", "shm"])
def test_single_pages_travel_and_decode_as_frames_do(tiny: Any, link: str, tmp_path: Any) -> None:
    """With every seal failing, tokens are those of exact engines."""
    plan = FaultPlan(1)
    plan.fail_randomly("pool.seal", 1.0)
    mono = make_mono(tiny, profile="small")
    mono.memory.pool.set_faults(plan)
    with Pair(tiny, link, profile="small", token_budget=48, directory=tmp_path) as pair:
        pair.decode.memory.pool.set_faults(plan)
        for size in SIZES:
            tokens = prompt(size, seed=3)
            (want,) = run_mono(make_mono(tiny), request(tokens, 20))
            assert run_mono(mono, request(tokens, 20))[0].tokens == want.tokens
            assert pair.run(request(tokens, 20))[0].tokens == want.tokens
        assert pair.decode.memory.sealer.sealed == 0 < plan.failures("pool.seal")


def test_sealed_pages_hold_what_the_prefill_side_computed(tiny: Any) -> None:
    with Pair(tiny, profile="small", token_budget=48) as pair:
        tokens = prompt(100, seed=4)
        pair.run(request(tokens, 1))
        sealer = pair.decode.memory.sealer
        while sealer.waiting:
            pair.decode.step()
        ours = cached_pages(pair.decode, tokens)
        theirs = cached_pages(pair.prefill, tokens)
        pool, source = pair.decode.memory.pool, pair.prefill.memory.pool
        assert [pool.class_of(p) for p in ours] == [0, *[sealer.class_number] * 5]
        assert sealer.sealed == 0  # they were encoded on their way
        page_class, spec = pool.page_class(sealer.class_number), pool.spec
        for page, other in zip(ours[1:], theirs[1:], strict=True):
            for layer in range(spec.num_layers):
                rows = source.read_slice(other, layer)
                size = page_class.slice_bytes(layer)
                have = ctypes.string_at(pool.slice_address(page, layer), size)
                for head, offsets in enumerate(page_class.block_offsets(layer)):
                    formats = page_class.formats[layer][head]
                    for part, fmt, at, values in zip("kv", formats, offsets, rows, strict=True):
                        exact = reference.decode(values[:, head], spec.format)
                        want = reference.encode_block(fmt, part, exact).tobytes()
                        assert have[at : at + len(want)] == want


def test_an_exact_request_after_a_small_one_is_answered_as_by_an_exact_worker(tiny: Any) -> None:
    tokens = prompt(170, seed=5)
    (want,) = run_mono(make_mono(tiny), request(tokens, 40))
    engine = make_mono(tiny, profile="small", token_budget=48)
    run_mono(engine, request(tokens, 40))
    while engine.memory.sealer.waiting:
        engine.step()
    (small,) = run_mono(engine, request(tokens, 40))
    (got,) = run_mono(engine, request(tokens, 40, kv_profile="exact"))
    assert small.end["cached_tokens"] == 160 and got.end["cached_tokens"] == 16
    assert got.tokens == want.tokens != small.tokens
    with Pair(tiny, profile="small", token_budget=48) as pair:
        for each in ("small", "small", "exact"):
            (got,) = pair.run(request(tokens, 40, kv_profile=each))
            while pair.decode.memory.sealer.waiting:
                pair.decode.step()
        assert got.tokens == want.tokens


def test_a_worker_of_a_profile_holds_more_and_prefill_ignores_it(
    tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def build(role: str, **options: Any) -> tuple[Any, dict[str, Any]]:
        config = WorkerConfig(kv_bytes=4 << 20, page_size=64, **options)
        launch = WorkerLaunch(role, "", "", str(tiny_path), worker=config)
        engine, about = build_worker(launch, tmp_path)
        engine.close()
        return engine, about

    _, exact = build("mono")
    engine, small = build("mono", kv_profile="small")
    assert engine.memory.sealer is not None
    assert small["num_frames"] > 2 * exact["num_frames"]
    assert small["max_context"] >= exact["max_context"] and not exact["kv_table"]
    table = engine.memory.pool.page_class(engine.memory.sealer.class_number)
    assert (small["kv_profile"], small["kv_table"]) == ("small", table.digest.hex())
    assert len({pair for layer in table.formats for pair in layer}) > 1  # chosen, not uniform
    assert engine.stats()["num_frames"] == small["num_frames"]
    engine, prefill = build("prefill", kv_profile="small")
    assert engine.memory.sealer is None and prefill["num_frames"] == exact["num_frames"]
    with pytest.raises(Unsupported, match="kv_profile 'balanced' compresses bf16 pages"):
        build("decode", kv_profile="balanced", dtype="float32")
