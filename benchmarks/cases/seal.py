"""Sealing pages: one thread turns open bf16 pages of a whole model into compressed ones."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from harness import Context, Result, interleave, rate_result, seconds
from kvcore import kernels
from kvcore.compress import PROFILES, profile_class, seal_pages
from kvcore.pages import PageClass, PageSpec, Pool, page_ids_for

# Name, layers, KV heads, head_dim; pages of 64 tokens.
SHAPES = [("smollm2-135m", 30, 3, 64), ("llama-3-8b", 32, 8, 128)]
PAGES = 16  # sealed in one repetition, each once
ROWS = 1 << 22


def run(context: Context) -> Iterator[Result]:
    """One result per shape and profile: pages per second, and what a page costs."""
    values = np.random.default_rng(1).normal(size=ROWS).astype(np.float32)
    bits = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    for name, layers, heads, dim in SHAPES:
        for profile in PROFILES[1:]:
            yield measure(name, PageSpec(layers, heads, dim), profile, bits, context.rounds(40, 8))


class Pages:
    """Open pages with content, and the pool that they are sealed in."""

    def __init__(self, spec: PageSpec, page_class: PageClass, bits: np.ndarray) -> None:
        self.spec, frames = spec, 2 * PAGES // spec.extent_pages + 2
        self.pool = Pool(spec, frames, page_ids=page_ids_for(page_class, frames))
        self.number = self.pool.add_class(page_class)
        self.bits = bits
        self.pages: list[int] = []

    def fill(self) -> None:
        """Fresh open pages, written through; not a part of what is measured."""
        self.pool.decref(self.pages)
        self.pages = self.pool.alloc(PAGES, run_pages=1)
        spec = self.spec
        size = spec.page_size * spec.num_kv_heads * spec.head_dim_k
        shape = (spec.page_size, spec.num_kv_heads, spec.head_dim_k)
        kv = self.bits[:size].reshape(shape), self.bits[size : 2 * size].reshape(shape)
        for page in self.pages:
            for layer in range(spec.num_layers):
                kernels.pack_slice(self.pool, page, layer, *kv)

    def seal(self) -> None:
        seal_pages(self.pool, self.pages, self.number)


def measure(name: str, spec: PageSpec, profile: str, bits: np.ndarray, rounds: int) -> Result:
    """Sealing, and a copy that reads the open bytes and writes the compressed ones."""
    page_class = profile_class(spec, profile)
    assert page_class is not None
    pages = Pages(spec, page_class, bits)
    moved = PAGES * (spec.page_bytes + page_class.page_bytes) // 2
    source, target = np.ones(moved, np.uint8), np.zeros(moved, np.uint8)

    def seal() -> float:
        pages.fill()
        return seconds(pages.seal)

    taken = interleave(
        {"seal": seal, "limit": lambda: PAGES / seconds(lambda: np.copyto(target, source))}, rounds
    )
    return rate_result(
        "seal",
        {"model": name, "profile": profile, "page": spec.page_size, "dtype": "bf16",
         "page_bytes": spec.page_bytes, "sealed_bytes": page_class.page_bytes},
        taken["seal"],
        PAGES,
        "pages/s",
        "copy_of_as_many_bytes",
        taken["limit"],
        bytes=2 * moved,
        flops=0,
        isa=kernels.isa(),
        threads=1,
    )  # fmt: skip
