"""Links that move registered bytes between processes: messages, one-sided writes and reads.

Addresses are ``tcp:HOST:PORT`` (port 0 picks one, ``[::]`` is IPv6 alone) and ``shm:/path.sock``
(same host and user). The owner of memory grants ranges of a region; a peer that holds the token
writes into them or reads from them. All has a synchronous and, with ``_async``, an asyncio form.

    with Transport() as t:
        link = t.connect("tcp:127.0.0.1:7000")
        region = t.allocate(1 << 20)                     # region.data is a writable memoryview
        link.write(region, [(0, 4096, 1000)], token, tag=7).wait()

All links of a transport share its background thread in C++; waiting does not hold the GIL. Objects
may be used from several threads. The contract of order, memory and failure is that of
``csrc/transport/link.h``: a local buffer may be changed again once its operation has ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from kvcore import _core, errors
from kvcore._arguments import address_of, check_bytes, deadline_of, numbers_in, rows_of, seconds
from kvcore._operations import Arrival, Borrow, Borrowed, Op, Posted, Returned
from kvcore._waiting import Waiters
from kvcore.errors import InvalidArgument

__all__ = [
    "BACKGROUND",
    "PREFETCH",
    "STREAM",
    "Arrival",
    "Borrow",
    "Borrowed",
    "Grant",
    "Link",
    "Op",
    "Region",
    "Returned",
    "Transport",
]

STREAM, PREFETCH, BACKGROUND = 0, 1, 2
"""Priority classes, highest first."""

_RIGHTS = {"r": 1, "w": 2, "rw": 3}
_F_ADD_SEALS, _SEALS = 1033, 2 | 4 | 16  # SHRINK, GROW, FUTURE_WRITE: our mapping stays writable

_SEGMENT = "(local offset, remote offset, bytes)"

T = TypeVar("T")
P = TypeVar("P", bound=Posted[Any])
Segments = Iterable[tuple[int, int, int]] | Any  # or an int64 array [n, 3]


def _error(outcome: tuple[str | None, str]) -> errors.KvcoreError | None:
    code, message = outcome
    if code is None:
        return None
    cls: type[errors.KvcoreError] = getattr(errors, code)
    return cls(message)


class Grant:
    """A right of peers on ranges of a region. ``token`` (16 bytes) is what the peer needs."""

    def __init__(self, transport: Transport, token: bytes) -> None:
        self._transport = transport
        self.token = token
        self._returned: deque[Returned] = deque()
        transport._grants[token] = self

    def revoke(self, timeout_s: float | None = None) -> None:
        """End it. When this returns no byte lands in the ranges any more. Idempotent.

        Waits while ranges of it are lent: give it an expiry where borrowers are not trusted to give
        back. Raises: Timeout; then the ranges are still lent, and must be left alone.
        """
        transport = self._transport
        if transport._live().revoke_grant(self.token):
            transport._fences.add(self.token)
        if self.token in transport._fences:
            ready = lambda: transport._take_fenced(self.token)  # noqa: E731
            transport._wait(transport._fences, ready, timeout_s, "fence")

    def returned(self, timeout_s: float | None = None) -> Returned:
        """The next lease of it that has ended. Raises: Timeout."""
        return self._transport._wait(self, self._next_returned, timeout_s, "lease")

    async def returned_async(self, timeout_s: float | None = None) -> Returned:
        """:meth:`returned` for asyncio."""
        return await self._transport._wait_async(self, self._next_returned, timeout_s, "lease")

    def _next_returned(self) -> Returned | None:
        return self._returned.popleft() if self._returned else None

    def __enter__(self) -> Grant:
        return self

    def __exit__(self, *_: object) -> None:
        self.revoke()


class Region:
    """Registered memory. ``data`` is a writable memoryview of bytes (None for bare addresses).

    The transport keeps the memory until :meth:`unregister`, even when the Region is dropped.
    """

    def __init__(
        self,
        transport: Transport,
        address: int,
        nbytes: int,
        fd: int,
        data: Any,
        owner: Any,
        capsule: Any = None,
    ) -> None:
        self._transport = transport
        self._owner = owner
        self.nbytes = nbytes
        self.data = data
        self.id: int = transport._live().register_region(address, nbytes, fd)
        # The capsule holds the memory when the tensor is given other memory.
        transport._memory[self.id] = (owner, capsule)

    def grant(
        self,
        ranges: Sequence[tuple[int, int]] | None = None,
        rights: str = "w",
        expires_s: float | None = None,
        peer: bytes = b"",
    ) -> Grant:
        """Let peers use (offset, bytes) ranges of this region, by default all of it.

        Args: rights: "r", "w" or "rw". expires_s: seconds from now. peer: the identity that alone
        may use it, empty = any peer that has the token.
        Raises: InvalidArgument (empty, overlapping or outside ranges).
        """
        if rights not in _RIGHTS:
            raise InvalidArgument(f"rights={rights!r} must be one of 'r', 'w', 'rw'")
        whole = [(0, self.nbytes)] if ranges is None else list(ranges)
        args = (_RIGHTS[rights], deadline_of("expires_s", expires_s), peer)
        with numbers_in("ranges", "(offset, bytes)", whole):
            token = self._transport._live().create_grant(self.id, whole, *args)
        return Grant(self._transport, token)

    def __dlpack__(self, **options: Any) -> Any:
        """The memory for another library, not copied: its bytes (uint8), or the tensor it is.

        ``torch.from_dlpack(region)`` keeps the memory alive, not the registration.
        """
        import numpy as np

        if self._owner is None:
            raise InvalidArgument("the region is unregistered: it has no memory to lend")
        source = self._owner if self.data is None else np.frombuffer(self.data, np.uint8)
        return source.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        """CPU memory."""
        return 1, 0

    def unregister(self) -> None:
        """Revoke its grants and forget it. Raises: InvalidArgument while operations use it."""
        self._transport._live().unregister_region(self.id)
        self._transport._memory.pop(self.id, None)
        self._owner = self.data = None


class Link:
    """One peer. Made by :meth:`Transport.connect` and :meth:`Transport.accept`."""

    def __init__(self, transport: Transport, core: _core.transport.Link) -> None:
        self._transport = transport
        self._core = core
        self.id: int = core.id
        self._ops: dict[int, Posted[Any]] = {}
        self._messages: deque[bytes] = deque()
        self._arrivals: deque[Arrival | errors.KvcoreError] = deque()
        self._up = False
        self._down: tuple[errors.KvcoreError | None] | None = None

    def send(
        self,
        message: bytes | bytearray | memoryview,
        priority: int = STREAM,
        *,
        deadline_s: float | None = None,
        completion: bool = False,
    ) -> Op | None:
        """Send a message of at most 1 MiB.

        Args: completion: return an Op that ends when the peer has the message in its queue.
        deadline_s: seconds from now, then that Op ends with Timeout (implies completion).
        Raises: InvalidArgument, PeerDead; TransportError when the peer does not keep up.
        """
        completion = completion or deadline_s is not None
        deadline = deadline_of("deadline_s", deadline_s)
        with self._transport._usable():
            number = self._core.send(message, priority, deadline, completion)
            return self._track(Op(self, number)) if completion else None

    def write(
        self,
        region: Region,
        segments: Segments,
        grant: bytes,
        *,
        tag: int = 0,
        deadline_s: float | None = None,
        priority: int = STREAM,
        checksum: bool = True,
        notify: bool = True,
    ) -> Op:
        """Write bytes of our region into the peer's granted ranges.

        Args: segments: (local offset, remote offset, bytes) each, or an int64 array [n, 3] of them.
        grant: the token. tag: uint64 told to the peer on arrival. deadline_s: then Timeout.
        priority: lower classes wait for higher ones. checksum: tcp verifies each piece on arrival.
        notify: False = the owner gets no arrival, and need not take it: arrivals that nobody takes
        hold the link's credits, and stall it in the end.
        Raises: InvalidArgument, PeerDead; what goes wrong later is raised by the operation.
        """
        if not (isinstance(tag, int) and 0 <= tag < 1 << 64):
            raise InvalidArgument(f"tag={tag!r} must be an integer in 0 to 2**64 - 1")
        args = (grant, tag, deadline_of("deadline_s", deadline_s), priority, checksum, notify)
        table = rows_of(segments)
        with self._transport._usable(region), numbers_in("segments", _SEGMENT, table):
            return self._track(Op(self, self._core.write(region.id, table, *args)))

    def read(
        self,
        region: Region,
        segments: Segments,
        grant: bytes,
        *,
        deadline_s: float | None = None,
        priority: int = STREAM,
    ) -> Op:
        """Read the peer's granted bytes into our region; arguments as :meth:`write`."""
        args = (grant, deadline_of("deadline_s", deadline_s), priority)
        table = rows_of(segments)
        with self._transport._usable(region), numbers_in("segments", _SEGMENT, table):
            return self._track(Op(self, self._core.read(region.id, table, *args)))

    def borrow(
        self,
        grant: bytes,
        ranges: Iterable[tuple[int, int]],
        *,
        deadline_s: float | None = None,
    ) -> Borrow:
        """Read (offset, bytes) ranges of the peer's region where they lie: shm, nothing is copied.

        Args: grant: its token, with the right "r". deadline_s: seconds from now until the peer must
        have answered. Raises: InvalidArgument, PeerDead, Unsupported (tcp, rdma); what goes wrong
        later is raised by the operation.
        """
        wanted, deadline = list(ranges), deadline_of("deadline_s", deadline_s)
        with self._transport._usable(), numbers_in("ranges", "(offset, bytes)", wanted):
            return self._track(Borrow(self, self._core.borrow(grant, wanted, deadline)))

    def _track(self, op: P) -> P:
        self._ops[op.id] = op
        return op

    def _next(self, queue: deque[T]) -> T | None:
        if queue:
            return queue.popleft()
        if self._down is not None:
            raise self._down[0] or errors.PeerDead("the peer closed the link")
        return None

    def _next_message(self) -> bytes | None:
        return self._next(self._messages)

    def _next_arrival(self) -> Arrival | None:
        item = self._next(self._arrivals)
        if isinstance(item, errors.KvcoreError):
            raise item
        return item

    def _is_up(self) -> bool | None:
        self._next(deque[bytes]())  # raises when it is down
        return True if self._up else None

    def recv(self, timeout_s: float | None = None) -> bytes:
        """The next message. Raises: Timeout; PeerDead and its like once the link is down."""
        return self._transport._wait(self, self._next_message, timeout_s, "message")

    async def recv_async(self, timeout_s: float | None = None) -> bytes:
        """:meth:`recv` for asyncio."""
        return await self._transport._wait_async(self, self._next_message, timeout_s, "message")

    def arrival(self, timeout_s: float | None = None) -> Arrival:
        """The next write of the peer that landed. Raises: as :meth:`recv`; Corrupt (checksum)."""
        return self._transport._wait(self, self._next_arrival, timeout_s, "arrival")

    async def arrival_async(self, timeout_s: float | None = None) -> Arrival:
        """:meth:`arrival` for asyncio."""
        return await self._transport._wait_async(self, self._next_arrival, timeout_s, "arrival")

    def wait_up(self, timeout_s: float | None = None) -> None:
        """Wait for the handshake. Raises: Unauthenticated, PeerDead, Timeout."""
        self._transport._wait(self, self._is_up, timeout_s, "handshake")

    async def wait_up_async(self, timeout_s: float | None = None) -> None:
        """:meth:`wait_up` for asyncio."""
        await self._transport._wait_async(self, self._is_up, timeout_s, "handshake")

    def set_pacing(self, bytes_per_s: int) -> None:
        """Limit the payload rate of this side; 0 = unlimited."""
        self._core.set_pacing(bytes_per_s)

    def info(self) -> dict[str, Any]:
        """Scheme, peer (address, identity, role, digests, pid), state and byte counts."""
        return self._core.info()

    def close(self) -> None:
        """End the link: operations end with Cancelled. Idempotent."""
        self._core.close()


