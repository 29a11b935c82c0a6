"""Finding cached prefixes: :class:`RadixTree` on one node, :class:`ClusterIndex` in the router."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvcore import _core
from kvcore.pages import Pool

__all__ = ["ClusterIndex", "Match", "PrefixEvents", "RadixStats", "RadixTree"]

ClusterIndex = _core.prefix.ClusterIndex


class Match(NamedTuple):
    """What a look-up found.

    Attributes:
        pages: page ids in order; one owner ref of each now belongs to the caller, who gives it back
            with ``pool.decref(match.pages)``.
        num_tokens: ``len(pages) * page_size``.
        node: where the match ended, for ``lock`` and ``unlock``; None on a miss.
    """

    pages: list[int]
    num_tokens: int
    node: int | None


class RadixStats(NamedTuple):
    """Counters of a tree; ``evictable_pages + protected_pages == pages``."""

    nodes: int
    pages: int
    evictable_pages: int
    protected_pages: int
    hits: int
    misses: int
    hit_tokens: int
    evicted_pages: int


class PrefixEvents(NamedTuple):
    """Net change of the keys in a tree since the last drain (32 bytes each).

    Apply ``removed`` before ``stored``. ``lost`` means that more happened than was kept: send
    ``tree.keys()`` as a snapshot instead.
    """

    stored: list[bytes]
    removed: list[bytes]
    lost: bool


class RadixTree(_core.prefix.RadixTree):
    """The prefix index of one pool: ``RadixTree(pool, secret=None)``.

    With a ``secret`` (0 to 64 bytes) the tree names its pages by the keys of :mod:`kvcore.keys` and
    logs which appear and disappear; namespaces are then 32-byte ``Namespace.digest()`` values.
    A namespace of None (uncacheable) always misses and stores nothing.
    Not thread-safe beyond the GIL.
    """

    def __init__(self, pool: Pool, secret: bytes | None = None) -> None:
        super().__init__(pool, secret)

    def match(self, namespace: bytes | None, tokens: Any) -> Match:
        """Looks up and pins the longest cached prefix of whole pages.

        At most ``usable_prefix(n)`` tokens match, so at least one is left to compute.

        Args:
            namespace: see the class. tokens: int32 [n].

        Raises:
            InvalidArgument: tokens are not one-dimensional integers in 0 to 2**31 - 1.
        """
        if namespace is None:
            return Match([], 0, None)
        return Match(*self._match(namespace, tokens))

    def peek(self, namespace: bytes | None, tokens: Any) -> int:
        """The number of tokens :meth:`match` would give, without pins or any other effect."""
        return 0 if namespace is None else self._peek(namespace, tokens)

    def insert(self, namespace: bytes | None, tokens: Any, pages: Sequence[int]) -> int:
        """Adds the whole pages of ``tokens`` that are not cached yet.

        Args:
            tokens: int32 [n]. pages: at least ``n // page_size`` page ids held by the caller, whose
                refs stay as they are. Where a prefix is cached already its pages stay.

        Returns:
            Pages newly adopted; the tree took a ref on each and sealed it.

        Raises:
            InvalidArgument: too few pages, a page that is free or holds another prefix already.
        """
        return 0 if namespace is None else self._insert(namespace, tokens, pages)

    def stats(self) -> RadixStats:
        """The counters now."""
        return RadixStats(*self._stats())

    def drain_events(self) -> PrefixEvents:
        """Takes the key changes since the last call; empty without a secret."""
        return PrefixEvents(*self._drain_events())
