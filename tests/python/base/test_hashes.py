"""XXH3-64 and BLAKE2b against golden vectors, hashlib and, where installed, the xxhash package."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvcore._core import base
from kvcore.errors import InvalidArgument

GOLDEN = json.loads((Path(__file__).parent / "golden" / "hashes.json").read_text())


def golden_data(length: int) -> bytes:
    out = bytearray(length)
    state = 12345
    for i in range(length):
        state = (state * 1_103_515_245 + 12_345) & 0x7FFFFFFF
        out[i] = state >> 16 & 0xFF
    return bytes(out)


EVERYTHING = golden_data(max(n for n, _ in GOLDEN["xxh3_64"]))


def test_xxh3_golden_vectors() -> None:
    lengths = [n for n, _ in GOLDEN["xxh3_64"]]
    assert lengths[:1025] == list(range(1025)) and lengths[-1] > 1_000_000
    for n, digest in GOLDEN["xxh3_64"]:
        assert f"{base.xxh3_64(EVERYTHING[:n]):016x}" == digest, n


def test_blake2b_golden_vectors() -> None:
    assert len(GOLDEN["blake2b"]) == 165
    for n, key, size, digest in GOLDEN["blake2b"]:
        assert base.blake2b(EVERYTHING[:n], EVERYTHING[:key], size).hex() == digest, (n, key, size)


@given(st.lists(st.integers(0, 700), max_size=8))
def test_xxh3_of_pieces_is_xxh3_of_the_whole(sizes: list[int]) -> None:
    pieces, at = [], 0
    for size in sizes:
        pieces.append(EVERYTHING[at : at + size])
        at += size
    assert base.xxh3_64_of_pieces(pieces) == base.xxh3_64(EVERYTHING[:at])


@given(st.binary(max_size=600), st.binary(max_size=64), st.integers(1, 64))
def test_blake2b_equals_hashlib(data: bytes, key: bytes, size: int) -> None:
    assert (
        base.blake2b(data, key, size) == hashlib.blake2b(data, key=key, digest_size=size).digest()
    )


@given(st.binary(max_size=5000))
def test_xxh3_equals_the_reference_library(data: bytes) -> None:
    xxhash = pytest.importorskip("xxhash")
    assert base.xxh3_64(data) == xxhash.xxh3_64_intdigest(data)


def test_blake2b_names_bad_sizes() -> None:
    with pytest.raises(InvalidArgument, match="key has 65 bytes: allowed 0 to 64"):
        base.blake2b(b"", b"k" * 65)
    with pytest.raises(InvalidArgument, match="digest_bytes=65 is out of range: allowed 1 to 64"):
        base.blake2b(b"", b"", 65)


def test_fault_plan_fails_where_and_when_told() -> None:
    plan = base.FaultPlan(seed=1)
    plan.fail_nth("a", 3)
    assert [plan.hit("a") for _ in range(5)] == [False, False, True, False, False]
    assert not plan.hit("b") and plan.calls("a") == 5 and plan.failures("a") == 1
    runs = []
    for _ in range(2):
        plan = base.FaultPlan(seed=9)
        plan.fail_randomly("r", 0.25)
        runs.append([plan.hit("r") for _ in range(4000)])
    assert runs[0] == runs[1] and 800 < sum(runs[0]) < 1200
    with pytest.raises(InvalidArgument, match="probability=2 is out of range"):
        plan.fail_randomly("r", 2.0)
