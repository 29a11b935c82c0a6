"""Huge pages under the packed weights.

A decode step reads every weight once; with 4 KiB pages a good part of that time goes into address
translation. The matrix library allocates its packed weights by malloc, so this looks for large
private memory of the process that is wholly resident and asks the kernel to collapse it into 2 MiB
pages (``madvise(2)``, MADV_COLLAPSE, Linux 6.1).
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Iterator
from pathlib import Path

HUGE = 2 << 20
_MADV_HUGEPAGE = 14
_MADV_COLLAPSE = 25
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt(3)
_APART_FROM_BYTES = 128 << 10
_REGION = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) rw-p \S+ 00:00 0\s*(\[heap\])?$")
_FIELD = re.compile(r"^(Rss|AnonHugePages): +(\d+) kB$")


@contextlib.contextmanager
def large_apart_from_small() -> Iterator[None]:
    """Large memory allocated within lies in mappings of its own, away from small objects.

    So a process that is forked later and writes to its objects takes no huge pages of the weights
    apart. Afterwards the heap serves all sizes that it may, else steps would map their results.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another libc
        yield
        return
    mallopt(_M_MMAP_THRESHOLD, _APART_FROM_BYTES)
    try:
        yield
    finally:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, 64 << 20)


def collapse_resident_memory() -> tuple[int, int]:
    """Collapse large anonymous memory of this process where all of it is in use.

    Returns:
        (bytes in huge pages now, bytes of the regions looked at). (0, 0) where the kernel has no
        such call or does not tell the regions.
    """
    smaps = Path("/proc/self/smaps")
    if not smaps.is_file():
        return 0, 0
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    ranges = [(start, stop) for start, stop, _ in _regions(smaps.read_text())]
    for start, stop in ranges:
        first, last = -(-start // HUGE) * HUGE, stop // HUGE * HUGE
        if last > first:
            libc.madvise(first, last - first, _MADV_HUGEPAGE)
            libc.madvise(first, last - first, _MADV_COLLAPSE)
    after = _regions(smaps.read_text())
    return sum(huge for _, _, huge in after), sum(stop - start for start, stop, _ in after)


def _regions(text: str) -> list[tuple[int, int, int]]:
    """(start, stop, bytes in huge pages) of resident private regions of at least two huge pages."""
    found: list[tuple[int, int, int]] = []
    for block in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", text, flags=re.MULTILINE):
        lines = block.splitlines()
        region = _REGION.match(lines[0].rstrip()) if lines else None
        if region is None:
            continue
        start, stop = int(region[1], 16), int(region[2], 16)
        kib = {m[1]: int(m[2]) for line in lines if (m := _FIELD.match(line))}
        if stop - start >= 2 * HUGE and kib.get("Rss", 0) * 1024 >= 0.9 * (stop - start):
            found.append((start, stop, kib.get("AnonHugePages", 0) * 1024))
    return found
