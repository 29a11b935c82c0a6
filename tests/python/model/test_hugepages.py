"""Collapsing resident memory into huge pages, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest
from kvcore.model import hugepages

CODE = """
import numpy as np
from kvcore.model.hugepages import collapse_resident_memory
used = np.frombuffer(bytearray(64 << 20), dtype=np.uint8).copy()
used[:] = np.arange(used.size, dtype=np.uint8)
sparse = np.empty(64 << 20, dtype=np.uint8)
sparse[:4096] = 1
huge, total = collapse_resident_memory()
assert np.array_equal(used, np.arange(used.size, dtype=np.uint8))
print(huge, total)
"""


def test_resident_memory_is_collapsed_and_keeps_its_contents():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    huge, total = map(int, done.stdout.split())
    if huge == 0:
        pytest.skip("this kernel gives no huge pages")
    assert 56 << 20 <= huge <= total


APART = """
import torch
from kvcore.model.hugepages import large_apart_from_small
def in_heap(tensor):
    ends = next(line.split()[0] for line in open("/proc/self/maps") if "[heap]" in line).split("-")
    return int(ends[0], 16) <= tensor.data_ptr() < int(ends[1], 16)
with large_apart_from_small():
    inside = [torch.empty(1 << 20, dtype=torch.uint8) for _ in range(8)]
after = [torch.empty(1 << 20, dtype=torch.uint8) for _ in range(8)]
print(sum(map(in_heap, inside)), sum(map(in_heap, after)))
"""


def test_large_memory_lies_apart_only_where_asked_for():
    done = subprocess.run([sys.executable, "-c", APART], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "8"]


def test_only_large_private_resident_regions_are_looked_at():
    def region(place: str, rest: str, rss: int, huge: int = 0) -> str:
        return f"{place} {rest}\nRss: {rss:>10} kB\nAnonHugePages: {huge:>10} kB\nVmFlags: rd\n"

    text = (
        region("7f0000000000-7f0001000000", "rw-p 00000000 00:00 0 ", 16384, 4096)
        + region("7f0002000000-7f0003000000", "rw-p 00000000 00:00 0 ", 400)  # mostly untouched
        + region("7f0004000000-7f0004200000", "rw-p 00000000 00:00 0 ", 2048)  # small
        + region("7f0006000000-7f0007000000", "r--p 00000000 fe:01 77 /model.safetensors", 16384)
        + region("7f0008000000-7f0009000000", "rw-s 00000000 00:01 8 /memfd:arena", 16384)
        + region("560000000000-560001000000", "rw-p 00000000 00:00 0          [heap]", 16384)
    )
    assert hugepages._regions(text) == [
        (0x7F0000000000, 0x7F0001000000, 4096 << 10),
        (0x560000000000, 0x560001000000, 0),
    ]
