"""A peer written from docs/protocol.md alone, with the standard library, against kvcore's own."""

from __future__ import annotations

import hashlib
import pathlib
import secrets
import select
import socket
import struct
from typing import Any, NamedTuple

import numpy as np
import pytest
from kvcore import errors, stream
from kvcore.pages import PageSpec, Pool
from kvcore.transport import Transport

KEY = bytes(range(32))
PING, MESSAGE, WRITE, RESULT, CREDIT, BYE = 1, 2, 3, 4, 12, 13
LAST, UNCHECKED, ANSWER = 1, 2, 4
OPEN, COMMIT, ABORT, DONE, RECEIVER_ABORT = 1, 3, 4, 5, 6


def blake2b(key: bytes, data: bytes, size: int = 32) -> bytes:
    return hashlib.blake2b(data, key=key, digest_size=size).digest()


class Frame(NamedTuple):
    type: int
    flags: int
    body: bytes


class Peer:
    """The side that connects."""

    def __init__(self, address: str, key: bytes = KEY, hello: bytes | None = None) -> None:
        host, port = address.removeprefix("tcp:").rsplit(":", 1)
        self.socket = socket.create_connection((host, int(port)), timeout=10)
        if hello is None:
            hello = struct.pack("<IIqQ32s32sHHI", 1, 3, 0, 1 << 20, b"", b"", 5, 3, 0)
            hello += b"plain" + b"me!"
        self._handshake(key, hello)
        self.sent = self.received = 0

    def _handshake(self, key: bytes, hello: bytes) -> None:
        label = b"kvcore-link-4"
        body = secrets.token_bytes(32) + bytes([len(label)]) + label
        body += struct.pack("<H", len(hello)) + hello
        first = self._step(1, body)
        magic, version, step, size = struct.unpack("<4sBBH", self._take(8))
        assert (magic, version, step) == (b"KVCA", 1, 2)
        reply = self._take(size)
        prk = blake2b(key, first + reply[:-32])
        assert reply[-32:] == blake2b(prk, b"proof of the responder")
        (told,) = struct.unpack_from("<H", reply, 32)
        self.peer_hello = reply[34 : 34 + told]
        self._step(3, blake2b(prk, b"proof of the initiator"))
        self.send_key = blake2b(prk, b"frames to the responder")
        self.receive_key = blake2b(prk, b"frames to the initiator")
        self.token_key = blake2b(prk, b"tokens")
        self.session = blake2b(prk, b"session id")[:8]

    def _step(self, step: int, body: bytes) -> bytes:
        whole = struct.pack("<4sBBH", b"KVCA", 1, step, len(body)) + body
        self.socket.sendall(whole)
        return whole

    def _take(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self.socket.recv(size - len(data))
            assert more, "the link was closed"
            data += more
        return data

    def lane(self, address: str, number: int) -> Peer:
        token = blake2b(self.token_key, struct.pack("<Q", number), 16)
        return Peer(address, hello=struct.pack("<II8s16s", 2, number, self.session, token))

    def send(self, kind: int, body: bytes, flags: int = 0, payload: bytes = b"") -> None:
        frame = struct.pack("<4sBBHII", b"KVTL", kind, 0, flags, len(body), len(payload)) + body
        mac = blake2b(self.send_key, struct.pack("<Q", self.sent) + frame, 16)
        self.sent += 1
        self.socket.sendall(frame + mac + payload)

    def next(self) -> Frame:
        """The next frame that says something."""
        while True:
            prefix = self._take(16)
            magic, kind, _, flags, size, payload = struct.unpack("<4sBBHII", prefix)
            assert magic == b"KVTL" and payload == 0
            body = self._take(size)
            mac = blake2b(self.receive_key, struct.pack("<Q", self.received) + prefix + body, 16)
            assert self._take(16) == mac
            self.received += 1
            if kind not in (PING, CREDIT):
                return Frame(kind, flags, body)

    def write(self, op: int, grant: bytes, tag: int, at: int, data: bytes) -> None:
        head = struct.pack("<Q16sQII", op, grant, tag, 0, 1)
        piece = struct.pack("<QQQ", at, len(data), 0)
        self.send(WRITE, head + piece, LAST | UNCHECKED, data)

    def result(self, op: int) -> int:
        frame = self.next()
        assert frame.type == RESULT
        got, code = struct.unpack_from("<QQ", frame.body)
        assert got == op
        return int(code)


@pytest.fixture
def owner() -> Any:
    with Transport(key=KEY, identity=b"owner", role="decode", keepalive_s=0) as t:
        yield t


def test_a_message_each_way_and_a_write(owner: Transport) -> None:
    address = owner.listen("tcp:127.0.0.1:0")
    peer = Peer(address)
    link = owner.accept(10)
    kind, _, keepalive, window = struct.unpack_from("<IIqQ", peer.peer_hello)
    assert (kind, keepalive) == (1, 0) and window >= 65536
    assert peer.peer_hello.endswith(b"decode" + b"owner")
    info = link.info()
    assert (info["peer_role"], info["peer_identity"]) == ("plain", b"me!")
    lanes = [peer.lane(address, n) for n in (1, 2)]
    for lane in lanes:  # the side that listens says that it has taken it
        assert lane._take(16)[4] == PING

    peer.send(MESSAGE, b"from the text")
    assert link.recv(10) == b"from the text"
    peer.send(MESSAGE, struct.pack("<Q", 1) + b"answered", ANSWER)
    assert link.recv(10) == b"answered"
    assert peer.result(1) == 0
    link.send(b"to the text")
    assert peer.next() == Frame(MESSAGE, 0, b"to the text")

    region = owner.allocate(4096)
    with region.grant([(1024, 1024)]) as grant:
        peer.write(2, grant.token, 77, 1024, bytes(range(256)) * 4)
        arrival = link.arrival(10)
        assert (arrival.tag, arrival.bytes) == (77, 1024)
        assert bytes(region.data[1024:2048]) == bytes(range(256)) * 4
        assert peer.result(2) == 0
        peer.write(3, grant.token, 78, 2048, b"outside")
        assert peer.result(3) == 1 + 0  # InvalidArgument
    for lane in lanes:
        lane.send(BYE, b"")
    peer.send(BYE, struct.pack("<Q", 0b110))
    with pytest.raises(errors.PeerDead, match="closed"):
        link.recv(10)


def test_the_sequence_is_under_the_mac(owner: Transport) -> None:
    peer = Peer(owner.listen("tcp:127.0.0.1:0"))
    link = owner.accept(10)
    peer.send(MESSAGE, b"first")
    assert link.recv(10) == b"first"
    peer.sent = 0  # as a frame that is repeated
    peer.send(MESSAGE, b"again")
    with pytest.raises(errors.Corrupt, match="frame 1 fails its MAC"):
        link.recv(10)


def test_another_key_is_closed_without_a_word(owner: Transport) -> None:
    with pytest.raises(AssertionError):
        Peer(owner.listen("tcp:127.0.0.1:0"), key=bytes(32))


class Grant:
    """A hand-over's grant, field by field."""

    def __init__(self, data: bytes) -> None:
        self._left = data
        self.magic, self.version, self.request_id = self.take("4sH16s")
        self.spec = self.take("6i2B")
        self.head_begin, self.layer_begin, self.class_number, num_formats = self.take("iiII")
        self.formats = [self.take("BB") for _ in range(num_formats)]
        self.first_token, self.num_tokens, self.ttl_ns = self.take("3q")
        self.host, self.layer_stride, num_pages = self.take("16sqI")
        self.pages = [self.take("iQqB") for _ in range(num_pages)]
        (num_shares,) = self.take("H")
        self.shares = [self.take("16s4i") for _ in range(num_shares)]
        (num_addresses,) = self.take("B")
        self.addresses = [self.take(f"{n}s")[0] for n in (self.take("I") * num_addresses)]
        assert not self._left

    def take(self, fields: str) -> tuple[Any, ...]:
        size = struct.calcsize("<" + fields)
        values, self._left = struct.unpack("<" + fields, self._left[:size]), self._left[size:]
        return values


def host_id() -> bytes:
    text = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text()
    return bytes.fromhex(text.strip().replace("-", ""))


LAYERS, HEADS, DIM, PAGE = 2, 2, 16, 16


@pytest.fixture
def decode() -> Any:
    spec = PageSpec(LAYERS, HEADS, DIM, page_size=PAGE, format="f32", layout="canonical")
    pool = Pool(spec, 2, huge_pages=False)
    with stream.Endpoint(
        pool, ["tcp:127.0.0.1:0"], key=KEY, checksums="off", keepalive_s=0
    ) as endpoint:
        yield endpoint


def open_stream(endpoint: stream.Endpoint, pages: list[int]) -> tuple[Peer, Grant, bytes]:
    grant = Grant(endpoint.grant(secrets.token_bytes(16), pages, num_tokens=PAGE + 3))
    peer = Peer(grant.addresses[0].decode())

    def head(kind: int) -> bytes:
        return struct.pack("<4sBB16s16s", b"KVSM", 2, kind, grant.request_id, grant.shares[0][0])

    peer.send(MESSAGE, head(OPEN) + host_id() + b"\0")
    return peer, grant, head(0)


def event_of(endpoint: stream.Endpoint) -> tuple[Any, ...]:
    assert select.select([endpoint.event_fd], [], [], 10)[0]
    (event,) = endpoint.poll()
    return event


def slice_of(layer: int, valid: int, values: np.ndarray) -> bytes:
    """values: float32 [K and V, heads, tokens, dims]."""
    header = struct.pack("<4sIHHBBHQ40x", b"KVC1", 0, layer, valid, 0, 0, 0, 0)
    return header + values.transpose(1, 0, 2, 3).tobytes()


def test_a_whole_hand_over(decode: stream.Endpoint) -> None:
    pages = decode.pool.alloc(2)[:2]
    peer, grant, head = open_stream(decode, pages)
    assert (grant.magic, grant.version) == (b"KVGR", 2)
    assert grant.spec[:5] == (LAYERS, HEADS, DIM, DIM, PAGE) and grant.spec[6:] == (0, 0)
    assert (grant.first_token, grant.num_tokens) == (0, PAGE + 3)
    assert [page[0] for page in grant.pages] == pages and grant.host == host_id()
    assert grant.shares[0][1:] == (0, LAYERS, 0, HEADS) and grant.formats == []

    values = np.random.default_rng(1).random((LAYERS, 2, 2, HEADS, PAGE, DIM), np.float32)
    for op, (layer, slot) in enumerate(np.ndindex(LAYERS, 2), 1):
        at = grant.pages[slot][2] + layer * grant.layer_stride
        data = slice_of(layer, (PAGE, 3)[slot], values[layer, slot])
        peer.write(op, grant.shares[0][0], layer << 48 | slot << 24 | 1, at, data)
        assert peer.result(op) == 0
    commit = struct.pack("<qI", 1, 7) + b"payload"
    peer.send(MESSAGE, head[:5] + bytes([COMMIT]) + head[6:] + commit)
    kind, request_id, payload, stats = event_of(decode)
    assert (kind, request_id, payload) == ("complete", grant.request_id, b"payload")
    assert stats.same_clock and stats.kv_bytes == LAYERS * 2 * decode.pool.spec.slice_bytes
    done = peer.next()
    assert done.type == MESSAGE and done.body == head[:5] + bytes([DONE]) + head[6:]
    for layer, slot in np.ndindex(LAYERS, 2):
        k, v = decode.pool.read_slice(pages[slot], layer)
        np.testing.assert_array_equal(k, values[layer, slot, 0].transpose(1, 0, 2))
        np.testing.assert_array_equal(v, values[layer, slot, 1].transpose(1, 0, 2))


def test_both_sides_may_give_up(decode: stream.Endpoint) -> None:
    pages = decode.pool.alloc(2)[:2]
    peer, grant, head = open_stream(decode, pages)
    gone = struct.pack("<BI", 1, 4) + b"gone"  # OutOfPages
    peer.send(MESSAGE, head[:5] + bytes([ABORT]) + head[6:] + gone)
    kind, request_id, code, reason = event_of(decode)
    assert (kind, request_id, code) == ("failed", grant.request_id, "OutOfPages")
    assert reason.endswith("gone")

    peer, grant, head = open_stream(decode, pages)
    peer.send(MESSAGE, b"KVSM and nonsense")  # dropped
    wrong = slice_of(0, PAGE - 1, np.zeros((2, HEADS, PAGE, DIM), np.float32))
    peer.write(1, grant.shares[0][0], 1, grant.pages[0][2], wrong)  # of slot 0, which is full
    assert peer.result(1) == 0
    frame = peer.next()
    assert frame.body[:38] == head[:5] + bytes([RECEIVER_ABORT]) + head[6:]
    code, size = struct.unpack_from("<BI", frame.body, 38)
    assert code == 8 and len(frame.body) == 43 + size  # Corrupt
    assert event_of(decode)[:3] == ("failed", grant.request_id, "Corrupt")
    assert decode.stats().dropped == 1
