"""Pages of sequences: prefix match, growth by frames with eviction, publishing, release.

Joins the pool (who owns what) and the radix tree (who can find what), and names what appeared and
disappeared by page keys, so that a router can be told. Not thread-safe: one engine owns it.
"""

from __future__ import annotations

from typing import Any

from kvcore.worker.request import Sequence


class PageMemory:
    """The pages of one engine's sequences over one pool and one radix tree.

    ``key_unit`` tokens make one page key; keys are announced when the page holding the unit's last
    token becomes findable, and withdrawn when that page is evicted.
    """

    def __init__(self, pool: Any, tree: Any, key_unit: int = 64) -> None:
        self.pool = pool
        self.tree = tree
        self.page_size: int = pool.spec.page_size
        self.extent_pages: int = pool.spec.extent_pages
        self.key_unit = key_unit
        self.num_frames: int = pool.stats().num_frames
        self.owned_frames = 0
        self._keys: dict[int, tuple[bytes, ...]] = {}
        self._stored: list[bytes] = []
        self._removed: list[bytes] = []

    @property
    def capacity_tokens(self) -> int:
        return self.num_frames * self.extent_pages * self.page_size

    @property
    def free_frames(self) -> int:
        return int(self.pool.stats().free_frames)

    def match(self, seq: Sequence) -> None:
        """Pins the longest cached prefix and gives it to ``seq``, which must hold nothing."""
        found = self.tree.match(seq.request.namespace, seq.token_ids[: seq.num_tokens])
        seq.hold(list(found.pages))
        seq.num_computed = found.num_tokens
        seq.num_published = seq.num_pages
        seq.computed_mark = max(seq.computed_mark, seq.num_computed)

    def grow(self, seq: Sequence, num_tokens: int, spare_frames: int = 0) -> bool:
        """Allocates frames until ``seq`` has room for ``num_tokens``, evicting as needed.

        ``spare_frames`` more must stay free. False, with nothing allocated, when there is no room.
        """
        missing = num_tokens - seq.capacity_tokens
        if missing <= 0:
            return True
        frames = -(-missing // (self.extent_pages * self.page_size))
        if not self._make_room(frames + spare_frames):
            return False
        seq.hold(self.pool.alloc(frames * self.extent_pages))
        seq.num_frames += frames
        self.owned_frames += frames
        return True

    def _make_room(self, frames: int) -> bool:
        if frames > self.num_frames - self.owned_frames:
            return False  # whatever is evicted, live sequences hold the rest
        while (free := self.free_frames) < frames:
            if not self.tree.evict((frames - free) * self.extent_pages):
                return False
            self._follow_tree({})
        return True

    def publish(self, seq: Sequence) -> None:
        """Makes the whole computed pages of ``seq`` findable."""
        whole = seq.num_computed // self.page_size
        if whole <= seq.num_published:
            return
        pages: list[int] = seq.pages[:whole].tolist()
        tokens = seq.token_ids[: whole * self.page_size]
        offered = self._page_keys(tuple(seq.request.keys), pages, seq.num_published)
        self.tree.insert(seq.request.namespace, tokens, pages)
        self._follow_tree(offered)
        seq.num_published = whole

    def _page_keys(
        self, keys: tuple[bytes, ...], pages: list[int], first: int
    ) -> dict[int, tuple[bytes, ...]]:
        """Per page from index ``first`` on, the keys of the units that end in it."""
        offered = {}
        for index in range(first, len(pages)):
            low = index * self.page_size // self.key_unit
            high = (index + 1) * self.page_size // self.key_unit
            if high > low and high <= len(keys):
                offered[pages[index]] = keys[low:high]
        return offered

    def release(self, seq: Sequence) -> None:
        """Gives back every page ``seq`` holds, exactly once; findable pages stay with the tree."""
        if seq.num_pages:
            self.pool.decref(seq.pages[: seq.num_pages].tolist())
        self.owned_frames -= seq.num_frames
        seq.num_pages = seq.num_frames = seq.num_computed = seq.num_published = 0

    def _follow_tree(self, offered: dict[int, tuple[bytes, ...]]) -> None:
        for kind, page in self.tree.drain_events():
            if kind == "stored":
                keys = offered.get(page, ())
                if keys:
                    self._keys[page] = keys
                    self._stored.extend(keys)
            else:
                self._removed.extend(self._keys.pop(page, ()))

    def drain_events(self) -> tuple[list[bytes], list[bytes]]:
        """Keys (stored, removed) since the last call."""
        stored, removed = self._stored, self._removed
        self._stored, self._removed = [], []
        return stored, removed

    def snapshot(self) -> list[bytes]:
        """Every announced key."""
        return [key for keys in self._keys.values() for key in keys]
