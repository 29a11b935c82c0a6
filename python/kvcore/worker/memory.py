"""Pages of sequences: prefix match, growth with sealing and eviction, publishing, release.

Joins the pool (who owns what), the radix tree (who can find what) and the queue of pages to be
compressed. Not thread-safe: one engine owns it.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvcore.compress import Sealer, Statistics
from kvcore.pages import PageClass, Pool, page_ids_for
from kvcore.prefix import PrefixEvents, RadixTree
from kvcore.worker.request import Sequence


class PageMemory:
    """The pages of one engine's sequences.

    ``secret`` names what the tree holds by page keys, so that a router can be told; None does not.
    Sequences without a namespace share nothing. ``classes`` (``compress.profile_classes``) are the
    profiles offered besides exact, the worker's own last: full pages but a sequence's first are
    sealed into its profile's class once its prompt is computed, or before where memory is short.
    Pages come and go one by one then, without classes by frames. ``statistics`` (from there too):
    later sequences get other classes where pages drift, of at most the same bytes.
    """

    def __init__(
        self,
        pool: Pool,
        secret: bytes | None = None,
        classes: Mapping[str, PageClass] | None = None,
        statistics: Statistics | None = None,
    ) -> None:
        self.pool = pool
        self.tree = RadixTree(pool, secret)
        self.classes = classes or {}
        self.sealer = Sealer(pool, *classes.values(), statistics=statistics) if classes else None
        self.page_size: int = pool.spec.page_size
        self.unit_pages: int = 1 if classes else pool.spec.extent_pages
        self.num_frames: int = pool.stats().num_frames
        # A page is sealed into other bytes than its own: some of an open page's size stay free, or
        # a full pool could not be made smaller.
        self._reserve = 1 if classes else 0
        # Of one sequence, none of its pages sealed.
        self.capacity_tokens = self.free_tokens
        self.owned_pages = 0  # of live sequences, shared ones once for each
        if self.sealer:
            own = self.pool.page_class(self.sealer.class_number)
            self.num_frames = page_ids_for(own, self.num_frames) // pool.spec.extent_pages

    @property
    def profile(self) -> str:
        """The worker's own."""
        return ["exact", *self.classes][-1]

    @property
    def page_class(self) -> PageClass | None:
        """What new sequences of the worker's own profile get; None: their pages stay open."""
        return self.sealer.classes[-1] if self.sealer else None

    @property
    def kv_table(self) -> str:
        """Its digest, or ""; from any thread."""
        return self.page_class.digest.hex() if self.page_class else ""

    @property
    def settled(self) -> bool:
        """No transfer holds pages that will come free by themselves."""
        return self.pool.stats().io_pages == 0

    def table(self, profile: str) -> int:
        """The sealer's table that a new sequence of ``profile`` gets and keeps."""
        tables = self.sealer.tables if self.sealer else [0]
        return dict(zip(("exact", *self.classes), tables, strict=True)).get(profile, tables[-1])

    def capacity(self, profile: str = "") -> int:
        """Tokens of the longest sequence of a profile, alone: what is preempted must fit again."""
        stats = self.pool.stats()
        pages = self._pages_in(stats.num_frames * self.pool.spec.frame_bytes, profile)
        return max(self.capacity_tokens, pages * self.page_size)

    def _pages_in(self, num_bytes: int, profile: str) -> int:
        """Pages of one sequence, all but the first and the last sealed."""
        if profile == "exact" or not self.classes:
            return 0
        # Pages of unlike sizes leave holes: less than an open page's bytes in all, by test.
        ends = (3 + self._reserve) * PageClass.open(self.pool.spec).run_bytes(1)
        page_class = self.classes.get(profile, self.classes[self.profile])
        return 2 + (num_bytes - ends) // page_class.run_bytes(1)

    @property
    def free_tokens(self) -> int:
        """Room in open pages that could be allocated now."""
        return max(0, self.pool.free_pages(self.unit_pages) - self._reserve) * self.page_size

    def fits_sealed(self, seq: Sequence, alone: bool) -> bool:
        """Whether the rest of ``seq`` finds room if its pages are sealed as they are computed."""
        # Holes smaller than an open page are left out: they may be too small for any.
        free = self.pool.free_pages(1) * PageClass.open(self.pool.spec).run_bytes(1)
        pages = self._pages_in(free + self.tree.freeable_bytes(), seq.request.kv_profile)
        missing = seq.num_tokens - seq.capacity_tokens
        return pages > 0 and (alone or missing <= pages * self.page_size)

    def match(self, seq: Sequence) -> None:
        """Pins the longest cached prefix that is faithful enough and gives it to ``seq``, which
        must hold nothing."""
        found = self.tree.match(seq.request.namespace or None, seq.token_ids[: seq.num_tokens])
        pages = found.pages
        if self.sealer:
            kept = self.sealer.faithful(pages, seq.kv_table)
            self.pool.decref(pages[kept:])
            pages = pages[:kept]
        self._hold(seq, pages)
        seq.num_computed = seq.capacity_tokens
        seq.num_published = seq.num_pages
        seq.computed_mark = max(seq.computed_mark, seq.num_computed)

    def _hold(self, seq: Sequence, pages: list[int]) -> None:
        seq.hold(pages)
        self.owned_pages += len(pages)
        if self.sealer:
            self.sealer.hold(pages, seq.kv_table)

    def grow(self, seq: Sequence, num_tokens: int, spare_units: int = 0) -> bool:
        """Allocates pages until ``seq`` has room for ``num_tokens``; seals and evicts as needed.

        ``spare_units`` (of ``unit_pages``) more must stay free. False, with nothing allocated, when
        there is no room.
        """
        missing = num_tokens - seq.capacity_tokens
        if missing <= 0:
            return True
        units = -(-missing // (self.unit_pages * self.page_size))
        wanted = (units + max(spare_units, self._reserve)) * self.unit_pages
        if not self._make_room(wanted, patient=spare_units > 0):
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

    def fill(self, seq: Sequence) -> bool:
        """Queues the full pages of ``seq`` for sealing, its first one excepted; whether any was."""
        whole = seq.num_computed // self.page_size
        if not (self.sealer and seq.kv_table and whole > seq.num_filled):
            return False
        fresh = seq.pages[max(seq.num_filled, 1) : whole].tolist()
        seq.num_filled = whole
        return self.sealer.add(fresh, seq.kv_table, high_first=True) > 0

    def publish(self, seq: Sequence) -> None:
        """Makes the whole computed pages of ``seq`` findable."""
        whole = seq.num_computed // self.page_size
        if whole > seq.num_published:
            tokens, pages = seq.token_ids[: whole * self.page_size], seq.pages[:whole].tolist()
            if self.sealer and seq.kv_table:
                self.sealer.computed(pages)
            self.tree.insert(seq.request.namespace or None, tokens, pages)
            seq.num_published = whole

    def release(self, seq: Sequence) -> None:
        """Gives back every page ``seq`` holds, exactly once; findable pages stay with the tree."""
        pages = seq.pages[: seq.num_pages].tolist()
        if self.sealer:
            self.sealer.drop(pages, seq.kv_table)
        self.pool.decref(pages)
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
