"""Keys that the router makes: of the workers' own page size, under their identity."""

from __future__ import annotations

import pytest
from kvcore.router.state import Worker
from kvcore.serve.keys import keys_under

SECRET = b"s" * 32


def worker(page_size: int, epoch: str = "e1") -> Worker:
    spec = f"layers=2 kv_heads=1 head_dim_k=16 head_dim_v=16 page_size={page_size} extent_pages=1"
    return Worker(b"w" * 16, 1, "mono", model="m", model_epoch=epoch, page_spec=spec)


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
def test_one_key_for_each_whole_page(page_size: int) -> None:
    keys_of = keys_under(SECRET, "bfloat16")
    for tokens in (0, page_size - 1, page_size, 3 * page_size + 1):
        _, keys = keys_of(worker(page_size), list(range(tokens)))
        assert len(keys) == tokens // page_size


def test_other_weights_have_other_keys() -> None:
    keys_of = keys_under(SECRET, "bfloat16")
    first, second = (keys_of(worker(16, epoch), list(range(16))) for epoch in ("e1", "e2"))
    assert first[0] != second[0]
    assert set(first[1]).isdisjoint(second[1])
