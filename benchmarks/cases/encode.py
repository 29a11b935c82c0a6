"""Compressing and decompressing pages: numbers per second of one thread, against a plain copy."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
from harness import Context, Result, interleave, rate_result, seconds
from kvcore import kernels

PAGE, HEADS, DIM = 64, 8, 128
PAGES = 32  # of one repetition: 4 MiB of bf16
COPIES = {"memory": 24, "cache": 1}  # parts of 4 MiB that rotate: 96 MiB, or one page 32 times
CODECS = [("int8", "k"), ("int8", "v"), ("fp8", "k"), ("fp8", "v"), ("k4", "k"), ("v4", "v"),
          ("v3", "v")]  # fmt: skip
BF16 = kernels.DTYPE_CODES["bfloat16"]
PAGE_ELEMENTS = PAGE * HEADS * DIM


def run(context: Context) -> Iterator[Result]:
    """Two results per place, format and part: encode and decode."""
    rng = np.random.default_rng(1)
    values = rng.normal(size=PAGES * PAGE_ELEMENTS).astype(np.float32)
    rows = np.tile((values.view(np.uint32) >> np.uint32(16)).astype(np.uint16), (24, 1))
    spare = np.ones_like(rows)
    for place, (fmt, part) in itertools.product(COPIES, CODECS):
        yield from measure(place, fmt, part, rows, spare, context.rounds(60, 12))


class Pages:
    """Rows [pages][heads][page, dim] (bf16) and blocks [pages][heads][bytes], by address."""

    def __init__(self, place: str, fmt: str, part: str, rows: np.ndarray) -> None:
        self.codec = (fmt, part, PAGE, DIM)
        self.block_bytes = size = kernels.block_bytes(*self.codec)
        parts, pages = COPIES[place], PAGES if place == "memory" else 1
        self.rows = rows[:parts].copy()
        self.blocks = np.ones((parts, PAGES * HEADS * size), np.uint8)
        addresses = [
            [
                (
                    self.rows[i].__array_interface__["data"][0] + page % pages * PAGE_ELEMENTS * 2,
                    self.blocks[i].__array_interface__["data"][0] + page % pages * HEADS * size,
                )
                for page in range(PAGES)
            ]
            for i in range(parts)
        ]
        self._turn = itertools.cycle(addresses)

    def encode(self) -> None:
        """All heads of the next part's pages."""
        size = self.block_bytes
        for row, block in next(self._turn):
            kernels.encode_block_ptr(
                *self.codec, row, DIM, BF16, block, size, HEADS, PAGE * DIM, size
            )

    def decode(self) -> None:
        """The reverse, into the rows they came from."""
        size = self.block_bytes
        for row, block in next(self._turn):
            kernels.decode_block_ptr(
                *self.codec, block, size, row, DIM, BF16, HEADS, PAGE * DIM, size
            )


def copier(place: str, rows: np.ndarray, spare: np.ndarray, page: int) -> Callable[[], None]:
    """Copies that read and write ``page`` bytes together for each page, from the same place."""
    turn = itertools.cycle(range(COPIES[place]))
    elements, times = page // 4, 1
    if place == "memory":
        elements *= PAGES
    else:
        times = PAGES

    def copy() -> None:
        at = next(turn)
        source, target = rows[at, :elements], spare[at, :elements]
        for _ in range(times):
            np.copyto(target, source)

    return copy


def measure(
    place: str, fmt: str, part: str, rows: np.ndarray, spare: np.ndarray, rounds: int
) -> Iterator[Result]:
    """Encode, decode and the copy in turn."""
    pages = Pages(place, fmt, part, rows)
    page_bytes = PAGE_ELEMENTS * 2 + HEADS * pages.block_bytes
    elements = PAGES * PAGE_ELEMENTS
    copy = copier(place, rows, spare, page_bytes)
    for _ in range(COPIES[place]):  # every block is written before it is read
        pages.encode()
    taken = interleave(
        {
            "encode": lambda: seconds(pages.encode),
            "decode": lambda: seconds(pages.decode),
            "limit": lambda: elements / 1e9 / seconds(copy),
        },
        rounds,
    )
    for direction in ("encode", "decode"):
        yield rate_result(
            "encode",
            {"direction": direction, "format": fmt, "part": part, "from": place, "page": PAGE,
             "heads": HEADS, "dim": DIM, "dtype": "bf16"},
            taken[direction],
            elements / 1e9,
            "Gelem/s",
            "copy_of_as_many_bytes",
            taken["limit"],
            bytes=PAGES * page_bytes,
            flops=0,
            isa=kernels.isa(),
            threads=1,
        )  # fmt: skip
