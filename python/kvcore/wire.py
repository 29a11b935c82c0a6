"""Messages between router and workers: one codec, authenticated sessions, asyncio connections.

Addresses are ``unix:/path.sock`` (0600, made by the server) and ``tcp:HOST:PORT`` (port 0 picks
one; ``tcp:[::1]:0`` is IPv6). Both sides prove a 32-byte pre-shared key before any message is
looked at; an address other than loopback without a key is refused. Frames are authenticated, not
encrypted.

    server = await serve("tcp:127.0.0.1:0", key, handler, role="router")
    conn = await connect(server.address, key, role="decode")
    await conn.send("cancel", {"request_id": request_id})
    async for kind, fields in conn: ...
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import socket
import stat
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from kvcore import _core
from kvcore.errors import InvalidArgument, KvcoreError, PeerDead, Timeout, TransportError

__all__ = [
    "DEFAULT_MAX_FRAME_BYTES",
    "Connection",
    "Server",
    "Session",
    "connect",
    "decode",
    "encode",
    "is_loopback",
    "parse_address",
    "schema",
    "serve",
]

log = logging.getLogger(__name__)

DEFAULT_MAX_FRAME_BYTES: int = _core.wire.DEFAULT_MAX_FRAME_BYTES
HANDSHAKE_TIMEOUT_S = 2.0
MAX_PENDING_HANDSHAKES = 64
_READ_BYTES = 256 * 1024
_SERVER_CLOSES = "the server closes"
_SEND_HIGH_BYTES = 1024 * 1024

Session = _core.wire.Session
Fields = dict[str, Any]


def encode(kind: str, fields: Mapping[str, Any]) -> bytes:
    """Encode one message body (no header, no MAC).

    Args: kind: a name of :func:`schema`. fields: its fields; those not required may be left out.
    Raises: InvalidArgument naming the message and field.
    """
    body: bytes = _core.wire.encode(kind, dict(fields))
    return body


def decode(body: bytes | bytearray | memoryview) -> tuple[str, Fields]:
    """Decode one message body into (kind, fields), absent fields filled with their defaults.

    Raises: Corrupt, whatever the bytes are, when they are not exactly one valid message.
    """
    kind, fields = _core.wire.decode(body)
    return kind, fields


def schema() -> dict[str, dict[str, tuple[str, bool, Any]]]:
    """All messages: name -> field -> (kind, required, default)."""
    table: dict[str, dict[str, tuple[str, bool, Any]]] = _core.wire.schema()
    return table


def parse_address(address: str) -> tuple[str, str, int]:
    """Split an address into (scheme, path or host, port). Raises: InvalidArgument."""
    scheme, _, rest = address.partition(":")
    if scheme == "unix" and rest:
        if len(os.fsencode(rest)) > 107:
            raise InvalidArgument(f"address={address!r}: a unix socket path has at most 107 bytes")
        return scheme, rest, 0
    if scheme == "tcp":
        host, _, port = rest.rpartition(":")
        host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        if host and port.isascii() and port.isdigit() and int(port) <= 65535:
            return scheme, host, int(port)
    raise InvalidArgument(f"address={address!r} must be unix:/PATH or tcp:HOST:PORT")


def is_loopback(host: str) -> bool:
    """True for localhost and literal loopback addresses; any other name counts as not loopback."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_key(address: str, key: bytes) -> None:
    if len(key) not in (0, 32):
        raise InvalidArgument(f"key has {len(key)} bytes, must have 0 or 32")
    scheme, host, _ = parse_address(address)
    if scheme == "tcp" and not key and not is_loopback(host):
        raise InvalidArgument(
            f"address={address!r} is not a loopback address: a 32-byte key is needed"
        )


