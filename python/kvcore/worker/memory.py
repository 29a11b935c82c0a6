"""Pages of sequences: prefix match, growth by frames with eviction, publishing, release.

Joins the pool (who owns what) and the radix tree (who can find what). Not thread-safe: one engine
owns it.
"""

from __future__ import annotations

from kvcore.pages import Pool
from kvcore.prefix import PrefixEvents, RadixTree
from kvcore.worker.request import Sequence


class PageMemory:
    """The pages of one engine's sequences.

    ``secret`` names what the tree holds by page keys, so that a router can be told; None does not.
    Sequences without a namespace share nothing.
    """

    def __init__(self, pool: Pool, secret: bytes | None = None) -> None:
        self.pool = pool
        self.tree = RadixTree(pool, secret)
        self.page_size: int = pool.spec.page_size
        self.extent_pages: int = pool.spec.extent_pages
        self.num_frames: int = pool.stats().num_frames
        self.owned_frames = 0

    @property
    def capacity_tokens(self) -> int:
        return self.num_frames * self.extent_pages * self.page_size

    @property
    def settled(self) -> bool:
        """No transfer holds pages that will come free by themselves."""
        return self.pool.stats().io_pages == 0

    def match(self, seq: Sequence) -> None:
        """Pins the longest cached prefix and gives it to ``seq``, which must hold nothing."""
        found = self.tree.match(seq.request.namespace or None, seq.token_ids[: seq.num_tokens])
        seq.hold(found.pages)
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
        while (free := self.pool.stats().free_frames) < frames:
            if not self.tree.evict((frames - free) * self.extent_pages):
                return False
        return True

    def publish(self, seq: Sequence) -> None:
        """Makes the whole computed pages of ``seq`` findable."""
        whole = seq.num_computed // self.page_size
        if whole > seq.num_published:
            tokens = seq.token_ids[: whole * self.page_size]
            self.tree.insert(seq.request.namespace or None, tokens, seq.pages[:whole].tolist())
            seq.num_published = whole

    def release(self, seq: Sequence) -> None:
        """Gives back every page ``seq`` holds, exactly once; findable pages stay with the tree."""
        if seq.num_pages:
            self.pool.decref(seq.pages[: seq.num_pages].tolist())
        self.owned_frames -= seq.num_frames
        seq.num_pages = seq.num_frames = seq.num_computed = seq.num_published = 0

    def drain_events(self) -> PrefixEvents:
        """Keys stored and removed since the last call, or a snapshot marked ``lost``."""
        events = self.tree.drain_events()
        return self.snapshot() if events.lost else events

    def snapshot(self) -> PrefixEvents:
        """Every key the tree holds; what happened before is told by it."""
        self.tree.drain_events()
        return PrefixEvents(self.tree.keys(), [], True)
