"""O90 (vllm#42398), O110 (vllm PR#38731).

One byte on a port killed a service; a scraper stopped it.

Anything may knock at a link's socket, also while it starts: single bytes, a megabyte, HTTP, TLS,
gRPC, half a handshake, a thousand silent connections. It is closed, and the next client is served
within a second.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import socket
import time

import pytest
from kvcore.transport import Transport

JUNK = {
    "one byte": b"\x45",
    "a megabyte": os.urandom(1 << 20),
    "a header without its body": b"KVCA\x01\x01\xf0\x00" + bytes(20),
    "a frame before the handshake": b"KVTL\x01" + bytes(43),
    "HTTP": b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
    "gRPC": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(32),
    "the longest body": b"KVCA\x01\x01\xff\xff" + bytes(70_000),
    "nothing": b"",
}


def knock(address: str) -> socket.socket:
    if address.startswith("shm:"):
        s = socket.socket(socket.AF_UNIX)
        s.connect(address[4:])
        return s
    return socket.create_connection(("127.0.0.1", int(address.rsplit(":", 1)[1])))


def next_client_s(owner: Transport, address: str) -> float:
    began = time.monotonic()
    with Transport() as client:
        link = client.connect(address)
        link.send(b"hello")
        assert owner.accept(5).recv(5) == b"hello"
    return time.monotonic() - began


@pytest.fixture(params=["shm", "tcp"])
def served(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> object:
    address = f"shm:{tmp_path}/o90.sock" if request.param == "shm" else "tcp:127.0.0.1:0"
    with Transport(handshake_s=0.5) as owner:
        yield owner, owner.listen(address)


@pytest.mark.parametrize("what", JUNK)
def test_junk_is_closed_and_the_next_is_served(served: tuple[Transport, str], what: str) -> None:
    owner, address = served
    with contextlib.ExitStack() as stack:
        for _ in range(20):  # the first while the listener has barely started
            s = stack.enter_context(knock(address))
            s.settimeout(2)
            with contextlib.suppress(ConnectionError, TimeoutError):
                s.sendall(JUNK[what])
        assert next_client_s(owner, address) < 1
        with contextlib.suppress(ConnectionError):
            assert s.recv(1) == b"", "closed without a word"


def test_a_thousand_silent_connections(served: tuple[Transport, str]) -> None:
    owner, address = served
    with contextlib.ExitStack() as stack:
        for i in range(1000):
            stack.enter_context(knock(address))
            if i % 250 == 249:
                assert next_client_s(owner, address) < 1