class Connection:
    """One authenticated conversation. One task receives; any tasks of the loop may send."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        session: _core.wire.Session,
        address: str,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._session = session
        self._inbox: deque[tuple[str, Fields]] = deque()
        self._closing = False
        self.address = address
        self.closed_in_order = False
        """The peer said goodbye before its end of the stream."""
        self._goodbye = ""

    @property
    def peer_role(self) -> str:
        """The role the peer named (under the proof of the key)."""
        role: str = self._session.peer_role
        return role

    async def _handshake(self) -> None:
        self._writer.write(self._session.take_output())
        while not self._session.established:
            data = await self._reader.read(_READ_BYTES)
            if not data:
                raise TransportError(
                    f"{self.address}: the peer closed during the handshake"
                    " (another key, version or protocol)"
                )
            self._inbox.extend(self._session.feed(data))
            self._writer.write(self._session.take_output())

    def send_nowait(self, kind: str, fields: Mapping[str, Any] | None = None) -> None:
        """Queue a message without waiting for room; :meth:`send` is the one with backpressure.

        Raises: InvalidArgument (schema), PeerDead (the connection is closed).
        """
        if self._closing or self._writer.is_closing():
            raise PeerDead(f"{self.address}: the connection is closed")
        self._writer.write(self._session.encode(kind, dict(fields or {})))

    async def send(self, kind: str, fields: Mapping[str, Any] | None = None) -> None:
        """Send a message; waits while more than 1 MiB is queued to a peer that does not read.

        Raises: InvalidArgument (schema), PeerDead.
        """
        self.send_nowait(kind, fields)
        try:
            await self._writer.drain()
        except ConnectionError as e:
            raise PeerDead(f"{self.address}: {e}") from e

    async def recv(self) -> tuple[str, Fields]:
        """The next message as (kind, fields).

        Raises: PeerDead at the end (``closed_in_order`` tells which; the reason, if the peer gave
        one), Corrupt for a frame that is
        malformed or fails its MAC; after either nothing more comes.
        """
        while not self._inbox:
            if self.closed_in_order:
                raise PeerDead(f"{self.address}: closed by the peer{self._goodbye}")
            try:
                data = await self._reader.read(_READ_BYTES)
            except OSError as e:
                raise PeerDead(f"{self.address}: {e}") from e
            if not data:
                cut = " in the middle of a frame" if self._session.mid_frame else ""
                raise PeerDead(f"{self.address}: the peer is gone{cut}")
            try:
                self._inbox.extend(self._session.feed(data))
            except KvcoreError:
                self.abort()
                raise
        kind, fields = self._inbox.popleft()
        if kind == "goodbye":
            self.closed_in_order = True
            self._goodbye = f": {fields['reason']}" if fields["reason"] else ""
            self._inbox.clear()
            return await self.recv()
        return kind, fields

    async def __aiter__(self) -> AsyncIterator[tuple[str, Fields]]:
        """Messages until the peer closes in order; any other end raises as :meth:`recv` does."""
        while True:
            try:
                item = await self.recv()
            except PeerDead:
                if self.closed_in_order:
                    return
                raise
            yield item

    async def close(self, reason: str = "", timeout_s: float = 1.0) -> None:
        """Say goodbye, flush for at most ``timeout_s``, close. Idempotent, never raises."""
        if self._closing:
            return
        with contextlib.suppress(KvcoreError, OSError):
            self.send_nowait("goodbye", {"reason": reason})
        self._closing = True
        self._writer.close()
        try:
            await asyncio.wait_for(self._writer.wait_closed(), timeout_s)
        except (OSError, asyncio.TimeoutError):
            self.abort()

    def abort(self, reason: str = "") -> None:
        """Close at once, without flushing; a reason is said if the peer has room for it now."""
        if reason:
            with contextlib.suppress(KvcoreError, OSError):
                self.send_nowait("goodbye", {"reason": reason})
        self._closing = True
        transport = self._writer.transport
        if transport is not None:
            transport.abort()


def _prepare(writer: asyncio.StreamWriter) -> None:
    sock: socket.socket = writer.get_extra_info("socket")
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    writer.transport.set_write_buffer_limits(high=_SEND_HIGH_BYTES)


async def connect(
    address: str,
    key: bytes = b"",
    role: str = "",
    *,
    timeout_s: float = HANDSHAKE_TIMEOUT_S,
    max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES,
) -> Connection:
    """Connect, prove the key both ways, return the connection.

    Args: key: 32 bytes, or empty (loopback and unix only). role: told to the peer.
    Raises: InvalidArgument, PeerDead (nobody listens), Timeout, Unauthenticated, TransportError.
    """
    _check_key(address, key)
    scheme, host, port = parse_address(address)
    session = Session("initiator", key, role, max_frame_bytes)

    async def dial() -> Connection:
        if scheme == "unix":
            reader, writer = await asyncio.open_unix_connection(host, limit=_READ_BYTES)
        else:
            reader, writer = await asyncio.open_connection(host, port, limit=_READ_BYTES)
        _prepare(writer)
        connection = Connection(reader, writer, session, address)
        try:
            await connection._handshake()
        except BaseException:
            connection.abort()
            raise
        return connection

    try:
        return await asyncio.wait_for(dial(), timeout_s)
    except asyncio.TimeoutError as e:
        raise Timeout(f"address={address!r}: no handshake within {timeout_s} s") from e
    except KvcoreError:
        raise
    except OSError as e:
        raise PeerDead(f"address={address!r}: {e}") from e


Handler = Callable[[Connection], Awaitable[None]]


class Server:
    """A listening address; each authenticated connection runs the handler in its own task."""

    def __init__(self, key: bytes, handler: Handler, role: str, max_frame_bytes: int) -> None:
        self._key = key
        self._handler = handler
        self._role = role
        self._max_frame_bytes = max_frame_bytes
        self._pending = 0
        self._closing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._connections: set[Connection] = set()
        self._server: asyncio.AbstractServer | None = None
        self._unix_path: str | None = None
        self.address = ""
        """The address to connect to, with the port that was picked."""

    async def _start(self, address: str) -> None:
        scheme, host, port = parse_address(address)
        if scheme == "unix":
            self._server = await asyncio.start_unix_server(
                self._accept, sock=_bind_unix(host), limit=_READ_BYTES
            )
            self._unix_path = host
            self.address = address
            return
        self._server = await asyncio.start_server(self._accept, host, port, limit=_READ_BYTES)
        bound = self._server.sockets[0].getsockname()[1]
        self.address = f"tcp:[{host}]:{bound}" if ":" in host else f"tcp:{host}:{bound}"

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._pending >= MAX_PENDING_HANDSHAKES:
            writer.transport.abort()
            return
        task = asyncio.ensure_future(self._run(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _prepare(writer)
        session = Session("responder", self._key, self._role, self._max_frame_bytes)
        connection = Connection(reader, writer, session, _peer_name(writer))
        self._pending += 1
        try:
            await asyncio.wait_for(connection._handshake(), HANDSHAKE_TIMEOUT_S)
        except (KvcoreError, OSError, asyncio.TimeoutError) as e:
            log.warning("refused %s: %s", connection.address, e or "handshake timed out")
            connection.abort()
            return
        finally:
            self._pending -= 1
        self._connections.add(connection)
        try:
            if not self._closing:  # else its handshake was under way when all others were told
                await self._handler(connection)
        except KvcoreError as e:
            log.warning("connection %s ended: %s", connection.address, e)
        except Exception:
            log.exception("handler of %s failed", connection.address)
        finally:
            self._connections.discard(connection)
            await connection.close(_SERVER_CLOSES if self._closing else "")

    async def close(self) -> None:
        """Stop listening, say goodbye on every connection, wait for the handlers to end."""
        self._closing = True
        if self._server is not None:
            self._server.close()
        if self._unix_path is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._unix_path)
            self._unix_path = None
        await asyncio.gather(*(c.close(_SERVER_CLOSES) for c in list(self._connections)))
        tasks = [t for t in self._tasks if t is not asyncio.current_task()]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=1.0)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)


def _peer_name(writer: asyncio.StreamWriter) -> str:
    peer = writer.get_extra_info("peername")
    return f"tcp:{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else "unix peer"


def _bind_unix(path: str) -> socket.socket:
    """A 0600 socket at path. A socket file that nobody serves any more is replaced."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise InvalidArgument(f"address=unix:{path}: exists and is not a socket")
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(path)
            except OSError:
                os.unlink(path)
            else:
                raise InvalidArgument(f"address=unix:{path}: in use")
    sock = socket.socket(socket.AF_UNIX)
    try:
        os.fchmod(sock.fileno(), 0o600)  # the file gets its mode from here, before it is visible
        sock.bind(path)
        os.chmod(path, 0o600)
    except OSError as e:
        sock.close()
        raise InvalidArgument(f"address=unix:{path}: {e}") from e
    return sock


async def serve(
    address: str,
    key: bytes,
    handler: Handler,
    role: str = "",
    *,
    max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES,
) -> Server:
    """Listen; run ``await handler(connection)`` for each peer that proved the key.

    Raises: InvalidArgument (address in use or malformed, or not loopback and no key).
    """
    _check_key(address, key)
    server = Server(key, handler, role, max_frame_bytes)
    try:
        await server._start(address)
    except KvcoreError:
        raise
    except OSError as e:
        raise InvalidArgument(f"address={address!r}: {e}") from e
    return server
