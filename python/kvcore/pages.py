"""Pages of KV: geometry (:class:`PageSpec`), memory (:class:`Arena`), life (:class:`Pool`).

A page is ``page_size`` tokens of all layers. Pages live in frames of ``extent_pages`` consecutive
pages, layer-major inside; page id = frame * extent_pages + i. See ``csrc/pages``.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcore import _core

__all__ = [
    "Arena",
    "PageClass",
    "PageSpec",
    "Pool",
    "PoolStats",
    "ReadonlyMapping",
    "SequencePages",
    "block_table",
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
        num_frames, free_frames: frames in all, and those without any ref.
        num_pages: ``num_frames * extent_pages``.
        held_pages: pages with an owner ref.
        io_pages: pages with an io ref.
        sealed_pages: immutable pages.
        arena_bytes, arena_huge_bytes: size of the arena, and the part mapped by 2 MiB pages.
    """

    num_frames: int
    free_frames: int
    num_pages: int
    held_pages: int
    io_pages: int
    sealed_pages: int
    arena_bytes: int
    arena_huge_bytes: int


class Pool(_core.pages.Pool):
    """A thread-safe pool of pages: ``Pool(spec, num_frames, arena=None, huge_pages=True)``.

    Raises InvalidArgument for values out of range and IoError where memory cannot be had.
    """

    def stats(self) -> PoolStats:
        """The counters now, all taken under one lock."""
        return PoolStats(*self._stats())
