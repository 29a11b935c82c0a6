from collections.abc import Iterable, Sequence
from typing import Any

from kvcore._core.pages import Pool

class RadixTree:
    def __init__(self, pool: Pool, secret: bytes | None = None) -> None: ...
    def _match(self, namespace: bytes, tokens: Any) -> tuple[list[int], int, int | None]: ...
    def _peek(self, namespace: bytes, tokens: Any) -> int: ...
    def _insert(self, namespace: bytes, tokens: Any, pages: Sequence[int]) -> int: ...
    def lock(self, node: int) -> None:
        """Keeps a node of :attr:`Match.node` and its ancestors from eviction, until :meth:`unlock`.

        Raises NotFound for no such node.
        """
    def unlock(self, node: int) -> None:
        """Ends one :meth:`lock`. Raises NotFound (no such node), InvalidArgument (not locked)."""
    def evict(self, num_pages: int) -> list[int]:
        """Drops the tree's refs of at least ``num_pages`` pages, or of all it may; their ids.

        Least recently used leaves first, from their ends and by whole units of the pool. Locked
        nodes stay, and leaves whose last unit somebody else holds: dropping those frees nothing.
        """
    def freeable_bytes(self) -> int:
        """Bytes that :meth:`evict` could free at most, were nothing locked."""
    def clear(self) -> int:
        """Drops everything that is not locked, held elsewhere or not; the number of pages."""
    def _stats(self) -> tuple[int, int, int, int, int, int, int, int]: ...
    def _drain_events(self) -> tuple[list[bytes], list[bytes], bool]: ...
    def keys(self) -> list[bytes]:
        """The 32-byte keys of all its pages, for a snapshot; empty without a secret."""

class ClusterIndex:
    """Which worker holds which page keys, as the router knows it.

    Rebuilt from the workers' events; a wrong entry costs a recompute, never a wrong answer.
    """

    def __init__(self) -> None: ...
    def apply(
        self,
        worker_id: bytes,
        incarnation: int,
        seq: int,
        stored: Iterable[bytes],
        removed: Iterable[bytes],
    ) -> str:
        """Takes one event of a worker: pages that appeared and disappeared, as 32-byte keys.

        Args:
            worker_id: any bytes.
            incarnation: one life of the worker's process. seq: counts its events from 0.

        Returns:
            "ok"; "stale": repeated or of an earlier life, dropped; "resync": something is missing,
            the worker is emptied and shall send a snapshot.

        Raises:
            InvalidArgument: a key that has not 32 bytes.
        """
    def apply_snapshot(
        self, worker_id: bytes, incarnation: int, seq: int, keys: Iterable[bytes]
    ) -> str:
        """Replaces all entries of a worker; its next event has ``seq + 1``. As :meth:`apply`."""
    def drop(self, worker_id: bytes) -> bool:
        """Forgets a worker. False if it was unknown."""
    def query(self, keys: Iterable[bytes]) -> dict[bytes, int]:
        """For each worker that holds ``keys[0]``: how many leading keys it holds without a gap.

        Raises InvalidArgument for a key that has not 32 bytes.
        """
    @property
    def num_workers(self) -> int:
        """Workers known."""
    @property
    def num_keys(self) -> int:
        """Keys that some worker holds."""
