"""Links that move registered bytes between processes: messages, one-sided writes and reads.

Addresses are ``tcp:HOST:PORT`` (port 0 picks one, ``[::]`` is IPv6 alone) and ``shm:/path.sock``
(same host and user). The owner of memory grants ranges of a region; a peer that holds the grant's
token writes into them or reads from them. All has a synchronous and, with the suffix ``_async``, an
asyncio form.

    with Transport() as t:
        link = t.connect("tcp:127.0.0.1:7000")
        region = t.allocate(1 << 20)                     # region.data is a writable memoryview
        link.write(region, [(0, 4096, 1000)], token, tag=7).wait()

All links of a transport share its background thread in C++; waiting does not hold the GIL. Objects
may be used from several threads. The contract of order, memory and failure is that of
``csrc/transport/link.h``: a local buffer may be changed again once its operation has ended.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from kvcore import _core, errors
from kvcore._operations import Arrival, Borrow, Borrowed, Op, Posted, Returned
from kvcore.errors import InvalidArgument, Timeout

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
_SLICE_S = 0.02  # another thread may have taken the event this one waits for
_F_ADD_SEALS, _F_SEAL_SHRINK, _F_SEAL_GROW, _F_SEAL_FUTURE_WRITE = 1033, 2, 4, 16

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
        if transport._core.revoke_grant(self.token):
            transport._fences.add(self.token)
        if self.token in transport._fences:
            transport._wait(lambda: transport._take_fenced(self.token), timeout_s, "fence")

    def returned(self, timeout_s: float | None = None) -> Returned:
        """The next lease of it that has ended. Raises: Timeout."""
        return self._transport._wait(self._next_returned, timeout_s, "lease")

    async def returned_async(self, timeout_s: float | None = None) -> Returned:
        """:meth:`returned` for asyncio."""
        return await self._transport._wait_async(self._next_returned, timeout_s, "lease")

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
        self, transport: Transport, address: int, nbytes: int, fd: int, data: Any, owner: Any
    ) -> None:
        self._transport = transport
        self._owner = owner
        self.nbytes = nbytes
        self.data = data
        self.id: int = transport._core.register_region(address, nbytes, fd)
        transport._memory[self.id] = owner

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
        expires = 0 if expires_s is None else _core.transport.now_ns() + int(expires_s * 1e9)
        token = self._transport._core.create_grant(
            self.id, list(ranges or [(0, self.nbytes)]), _RIGHTS[rights], expires, peer
        )
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
        self._transport._core.unregister_region(self.id)
        self._transport._memory.pop(self.id, None)
        self._owner = self.data = None


class Link:
    """One peer. Made by :meth:`Transport.connect` and :meth:`Transport.accept`."""

    def __init__(self, transport: Transport, core: _core.transport.Link) -> None:
        self._transport = transport
        self._core = core
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
        with self._transport._lock:
            number = self._core.send(message, priority, _deadline(deadline_s), completion)
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
    ) -> Op:
        """Write bytes of our region into the peer's granted ranges.

        Args: segments: (local offset, remote offset, bytes) each, or an int64 array [n, 3] of them.
        grant: the token. tag: uint64 told to the peer on arrival. deadline_s: from now, then
        Timeout. priority: lower classes wait for higher ones. checksum: tcp: verify each piece
        where it lands.
        Raises: InvalidArgument, PeerDead; what goes wrong later is raised by the operation.
        """
        args = (region.id, _table(segments), grant, tag, _deadline(deadline_s), priority, checksum)
        with self._transport._lock:
            return self._track(Op(self, self._core.write(*args)))

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
        args = (region.id, _table(segments), grant, _deadline(deadline_s), priority)
        with self._transport._lock:
            return self._track(Op(self, self._core.read(*args)))

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
        with self._transport._lock:
            number = self._core.borrow(grant, list(ranges), _deadline(deadline_s))
            return self._track(Borrow(self, number))

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
        if self._up:
            return True
        self._next(deque[bytes]())
        return None

    def recv(self, timeout_s: float | None = None) -> bytes:
        """The next message. Raises: Timeout; PeerDead and its like once the link is down."""
        return self._transport._wait(self._next_message, timeout_s, "message")

    async def recv_async(self, timeout_s: float | None = None) -> bytes:
        """:meth:`recv` for asyncio."""
        return await self._transport._wait_async(self._next_message, timeout_s, "message")

    def arrival(self, timeout_s: float | None = None) -> Arrival:
        """The next write of the peer that landed. Raises: as :meth:`recv`; Corrupt (checksum)."""
        return self._transport._wait(self._next_arrival, timeout_s, "arrival")

    async def arrival_async(self, timeout_s: float | None = None) -> Arrival:
        """:meth:`arrival` for asyncio."""
        return await self._transport._wait_async(self._next_arrival, timeout_s, "arrival")

    def wait_up(self, timeout_s: float | None = None) -> None:
        """Wait for the handshake. Raises: Unauthenticated, PeerDead, Timeout."""
        self._transport._wait(self._is_up, timeout_s, "handshake")

    async def wait_up_async(self, timeout_s: float | None = None) -> None:
        """:meth:`wait_up` for asyncio."""
        await self._transport._wait_async(self._is_up, timeout_s, "handshake")

    def set_pacing(self, bytes_per_s: int) -> None:
        """Limit the payload rate of this side; 0 = unlimited."""
        self._core.set_pacing(bytes_per_s)

    def info(self) -> dict[str, Any]:
        """Scheme, peer (address, identity, role, digests, pid), state and byte counts."""
        return self._core.info()

    def close(self) -> None:
        """End the link: operations end with Cancelled. Idempotent."""
        self._core.close()


def _table(segments: Segments) -> Any:
    """An array as it is, everything else as a list."""
    return segments if hasattr(segments, "__array_interface__") else list(segments)


def _deadline(seconds: float | None) -> int:
    return 0 if seconds is None else _core.transport.now_ns() + int(seconds * 1e9)


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
        self._fences: set[bytes] = set()  # that are waited for
        self._fenced: set[bytes] = set()
        self._grants: weakref.WeakValueDictionary[bytes, Grant] = weakref.WeakValueDictionary()
        # Peers reach registered memory whether or not its Region is still referenced here.
        self._memory: dict[int, Any] = {}
        self._lock = threading.RLock()
        self._links: dict[int, Link] = {}
        self._accepted: deque[Link] = deque()
        self._waiters: set[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = set()
        self._loops: set[asyncio.AbstractEventLoop] = set()

    def listen(self, address: str) -> str:
        """Listen; returns the address with the port filled in. Raises: InvalidArgument."""
        bound: str = self._core.listen(address)
        return bound

    def connect(self, address: str) -> Link:
        """A link to post on at once; :meth:`Link.wait_up` tells whether the peer is there."""
        with self._lock:
            core = self._core.connect(address)
            link = self._links[core.id] = Link(self, core)
            return link

    def accept(self, timeout_s: float | None = None) -> Link:
        """The next peer that connected and proved the key. Raises: Timeout."""
        return self._wait(self._next_accepted, timeout_s, "connection")

    async def accept_async(self, timeout_s: float | None = None) -> Link:
        """:meth:`accept` for asyncio."""
        return await self._wait_async(self._next_accepted, timeout_s, "connection")

    def _next_accepted(self) -> Link | None:
        return self._accepted.popleft() if self._accepted else None

    def allocate(self, nbytes: int) -> Region:
        """New shared memory that every kind of link can use; ``region.data`` is its bytes."""
        if nbytes < 1:
            raise InvalidArgument(f"nbytes={nbytes} must be at least 1")
        fd = os.memfd_create("kvcore-region", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            memory = mmap.mmap(fd, nbytes)
            seals = (
                _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_FUTURE_WRITE
            )  # this mapping stays writable
            fcntl.fcntl(fd, _F_ADD_SEALS, seals)
            data = memoryview(memory)
            return Region(self, _core.transport.address_of(data)[0], nbytes, fd, data, memory)
        finally:
            os.close(fd)

    def register(self, tensor: Any) -> Region:
        """Memory that exists already: a writable contiguous buffer, or a DLPack CPU tensor.

        shm links can take it as a target only: the source of a shm write must be allocated.
        Raises: InvalidArgument (read-only, strided or not in CPU memory).
        """
        try:
            data = memoryview(tensor)
        except TypeError:
            address, nbytes = _describe(tensor)
            return Region(self, address, nbytes, -1, None, tensor)
        if data.readonly or not data.c_contiguous:
            raise InvalidArgument("tensor is read-only or strided: a writable C order is needed")
        address, nbytes = _core.transport.address_of(data)
        return Region(self, address, nbytes, -1, data.cast("B"), tensor)

    # ---- events

    def _pump(self) -> None:
        with self._lock:
            for event in self._core.poll(1024):
                self._dispatch(event)
            waiters, self._waiters = self._waiters, set()
        for loop, future in waiters:
            if not loop.is_closed():
                loop.call_soon_threadsafe(_wake, future)

    def _dispatch(self, event: tuple[Any, ...]) -> None:
        kind, link_id = event[0], event[1]
        if kind == "up" and event[2]:
            core = self._core.link(link_id)
            if core is not None:
                link = self._links[link_id] = Link(self, core)
                link._up = True
                self._accepted.append(link)
            return
        if kind == "fenced":
            self._fenced.add(event[2])
            return
        if kind == "returned":
            grant = self._grants.get(event[2])
            if grant is not None:
                grant._returned.append(Returned(event[2], event[3], _error(event[4])))
            return
        link_or_none = self._links.get(link_id)
        if link_or_none is None:
            return
        link = link_or_none
        if kind == "up":
            link._up = True
        elif kind == "completion":
            op = link._ops.pop(event[2], None)
            if op is not None:
                op._result = (_error(event[3]), event[4])
        elif kind == "borrowed":
            op = link._ops.pop(event[2], None)
            if op is not None:
                op._result = (_error(event[3]), Borrowed(link, *event[4:]))
            else:
                link._core.give_back(event[4])
        elif kind == "arrival":
            error = _error(event[6])
            link._arrivals.append(error or Arrival(event[2], event[3], event[4], event[5]))
        elif kind == "message":
            link._messages.append(event[2])
        elif kind == "down":
            link._down = (_error(event[2]),)
            del self._links[link_id]

    def _take_fenced(self, token: bytes) -> bool | None:
        if token not in self._fenced:
            return None
        self._fenced.discard(token)
        self._fences.discard(token)
        return True

    def _try(self, ready: Callable[[], T | None]) -> T | None:
        with self._lock:
            return ready()

    def _wait(self, ready: Callable[[], T | None], timeout_s: float | None, what: str) -> T:
        end = None if timeout_s is None else time.monotonic() + timeout_s
        poller = select.poll()
        poller.register(self._core.event_fd, select.POLLIN)
        while True:
            self._pump()
            item = self._try(ready)
            if item is not None:
                return item
            left = _SLICE_S if end is None else min(_SLICE_S, end - time.monotonic())
            if left <= 0:
                raise Timeout(f"no {what} within {timeout_s} s")
            poller.poll(left * 1000)

    async def _wait_async(
        self, ready: Callable[[], T | None], timeout_s: float | None, what: str
    ) -> T:
        loop = asyncio.get_running_loop()
        if loop not in self._loops:
            self._loops.add(loop)
            loop.add_reader(self._core.event_fd, self._pump)
        end = None if timeout_s is None else loop.time() + timeout_s
        while True:
            self._pump()
            with self._lock:  # nothing may slip in between looking and waiting
                item = ready()
                if item is not None:
                    return item
                future: asyncio.Future[None] = loop.create_future()
                self._waiters.add((loop, future))
            try:
                await asyncio.wait_for(future, None if end is None else end - loop.time())
            except asyncio.TimeoutError as e:
                raise Timeout(f"no {what} within {timeout_s} s") from e
            finally:
                self._waiters.discard((loop, future))

    def close(self) -> None:
        """Close every link and listener and end the background thread. Idempotent."""
        self._core.close()
        self._memory.clear()
        self._pump()
        for loop in self._loops:
            if not loop.is_closed():
                loop.remove_reader(self._core.event_fd)
        self._loops.clear()

    def __enter__(self) -> Transport:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _describe(tensor: Any) -> tuple[int, int]:
    """(address, bytes) of a contiguous DLPack tensor in CPU memory."""
    if not hasattr(tensor, "__dlpack__"):
        raise InvalidArgument(
            f"tensor is a {type(tensor).__name__}: a buffer or a DLPack object is needed"
        )
    found: tuple[int, int] = _core.transport.address_of_dlpack(tensor.__dlpack__())
    return found
