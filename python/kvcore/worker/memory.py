"""Pages of sequences: prefix match, growth with sealing and eviction, publishing, release.

Joins the pool (who owns what), the radix tree (who can find what) and the queue of pages to be
compressed. Not thread-safe: one engine owns it.
"""

from __future__ import annotations

from kvcore.compress import Sealer
from kvcore.pages import PageClass, Pool, page_ids_for
from kvcore.prefix import PrefixEvents, RadixTree
from kvcore.worker.request import Sequence


class PageMemory:
    """The pages of one engine's sequences.

    ``secret`` names what the tree holds by page keys, so that a router can be told; None does not.
    Sequences without a namespace share nothing. With a ``page_class``, full pages but a sequence's
    first are sealed into it once its prompt is computed; pages come and go one by one then, without
    it by frames.
    """

    def __init__(
        self, pool: Pool, secret: bytes | None = None, page_class: PageClass | None = None
    ) -> None:
        self.pool = pool
        self.tree = RadixTree(pool, secret)
        self.sealer = Sealer(pool, page_class) if page_class else None
        self.page_size: int = pool.spec.page_size
        self.unit_pages: int = 1 if page_class else pool.spec.extent_pages
        self.num_frames: int = pool.stats().num_frames
        # Of one sequence, none of its pages sealed: what is preempted must fit again.
        self.capacity_tokens: int = pool.free_pages(self.unit_pages) * self.page_size
        self.owned_pages = 0  # of live sequences, shared ones once for each
        if page_class:
            self.num_frames = page_ids_for(page_class, self.num_frames) // pool.spec.extent_pages

    @property
    def settled(self) -> bool:
        """No transfer holds pages that will come free by themselves."""
        return self.pool.stats().io_pages == 0

    def match(self, seq: Sequence) -> None:
        """Pins the longest cached prefix and gives it to ``seq``, which must hold nothing."""
        found = self.tree.match(seq.request.namespace or None, seq.token_ids[: seq.num_tokens])
        self._hold(seq, found.pages)
        seq.num_computed = found.num_tokens
        seq.num_published = seq.num_pages
        seq.computed_mark = max(seq.computed_mark, seq.num_computed)

    def _hold(self, seq: Sequence, pages: list[int]) -> None:
        seq.hold(pages)
        self.owned_pages += len(pages)

    def grow(self, seq: Sequence, num_tokens: int, spare_units: int = 0) -> bool:
        """Allocates pages until ``seq`` has room for ``num_tokens``; seals and evicts as needed.

        ``spare_units`` (of ``unit_pages``) more must stay free. False, with nothing allocated, when
        there is no room.
        """
        missing = num_tokens - seq.capacity_tokens
        if missing <= 0:
            return True
        units = -(-missing // (self.unit_pages * self.page_size))
        if not self._make_room((units + spare_units) * self.unit_pages, patient=spare_units > 0):
            return False
        self._hold(seq, self.pool.alloc(units * self.unit_pages, self.unit_pages))
        return True

    def _make_room(self, pages: int, patient: bool) -> bool:
        """``patient``: others decode, and may do so while the queue is sealed step by step."""
        hopeless = None
        while (short := pages - self.pool.free_pages(self.unit_pages)) > 0:
            if self.sealer and patient and self.sealer.under_way:
                return False
            if self.sealer and self.sealer.run(short):
                continue
            if hopeless is None:  # whatever is evicted, live sequences may hold the rest
                can_be_free = self.pool.stats().free_bytes + self.tree.freeable_bytes()
                hopeless = pages * self.pool.spec.page_bytes > can_be_free
            if hopeless or not self.tree.evict(short):
                return False
        return True

    def fill(self, seq: Sequence) -> None:
        """Queues the full pages of ``seq`` for sealing, its first one excepted."""
        whole = seq.num_computed // self.page_size
        if self.sealer and whole > seq.num_filled:
            self.sealer.add(seq.pages[max(seq.num_filled, 1) : whole].tolist())
            seq.num_filled = whole

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
        self.owned_pages -= seq.num_pages
        seq.num_pages = seq.num_computed = seq.num_published = seq.num_filled = 0

    def drain_events(self) -> PrefixEvents:
        """Keys stored and removed since the last call, or a snapshot marked ``lost``."""
        events = self.tree.drain_events()
        return self.snapshot() if events.lost else events

    def snapshot(self) -> PrefixEvents:
        """Every key the tree holds; what happened before is told by it."""
        self.tree.drain_events()
        return PrefixEvents(self.tree.keys(), [], True)
