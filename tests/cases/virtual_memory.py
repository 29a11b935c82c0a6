"""Address ranges far larger than memory: only the parts that a case may touch are there."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_PRIVATE, _MAP_ANONYMOUS, _MAP_NORESERVE, _PROT_NONE = 2, 0x20, 0x4000, 0


@dataclass
class Range:
    """``bytes`` of addresses from ``address`` on; a touch outside what was opened is a SIGSEGV."""

    address: int
    bytes: int

    def open(self, first: int, count: int) -> None:
        """Makes ``count`` bytes from offset ``first`` on readable and writable."""
        low = first // mmap.PAGESIZE * mmap.PAGESIZE
        size = -(-(first + count - low) // mmap.PAGESIZE) * mmap.PAGESIZE
        flags = mmap.PROT_READ | mmap.PROT_WRITE
        assert _libc.mprotect(self.address + low, size, flags) == 0, ctypes.get_errno()

    def array(
        self, shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0
    ) -> np.ndarray:
        """float32 of that shape and those strides (bytes) over the range; touches nothing."""
        whole = (ctypes.c_uint8 * self.bytes).from_address(self.address)
        return np.ndarray(shape, np.float32, whole, offset, strides)


@contextmanager
def reserved(num_bytes: int) -> Iterator[Range]:
    """A range of which nothing is open."""
    flags = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE
    address = _libc.mmap(None, num_bytes, _PROT_NONE, flags, -1, 0)
    assert address not in (None, ctypes.c_void_p(-1).value), ctypes.get_errno()
    try:
        yield Range(address, num_bytes)
    finally:
        _libc.munmap(address, num_bytes)
