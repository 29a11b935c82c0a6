"""Arena: shared memory that peers can read and never write."""

from __future__ import annotations

import ctypes
import mmap
import os

import pytest
from kvcore.errors import InvalidArgument
from kvcore.pages import Arena

MIB = 1 << 20


def test_size_is_rounded_to_whole_huge_pages_and_zeroed() -> None:
    arena = Arena(3 * MIB)
    assert arena.bytes == 4 * MIB
    assert arena.address % (2 * MIB) == 0
    assert ctypes.string_at(arena.address, arena.bytes) == bytes(arena.bytes)


def test_huge_bytes_is_what_the_kernel_maps() -> None:
    assert Arena(4 * MIB, huge_pages=False).huge_bytes in (0, 4 * MIB)
    huge = Arena(8 * MIB).huge_bytes
    assert huge % (2 * MIB) == 0 and 0 <= huge <= 8 * MIB


def test_peer_reads_what_the_owner_writes() -> None:
    arena = Arena(2 * MIB)
    fd = arena.reopen_readonly()
    peer = Arena.map_readonly(fd, arena.bytes)
    os.close(fd)
    ctypes.memmove(arena.address + 4097, b"kvcore", 6)
    assert ctypes.string_at(peer.address + 4097, 6) == b"kvcore"


@pytest.mark.parametrize("readonly", [True, False])
def test_no_descriptor_maps_writable(readonly: bool) -> None:
    arena = Arena(2 * MIB)
    fd = arena.reopen_readonly() if readonly else os.dup(arena.fd)
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(PermissionError):
            os.ftruncate(os.dup(arena.fd), 4096)
    finally:
        os.close(fd)


def test_bad_sizes_are_named() -> None:
    for bad in (0, -1, 1 << 60):
        with pytest.raises(InvalidArgument, match=f"bytes={bad} is out of range"):
            Arena(bad)


def test_a_file_that_can_shrink_is_refused() -> None:
    fd = os.memfd_create("plain")
    os.ftruncate(fd, MIB)
    with pytest.raises(InvalidArgument, match="sealed against shrinking"):
        Arena.map_readonly(fd, MIB)
    os.close(fd)
    arena = Arena(2 * MIB)
    with pytest.raises(InvalidArgument, match="out of range"):
        Arena.map_readonly(arena.fd, arena.bytes + 1)
