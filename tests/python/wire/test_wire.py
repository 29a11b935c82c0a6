"""kvcore.wire: schema errors by name, authentication, order, backpressure, ends of all kinds."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvcore import wire
from kvcore.errors import (
    Corrupt,
    InvalidArgument,
    KvcoreError,
    PeerDead,
    Timeout,
    TransportError,
    Unauthenticated,
)

KEY = bytes(range(32))
ID = b"0123456789abcdef"


def run(main: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), 20))  # type: ignore[arg-type]


async def echo(conn: wire.Connection) -> None:
    async for kind, fields in conn:
        await conn.send(kind, fields)


@pytest.fixture(params=["tcp:127.0.0.1:0", "tcp:[::1]:0", "unix"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"unix:{tmp_path}/w.sock" if request.param == "unix" else str(request.param)


# ---- codec

VALUES = {
    "u64": st.integers(0, 2**64 - 1),
    "i64": st.integers(-(2**63), 2**63 - 1),
    "f64": st.floats(allow_nan=False),
    "str": st.text(st.characters(exclude_categories=("Cs",)), max_size=20),
    "bytes": st.binary(max_size=40),
    "bytes16": st.binary(min_size=16, max_size=16),
    "list[i32]": st.lists(st.integers(-(2**31), 2**31 - 1), max_size=9),
    "list[u64]": st.lists(st.integers(0, 2**64 - 1), max_size=9),
    "list[f64]": st.lists(st.floats(allow_nan=False), max_size=9),
    "list[bytes]": st.lists(st.binary(max_size=9), max_size=5),
    "list[str]": st.lists(st.text(st.characters(exclude_categories=("Cs",))), max_size=5),
}


@given(st.data())
def test_every_message_survives(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(sorted(wire.schema())))
    spec = wire.schema()[kind]
    fields = {
        name: data.draw(VALUES[field_kind])
        for name, (field_kind, required, _) in spec.items()
        if required or data.draw(st.booleans())
    }
    back_kind, back = wire.decode(wire.encode(kind, fields))
    assert back_kind == kind
    assert back == {n: fields.get(n, default) for n, (_, _, default) in spec.items()}


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_corrupt(body: bytes) -> None:
    try:
        kind, fields = wire.decode(body)
    except Corrupt:
        return
    assert set(fields) == set(wire.schema()[kind])


def test_numpy_and_buffers_are_taken() -> None:
    tokens = np.arange(5, dtype=np.int32)
    request = {"request_id": memoryview(ID), "tokens": tokens, "max_tokens": np.uint64(3)}
    _, fields = wire.decode(wire.encode("generate", request))
    assert fields["tokens"] == [0, 1, 2, 3, 4]
    assert (fields["max_tokens"], fields["num_logprobs"], fields["top_p"]) == (3, -1, 1.0)


GOOD: dict[str, Any] = {"request_id": ID, "tokens": [1], "max_tokens": 1}


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("request_id", b"short", "has 5 bytes, must have 16"),
        ("request_id", "0123456789abcdef", "does not fit bytes16"),
        ("tokens", [1, 2**31], "item 1 = 2147483648"),
        ("tokens", [1.0], "item 0 = 1.0"),
        ("tokens", "123", "must be a list[i32]"),
        ("tokens", 5, "must be a list[i32]"),
        ("max_tokens", -1, "= -1 does not fit u64"),
        ("max_tokens", 2**64, "does not fit u64"),
        ("max_tokens", None, "does not fit u64"),
        ("temperature", "hot", "does not fit f64"),
        ("keys", ["text"], "item 0"),
    ],
)
def test_bad_field_is_named(field: str, value: object, says: str) -> None:
    with pytest.raises(InvalidArgument) as e:
        wire.encode("generate", {**GOOD, field: value})
    assert "'generate'" in str(e.value) and f"'{field}'" in str(e.value) and says in str(e.value)


def test_unknown_type_unknown_field_and_missing_field() -> None:
    with pytest.raises(InvalidArgument, match="'nonsense'"):
        wire.encode("nonsense", {})
    with pytest.raises(InvalidArgument, match="no field 'tokenz'"):
        wire.encode("generate", {**GOOD, "tokenz": []})
    with pytest.raises(InvalidArgument, match="'tokens' is required"):
        wire.encode("generate", {"request_id": ID, "max_tokens": 1})


# ---- connections


def test_echo_in_order_both_ways(address: str) -> None:
    async def main() -> None:
        server = await wire.serve(address, KEY, echo, role="router")
        conn = await wire.connect(server.address, KEY, role="decode")
        assert conn.peer_role == "router"
        for i in range(200):
            await conn.send("generate", {**GOOD, "tokens": list(range(i)), "seed": i})
        for i in range(200):
            kind, fields = await conn.recv()
            assert (kind, fields["seed"], len(fields["tokens"])) == ("generate", i, i)
        await conn.close()
        await server.close()

    run(main)


def test_wrong_key_and_missing_key_get_nothing(address: str) -> None:
    async def main() -> None:
        reached: list[str] = []

        async def handler(conn: wire.Connection) -> None:
            reached.append(conn.peer_role)

        server = await wire.serve(address, KEY, handler)
        for key in (bytes(32), b"", os.urandom(32)):
            with pytest.raises((Unauthenticated, TransportError)):
                await wire.connect(server.address, key)
        await asyncio.sleep(0.05)
        assert reached == []
        await server.close()

    run(main)


def test_address_and_key_rules(tmp_path: Path) -> None:
    async def main() -> None:
        for bad in ("tcp:0.0.0.0:0", "tcp:[::]:0", "tcp:example.org:80"):
            with pytest.raises(InvalidArgument, match="32-byte key"):
                await wire.serve(bad, b"", echo)
        for bad in ("", "http:x:1", "tcp:127.0.0.1", "tcp::5", "tcp:h:99999", "unix:" + "x" * 200):
            with pytest.raises(InvalidArgument, match="address"):
                await wire.serve(bad, KEY, echo)
        with pytest.raises(InvalidArgument, match="3 bytes"):
            await wire.serve("tcp:127.0.0.1:0", b"abc", echo)
        server = await wire.serve("tcp:127.0.0.1:0", b"", echo)
        with pytest.raises(InvalidArgument):
            await wire.serve(server.address, b"", echo)
        await server.close()
        with pytest.raises(PeerDead):
            await wire.connect(server.address, b"")
        with pytest.raises(PeerDead):
            await wire.connect(f"unix:{tmp_path}/none", b"")

    run(main)


def test_unix_socket_is_private_stale_is_replaced_live_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        path = tmp_path / "w.sock"
        server = await wire.serve(f"unix:{path}", KEY, echo)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with pytest.raises(InvalidArgument, match="in use"):
            await wire.serve(f"unix:{path}", KEY, echo)
        await server.close()
        assert not path.exists()
        import socket

        dead = socket.socket(socket.AF_UNIX)
        dead.bind(str(path))
        dead.close()
        server = await wire.serve(f"unix:{path}", KEY, echo)
        await (await wire.connect(server.address, KEY)).close()
        await server.close()
        path.write_text("precious")
        with pytest.raises(InvalidArgument, match="not a socket"):
            await wire.serve(f"unix:{path}", KEY, echo)
        assert path.read_text() == "precious"

    run(main)


def test_orderly_close_differs_from_a_lost_peer(address: str) -> None:
    async def main() -> None:
        ends: list[str] = []

        async def handler(conn: wire.Connection) -> None:
            try:
                async for _ in conn:
                    pass
                ends.append("order")
            except PeerDead:
                ends.append("lost")

        server = await wire.serve(address, KEY, handler)
        conn = await wire.connect(server.address, KEY)
        await conn.send("drain")
        await conn.close("done")
        with pytest.raises(PeerDead):
            await conn.send("drain")
        conn = await wire.connect(server.address, KEY)
        conn.abort()
        while len(ends) < 2:
            await asyncio.sleep(0.01)
        assert sorted(ends) == ["lost", "order"]
        conn = await wire.connect(server.address, KEY)
        closing = asyncio.ensure_future(server.close())
        with pytest.raises(PeerDead, match=r"closed by the peer: the server closes$"):
            await conn.recv()
        assert conn.closed_in_order
        await conn.close()
        await closing

    run(main)


def test_backpressure_bounds_the_sender() -> None:
    async def main() -> None:
        go = asyncio.Event()
        got: list[int] = []

        async def slow(conn: wire.Connection) -> None:
            await go.wait()
            async for _, fields in conn:
                got.append(fields["seed"])

        server = await wire.serve("tcp:127.0.0.1:0", KEY, slow)
        conn = await wire.connect(server.address, KEY)
        sent = 0

        async def sender() -> None:
            nonlocal sent
            for i in range(300):
                await conn.send("generate", {**GOOD, "tokens": [7] * 25_000, "seed": i})
                sent += 1

        task = asyncio.ensure_future(sender())
        await asyncio.sleep(0.3)
        assert not task.done() and sent < 250  # 300 x 100 kB do not fit in buffers
        go.set()
        await task
        await conn.close(timeout_s=5)
        while len(got) < 300:
            await asyncio.sleep(0.01)
        assert got == list(range(300))
        await server.close()

    run(main)


def test_frames_over_the_limit_are_refused_on_both_sides() -> None:
    async def main() -> None:
        failures: list[KvcoreError] = []

        async def handler(conn: wire.Connection) -> None:
            try:
                await conn.recv()
            except KvcoreError as e:
                failures.append(e)

        server = await wire.serve("tcp:127.0.0.1:0", KEY, handler, max_frame_bytes=1000)
        conn = await wire.connect(server.address, KEY)
        await conn.send("generate", {**GOOD, "tokens": [1] * 1000})
        with pytest.raises(PeerDead):
            await conn.recv()
        assert isinstance(failures[0], Corrupt) and "exceeds 1000" in str(failures[0])
        small = await wire.connect(server.address, KEY, max_frame_bytes=500)
        with pytest.raises(InvalidArgument, match="max_frame_bytes=500"):
            await small.send("generate", {**GOOD, "tokens": [1] * 1000})
        await small.close()
        await conn.close()
        await server.close()

    run(main)


def test_garbage_silence_and_many_connections_leave_the_service_up() -> None:
    async def main() -> None:
        server = await wire.serve("tcp:127.0.0.1:0", KEY, echo)
        _, host, port = wire.parse_address(server.address)
        idle = [await asyncio.open_connection(host, port) for _ in range(100)]
        for reader, writer in [await asyncio.open_connection(host, port) for _ in range(20)]:
            writer.write(os.urandom(500))
            assert await reader.read() == b""  # closed, nothing said
            writer.close()
        await asyncio.sleep(2.2)  # the silent ones run into the handshake timeout
        conn = await wire.connect(server.address, KEY)
        await conn.send("drain")
        assert (await conn.recv())[0] == "drain"
        for reader, writer in idle:
            assert await reader.read() == b""
            writer.close()
        await conn.close()
        await server.close()

    run(main)


def test_connect_to_a_silent_server_times_out() -> None:
    async def main() -> None:
        server = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(Timeout):
            await wire.connect(f"tcp:127.0.0.1:{port}", KEY, timeout_s=0.2)
        server.close()

    run(main)


def test_handler_failure_closes_only_its_connection(address: str) -> None:
    async def main() -> None:
        async def handler(conn: wire.Connection) -> None:
            kind, _ = await conn.recv()
            if kind == "prefix_resync":
                raise ValueError("boom")
            await conn.send("drained")

        server = await wire.serve(address, KEY, handler)
        bad = await wire.connect(server.address, KEY)
        good = await wire.connect(server.address, KEY)
        await bad.send("prefix_resync")
        with pytest.raises(PeerDead):
            await bad.recv()
        await good.send("drain")
        assert (await good.recv())[0] == "drained"
        await server.close()

    run(main)
