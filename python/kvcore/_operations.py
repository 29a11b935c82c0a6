"""What is under way on a link, and what comes of it; a part of :mod:`kvcore.transport`."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from kvcore import _core, errors

if TYPE_CHECKING:
    import numpy as np

    from kvcore.transport import Link

T = TypeVar("T")


@dataclass(frozen=True)
class Arrival:
    """A peer's write that has landed in one of our grants."""

    grant: bytes
    tag: int
    bytes: int
    at_ns: int
    """When its last byte was in place, CLOCK_MONOTONIC of this host."""


@dataclass(frozen=True)
class Returned:
    """The end of a lease, told to the lender."""

    grant: bytes
    lease: int
    error: errors.KvcoreError | None
    """None: given back, or the borrower is dead. Timeout: it expired. Cancelled: we were closed."""


class Borrowed:
    """Bytes of the peer's memory, to be read where they lie.

    ``spans``: one read-only memoryview per range; they stay mapped as long as they are referenced,
    also when the peer dies. What is read counts while :attr:`valid` is true *after* reading.
    """

    def __init__(self, link: Link, lease: int, expires_ns: int, spans: list[Any]) -> None:
        self._link = link
        self.lease = lease
        self.expires_ns = expires_ns
        """End of the lease on CLOCK_MONOTONIC, 0 = until it is given back."""
        self.spans = [memoryview(span) for span in spans]
        self._ours = True

    @property
    def valid(self) -> bool:
        """Whether the lender still leaves the bytes as they were."""
        return self._ours and (self.expires_ns == 0 or _core.transport.now_ns() < self.expires_ns)

    def arrays(self) -> list[np.ndarray[Any, Any]]:
        """The spans as read-only uint8 arrays, which export DLPack (1.0 or newer, read-only)."""
        import numpy as np

        return [np.frombuffer(span, np.uint8) for span in self.spans]

    def give_back(self) -> None:
        """Nothing of it is read any more. Idempotent."""
        if self._ours:
            self._ours = False
            self._link._core.give_back(self.lease)

    def __enter__(self) -> Borrowed:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back()


class Posted(Generic[T]):
    """An operation on its way. ``wait()`` or ``await`` gives its result, or raises.

    A wait that times out, or a task that is cancelled (``asyncio.wait_for``), does not end it:
    its local memory stays the link's until it is ``done``. ``deadline_s`` and :meth:`cancel` do.
    """

    def __init__(self, link: Link, op: int) -> None:
        self._link = link
        self.id = op
        self._result: tuple[errors.KvcoreError | None, T] | None = None

    @property
    def done(self) -> bool:
        """Whether it has ended; its local memory is free then."""
        self._link._transport._pump()
        return self._result is not None

    def cancel(self) -> None:
        """Give it up; it still ends, with Cancelled or with the result that was on its way."""
        self._link._core.cancel(self.id)

    def _outcome(self) -> T | None:
        if self._result is None:
            return None
        error, value = self._result
        if error is not None:
            raise error
        return value

    def wait(self, timeout_s: float | None = None) -> T:
        """Its result. Raises: the operation's error; Timeout when it has not ended in time."""
        return self._link._transport._wait(self, self._outcome, timeout_s, "operation")

    def __await__(self) -> Generator[Any, None, T]:
        wait = self._link._transport._wait_async(self, self._outcome, None, "operation")
        return wait.__await__()


class Op(Posted[int]):
    """A write, read or send on its way. ``wait()`` or ``await`` gives the bytes moved."""


class Borrow(Posted[Borrowed]):
    """A borrow on its way. ``wait()`` or ``await`` gives what was :class:`Borrowed`."""
