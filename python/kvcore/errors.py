"""Typed errors. Every failure of kvcore is a subclass of :class:`KvcoreError`.

The C++ core returns errors as values; its bindings raise the class named after the error's code.
"""


class KvcoreError(Exception):
    """Base of all kvcore errors."""


class InvalidArgument(KvcoreError, ValueError):
    """A value is outside the documented range; the message names field, value, allowed range."""


class OutOfPages(KvcoreError, MemoryError):
    """The pool has not enough free frames."""


class NotFound(KvcoreError, KeyError):
    """An unknown id or name."""

    __str__ = Exception.__str__


class Stale(KvcoreError):
    """An old generation or an expired grant."""


class Timeout(KvcoreError, TimeoutError):
    """A deadline passed."""


class Cancelled(KvcoreError):
    """Cancelled by this side or by the peer."""


class PeerDead(KvcoreError, ConnectionError):
    """The peer's process or connection is gone."""


class PeerHung(PeerDead):
    """The peer may be alive, but was silent for longer than the keep-alive."""


class TransportError(KvcoreError, ConnectionError):
    """The link refused or broke the operation."""


class Corrupt(KvcoreError):
    """A checksum, MAC or format check failed."""


class Unauthenticated(KvcoreError, PermissionError):
    """The peer did not prove the pre-shared key."""


class Unsupported(KvcoreError, NotImplementedError):
    """This build, machine or model cannot do it; the message says why."""


class IoError(KvcoreError, OSError):
    """The operating system refused a call."""


class InternalError(KvcoreError, RuntimeError):
    """A broken invariant of kvcore itself: please report it."""
