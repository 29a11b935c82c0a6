"""Pages of KV: geometry (:class:`PageSpec`), memory (:class:`Arena`), life (:class:`Pool`).

A page is ``page_size`` tokens of all layers. Page ids stand in groups of ``extent_pages``: a group
has one frame of bytes, layer-major inside, or each of its pages a run of its own. Pages are open
(the spec's own format) or of a compressed :class:`PageClass`. See ``csrc/pages``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

from kvcore import _core

__all__ = [
    "Arena",
    "Geometry",
    "PageClass",
    "PageSpec",
    "Pool",
    "PoolStats",
    "ReadonlyMapping",
    "SequencePages",
    "block_table",
    "geometry",
    "page_ids_for",
    "slot_mapping",
    "usable_prefix",
]

PageSpec = _core.pages.PageSpec
PageClass = _core.pages.PageClass
Arena = _core.pages.Arena
ReadonlyMapping = _core.pages.ReadonlyMapping
SequencePages = _core.pages.SequencePages
block_table = _core.pages.block_table
slot_mapping = _core.pages.slot_mapping
usable_prefix = _core.pages.usable_prefix


@dataclass(frozen=True)
class PoolStats:
    """Counters of a pool at one moment.

    Attributes:
        num_frames, free_frames: frames that the bytes hold, and those that could be allocated now.
        num_pages: page ids, ``num_frames * extent_pages`` unless ``page_ids`` asked for more.
        held_pages: pages with an owner ref.
        io_pages: pages with an io ref.
        sealed_pages: immutable pages.
        arena_bytes, arena_huge_bytes: size of the arena, and the part mapped by 2 MiB pages.
        free_bytes, open_bytes, compressed_bytes: this pool's bytes; in all ``num_frames`` frames.
            Open ones count until no transfer reads them.
    """

    num_frames: int
    free_frames: int
    num_pages: int
    held_pages: int
    io_pages: int
    sealed_pages: int
    arena_bytes: int
    arena_huge_bytes: int
    free_bytes: int
    open_bytes: int
    compressed_bytes: int

    @property
    def used_bytes(self) -> int:
        """Bytes of pages, open or compressed."""
        return self.open_bytes + self.compressed_bytes


class Pool(_core.pages.Pool):
    """A thread-safe pool of pages: ``Pool(spec, num_frames, arena=None, huge_pages=True)``.

    ``page_ids=0`` makes as many ids as the frames have pages; compressed pages need more, see
    :func:`page_ids_for`. ``alloc(n)`` gives whole frames; ``alloc(n, run_pages=1)`` single pages,
    whose bytes come free one by one as they are compressed (``kvcore.compress``);
    ``alloc_in_class(n, class_number)`` pages that are compressed from the start, to be filled by a
    hand-over (``kvcore.stream``). Raises
    InvalidArgument for values out of range and IoError where memory cannot be had.
    """

    def stats(self) -> PoolStats:
        """The counters now, all taken under one lock."""
        return PoolStats(*self._stats())


def page_ids_for(page_class: PageClass | None, num_frames: int) -> int:
    """Page ids that a pool of ``num_frames`` frames can use up with all pages in ``page_class``.

    None, for pages that stay open, gives 0: the pool's own number.
    """
    if page_class is None:
        return 0
    return num_frames * max(
        page_class.spec.extent_pages, -(-page_class.spec.frame_bytes // page_class.run_bytes(1))
    )


_PAGE_SIZE = 64
_ELEMENT_BYTES = {"f32": 4}


class Geometry(NamedTuple):
    """What another process's pages look like, from their description."""

    page_size: int
    """Tokens per page, which is also the unit of its keys."""
    frame_tokens: int
    token_bytes: float


@functools.cache
def geometry(page_spec: str) -> Geometry:
    """Read from a ``PageSpec.describe()`` text."""
    parts = dict(part.split("=", 1) for part in page_spec.split() if "=" in part)

    def number(name: str, default: int) -> int:
        text = parts.get(name, "")
        return int(text) if text.isdigit() else default

    dims = number("head_dim_k", 0) + number("head_dim_v", 0)
    elements = number("layers", 1) * number("kv_heads", 1) * dims
    page_size = number("page_size", _PAGE_SIZE)
    token_bytes = float(elements * _ELEMENT_BYTES.get(parts.get("format", ""), 2))
    return Geometry(page_size, page_size * number("extent_pages", 1), token_bytes)
