"""Pool + radix tree under random requests, against a dict from (namespace, prefix) to page."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kvcore.errors import OutOfPages
from kvcore.keys import KeyChain, Namespace
from kvcore.prefix import RadixTree
from pool_model import PAGE, expand, make_pool, shows_stamp, write_stamp

SECRET = b"secret"
NAMESPACES = [Namespace(s, "m", "", "", "", "", "", "") for s in ("a", "b")]
DIGESTS = [bytes(n.digest() or b"") for n in NAMESPACES]

# Words of one page each; the last entry may be a part of a page (see expand).
prompts = st.tuples(st.lists(st.integers(0, 1), max_size=5), st.sampled_from([0, -1, -15])).map(
    lambda t: expand([*t[0], *([t[1]] if t[1] else [])])
)


def prefix_id(ns: int, tokens: np.ndarray, pages: int) -> tuple[int, bytes]:
    return ns, tokens[: pages * PAGE].tobytes()


class RadixMachine(RuleBasedStateMachine):
    """Subclasses in test_mutants.py replace `make_tree` by a broken one and must be caught."""

    frames = 8

    def make_tree(self, pool: Any) -> Any:
        return RadixTree(pool, SECRET)

    @initialize(extent=st.sampled_from([1, 2, 4]))
    def start(self, extent: int) -> None:
        self.extent = extent
        self.pool = make_pool(self.frames * 2 // extent, extent)
        self.tree = self.make_tree(self.pool)
        self.live: list[tuple[int, np.ndarray, list[int]]] = []  # ns, tokens, page refs held
        self.locks: list[int] = []
        self.cached: dict[
            tuple[int, bytes], int
        ] = {}  # (ns, prefix) -> page, as the tree should be
        self.router_keys: set[bytes] = set()

    def longest(self, ns: int, tokens: np.ndarray) -> int:
        n = 0
        while (n + 1) * PAGE <= len(tokens) and prefix_id(ns, tokens, n + 1) in self.cached:
            n += 1
        return n

    def forget(self, pages: list[int]) -> None:
        gone = set(pages)
        before = len(self.cached)
        self.cached = {k: p for k, p in self.cached.items() if p not in gone}
        assert before - len(self.cached) == len(pages) == len(gone), "evicted what was not cached"

    @rule(ns=st.integers(0, 1), tokens=prompts)
    def admit(self, ns: int, tokens: np.ndarray) -> None:
        peeked = self.tree.peek(DIGESTS[ns], tokens)
        match = self.tree.match(DIGESTS[ns], tokens)
        usable = min(self.longest(ns, tokens), max(len(tokens) - 1, 0) // PAGE)
        assert match.num_tokens == peeked == usable * PAGE == len(match.pages) * PAGE
        assert (match.node is None) == (usable == 0)
        for i, page in enumerate(match.pages):
            assert shows_stamp(self.pool, page, DIGESTS[ns], tokens[: (i + 1) * PAGE]), "wrong KV"
        need = -(-len(tokens) // PAGE) - usable
        try:
            fresh = self.pool.alloc(need)
        except OutOfPages:
            self.forget(self.tree.evict(need))
            try:
                fresh = self.pool.alloc(need)
            except OutOfPages:
                self.pool.decref(match.pages)
                return
        pages = match.pages + fresh
        for i in range(usable, len(tokens) // PAGE):
            write_stamp(self.pool, pages[i], DIGESTS[ns], tokens[: (i + 1) * PAGE])
        self.live.append((ns, tokens, pages))

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 99), keep=st.booleans(), lock=st.booleans())
    def finish(self, which: int, keep: bool, lock: bool) -> None:
        """Ends a request, with or without giving its pages to the tree."""
        ns, tokens, pages = self.live.pop(which % len(self.live))
        if keep:
            whole, known = len(tokens) // PAGE, self.longest(ns, tokens)
            adopted = self.tree.insert(DIGESTS[ns], tokens, pages)
            assert adopted == whole - known
            for i in range(known, whole):
                self.cached[prefix_id(ns, tokens, i + 1)] = pages[i]
        match = self.tree.match(DIGESTS[ns], tokens)
        if lock and match.node is not None:
            self.tree.lock(match.node)
            self.locks.append(match.node)
        self.pool.decref(pages + match.pages)

    @precondition(lambda self: self.locks)
    @rule(which=st.integers(0, 99))
    def unlock(self, which: int) -> None:
        self.tree.unlock(self.locks.pop(which % len(self.locks)))

    @rule(n=st.integers(0, 6))
    def evict(self, n: int) -> None:
        held = {p for _, _, pages in self.live for p in pages}
        free_before = self.pool.stats().free_frames
        evicted = self.tree.evict(n)
        assert not held & set(evicted), "evicted a page in use"
        if len(evicted) < n and not self.locks and not held:
            assert self.tree.stats().pages == 0, "something evictable was left"
        if self.extent == 1:
            assert len(evicted) <= n
            assert self.pool.stats().free_frames == free_before + len(evicted)
        self.forget(evicted)

    @precondition(lambda self: not self.locks)
    @rule()
    def clear(self) -> None:
        assert self.tree.clear() == len(self.cached)
        self.cached.clear()

    @rule()
    def tell_router(self) -> None:
        events = self.tree.drain_events()
        assert not events.lost and not set(events.stored) & set(events.removed)
        assert set(events.removed) <= self.router_keys
        assert not set(events.stored) & self.router_keys
        self.router_keys = (self.router_keys - set(events.removed)) | set(events.stored)
        want = set()
        for ns, prefix in self.cached:
            chain = KeyChain(SECRET, NAMESPACES[ns], PAGE)
            want.add(chain.extend(np.frombuffer(prefix, np.int32))[-1])
        assert self.router_keys == want == set(self.tree.keys())

    @invariant()
    def accounts_agree(self) -> None:
        stats = self.tree.stats()
        assert stats.pages == len(self.cached) == stats.evictable_pages + stats.protected_pages
        assert (stats.protected_pages > 0) == bool(self.locks)
        refs: dict[int, int] = dict.fromkeys(self.cached.values(), 1)
        assert len(refs) == len(self.cached), "one page under two prefixes"
        for _, _, pages in self.live:
            for page in pages:
                refs[page] = refs.get(page, 0) + 1
        for page in range(self.pool.num_pages):
            assert self.pool.refs(page) == (refs.get(page, 0), 0), "leak or double free"
        for ns, tokens, pages in self.live:
            for i in range(len(tokens) // PAGE):
                assert shows_stamp(self.pool, pages[i], DIGESTS[ns], tokens[: (i + 1) * PAGE])