class Transport:
    """Regions, grants, listeners and links of this process, with one background thread.

    Args: key: 32 bytes that all peers share; may be empty for loopback addresses and shm.
    identity, role: at most 256 and 32 bytes told to peers. model_digest, layout_digest: 32 bytes or
    none, told to peers too; links between different models go down with Unsupported. keepalive_s:
    a peer silent this long is PeerHung (0 = never). pacing_bytes_per_s: first rate of each link.
    credit_bytes_per_link, credit_bytes: what one peer, and all of them in equal shares, may have
    under way towards here: payload that has not landed, messages and arrivals not polled.
    """

    def __init__(
        self,
        *,
        key: bytes = b"",
        identity: bytes = b"",
        role: str = "",
        model_digest: bytes = b"",
        layout_digest: bytes = b"",
        handshake_s: float = 2.0,
        keepalive_s: float = 2.0,
        pacing_bytes_per_s: int = 0,
        credit_bytes_per_link: int = 8 << 20,
        credit_bytes: int = 64 << 20,
    ) -> None:
        check_bytes(
            key=key, identity=identity, model_digest=model_digest, layout_digest=layout_digest
        )
        if not (seconds("handshake_s", handshake_s) or 0) > 0:
            raise InvalidArgument(f"handshake_s={handshake_s!r} must be positive")
        if (seconds("keepalive_s", keepalive_s) or 0) < 0:
            raise InvalidArgument(f"keepalive_s={keepalive_s!r} must be at least 0")
        self._core = _core.transport.Transport(
            key,
            identity,
            role,
            model_digest,
            layout_digest,
            handshake_s,
            keepalive_s,
            pacing_bytes_per_s,
            credit_bytes_per_link,
            credit_bytes,
        )
        self._pid = os.getpid()
        self._closed = False
        self._fences: set[bytes] = set()  # that are waited for
        self._fenced: set[bytes] = set()
        self._grants: weakref.WeakValueDictionary[bytes, Grant] = weakref.WeakValueDictionary()
        # Peers reach registered memory whether or not its Region is still referenced here.
        self._memory: dict[int, Any] = {}
        self._lock = threading.RLock()
        self._links: dict[int, Link] = {}
        self._accepted: deque[Link] = deque()
        self._waiters = Waiters(self._core.event_fd, self._lock, self._pump_locked)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise InvalidArgument(
                f"transport: made by process {self._pid}, this is its child {os.getpid()}, which "
                "needs one of its own"
            )

    def _live(self) -> _core.transport.Transport:
        """The core, where it can be used. Raises: InvalidArgument."""
        self._check_process()
        if self._closed:
            raise InvalidArgument("transport: it is closed")
        return self._core

    @contextlib.contextmanager
    def _usable(self, region: Region | None = None) -> Iterator[None]:
        """For one call that posts on a link: its arguments are ours, and events wait meanwhile."""
        self._check_process()
        if region is not None and getattr(region, "_transport", None) is not self:
            raise InvalidArgument(
                f"region is {region!r}: a Region that this link's own transport registered is "
                "needed"
            )
        with self._lock:
            yield

    def listen(self, address: str) -> str:
        """Listen; returns the address with the port filled in. Raises: InvalidArgument."""
        bound: str = self._live().listen(address)
        return bound

    def connect(self, address: str) -> Link:
        """A link to post on at once; :meth:`Link.wait_up` tells whether the peer is there."""
        with self._lock:
            core = self._live().connect(address)
            link = self._links[core.id] = Link(self, core)
            return link

    def accept(self, timeout_s: float | None = None) -> Link:
        """The next peer that connected and proved the key. Raises: Timeout; Cancelled (closed)."""
        return self._wait(self, self._next_accepted, timeout_s, "connection")

    async def accept_async(self, timeout_s: float | None = None) -> Link:
        """:meth:`accept` for asyncio."""
        return await self._wait_async(self, self._next_accepted, timeout_s, "connection")

    def _next_accepted(self) -> Link | None:
        if self._closed:
            raise errors.Cancelled("the transport is closed")
        return self._accepted.popleft() if self._accepted else None

    def allocate(self, nbytes: int) -> Region:
        """New shared memory that every kind of link can use; ``region.data`` is its bytes."""
        if nbytes < 1:
            raise InvalidArgument(f"nbytes={nbytes} must be at least 1")
        self._live()
        fd = os.memfd_create("kvcore-region", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            memory = mmap.mmap(fd, nbytes)
            fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
            data = memoryview(memory)
            return Region(self, _core.transport.address_of(data)[0], nbytes, fd, data, memory)
        except (OSError, OverflowError, ValueError) as error:
            if isinstance(error, errors.KvcoreError):
                raise
            raise errors.IoError(f"nbytes={nbytes} of shared memory: {error}") from error
        finally:
            os.close(fd)

    def register(self, tensor: Any) -> Region:
        """Memory that exists already: a writable contiguous buffer, or a DLPack CPU tensor.

        shm links can take it as a target only: the source of a shm write must be allocated.
        The memory stays until it is unregistered; what moves a tensor to other memory meanwhile
        (torch's ``resize_`` to a larger size) must not be done.
        Raises: InvalidArgument (read-only, strided, of Python objects, or not in CPU memory).
        """
        try:
            data = memoryview(tensor)
        except TypeError:
            capsule, address, nbytes = address_of(tensor)
            return Region(self, address, nbytes, -1, None, tensor, capsule)
        if data.readonly or not data.c_contiguous:
            raise InvalidArgument("tensor is read-only or strided: a writable C order is needed")
        if "O" in data.format:
            raise InvalidArgument("tensor holds Python objects: numbers or bytes are needed")
        address, nbytes = _core.transport.address_of(data)
        return Region(self, address, nbytes, -1, data.cast("B"), tensor)

    # ---- events

    def _pump(self) -> None:
        with self._lock:
            self._pump_locked()

    def _pump_locked(self) -> None:
        for event in self._core.poll(1024):
            self._waiters.touch(self._dispatch(event))

    def _dispatch(self, event: tuple[Any, ...]) -> object:
        """Puts it where it belongs. Returns the place where that is waited for."""
        kind, link_id = event[0], event[1]
        if kind == "up" and event[2]:
            core = self._core.link(link_id)
            if core is not None:
                link = self._links[link_id] = Link(self, core)
                link._up = True
                self._accepted.append(link)
            return self
        if kind == "fenced":
            self._fenced.add(event[2])
            return self._fences
        if kind == "returned":
            grant = self._grants.get(event[2])
            if grant is not None:
                grant._returned.append(Returned(event[2], event[3], _error(event[4])))
            return grant
        known = self._links.get(link_id)
        return None if known is None else self._dispatch_to(known, kind, event)

    def _dispatch_to(self, link: Link, kind: str, event: tuple[Any, ...]) -> object:
        if kind == "completion":
            op = link._ops.pop(event[2], None)
            if op is not None:
                op._result = (_error(event[3]), event[4])
            return op
        if kind == "borrowed":
            op = link._ops.pop(event[2], None)
            if op is not None:
                op._result = (_error(event[3]), Borrowed(link, *event[4:]))
            else:
                link._core.give_back(event[4])
            return op
        if kind == "up":
            link._up = True
        elif kind == "arrival":
            error = _error(event[6])
            link._arrivals.append(error or Arrival(event[2], event[3], event[4], event[5]))
        elif kind == "message":
            link._messages.append(event[2])
        elif kind == "down":
            link._down = (_error(event[2]),)
            del self._links[link.id]
        return link

    def _take_fenced(self, token: bytes) -> bool | None:
        if token not in self._fenced:
            return None
        self._fenced.discard(token)
        self._fences.discard(token)
        return True

    def _wait(
        self, place: object, ready: Callable[[], T | None], timeout_s: float | None, what: str
    ) -> T:
        self._check_process()
        return self._waiters.wait(place, ready, timeout_s, what)

    async def _wait_async(
        self, place: object, ready: Callable[[], T | None], timeout_s: float | None, what: str
    ) -> T:
        self._check_process()
        return await self._waiters.wait_async(place, ready, timeout_s, what)

    def close(self) -> None:
        """Close every link and listener and end the background thread. Idempotent.

        Who waits is told. In a forked child it does nothing: the links are the parent's.
        """
        if os.getpid() != self._pid:
            return
        self._closed = True
        self._core.close()
        with self._lock:
            self._memory.clear()
            self._pump_locked()
            self._waiters.close()

    def __enter__(self) -> Transport:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
