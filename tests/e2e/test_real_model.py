"""The default model over the hand-over: 20 prompts here, 200 of up to 3,000 tokens nightly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvcore import model
from pair import Pair, make_mono, request, run_mono


@pytest.fixture(scope="module")
def smollm2() -> Any:
    try:
        files = model.resolve(model.DEFAULT_MODEL)
    except model.ModelUnavailable as error:
        pytest.skip(f"the default model cannot be had: {error}")
    return model.load(files.path)


def texts(vocab_size: int, sizes: list[int], seed: int = 0) -> list[list[int]]:
    return [
        np.random.default_rng([size, seed, i]).integers(5, vocab_size, size).tolist()
        for i, size in enumerate(sizes)
    ]


def check(loaded: Any, folder: Path, sizes: list[int], count: int, link: str) -> None:
    prompts = texts(loaded.config.vocab_size, sizes)
    mono = make_mono(loaded, 64, frames=128)
    spec = mono.memory.pool.spec
    with Pair(loaded, link, 64, frames=128, directory=folder) as pair:
        for first in range(0, len(prompts), 8):  # several in flight
            asked = [request(tokens, count) for tokens in prompts[first : first + 8]]
            want = [answer.tokens for answer in run_mono(mono, *asked)]
            answers = pair.run(*asked)
            assert not any(answer.failed for answer in answers), [a.failed for a in answers]
            assert [answer.tokens for answer in answers] == want
            for each, answer in zip(asked, answers, strict=True):
                pages = -(-each.tokens.size // 64)
                assert answer.end["kv_bytes"] == spec.num_layers * pages * spec.slice_bytes
        assert pair.decode.counters["computed_prompt_tokens"] == 0


def test_20_prompts_equal_mono(smollm2: Any, tmp_path: Path) -> None:
    sizes = [1, 2, 15, 16, 17, 63, 64, 65, 100, 127, 128, 129, 7, 33, 50, 200, 30, 90, 3, 255]
    check(smollm2, tmp_path, sizes, 6, "shm")


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("link", ["shm", "tcp"])
def test_200_prompts_equal_mono(smollm2: Any, tmp_path: Path, link: str) -> None:
    edges = [n + d for n in (64, 128, 192, 256, 512, 1024) for d in (-1, 0, 1)]
    drawn = np.random.default_rng(1).integers(1, 3001, 199 - len(edges)).tolist()
    check(smollm2, tmp_path, [*edges, *drawn, 3000], 16, link)
