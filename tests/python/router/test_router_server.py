"""The router's control socket as workers meet it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from kvcore import wire
from kvcore.errors import PeerDead
from kvcore.prefix import ClusterIndex
from kvcore.router import server
from kvcore.router.dispatch import Dispatcher
from kvcore.router.server import Router

KEY = bytes(range(32))


def hello(name: bytes, **other: Any) -> dict[str, Any]:
    fields = {"worker_id": name * 16, "incarnation": 1, "role": "decode", "model": "m"}
    fields |= {"model_epoch": "e", "page_spec": "format=bf16", "max_context": 64}
    return {**fields, "num_frames": 1, "pid": 1, **other}


@pytest.mark.parametrize(
    ("other", "field"), [({"page_spec": "format=f32"}, "page_spec"), ({"role": "king"}, "role")]
)
def test_a_worker_that_does_not_fit_hears_why(
    tmp_path: Path, other: dict[str, Any], field: str
) -> None:
    async def main() -> None:
        dispatcher = Dispatcher(ClusterIndex(), lambda worker, tokens: (b"", []))
        router = Router(dispatcher, f"unix:{tmp_path}/r.sock", KEY)
        await router.start()
        first = await wire.connect(router.address, KEY, "decode")
        await first.send("hello", hello(b"a"))
        assert (await first.recv())[0] == "hello_ack"
        second = await wire.connect(router.address, KEY, "decode")
        await second.send("hello", hello(b"b", **other))
        kind, fields = await second.recv()
        assert (kind, fields["code"]) == ("failed", "refused")
        assert fields["message"].startswith(f"{field} = ")
        with pytest.raises(PeerDead, match=f"closed by the peer: {field} = "):
            await second.recv()
        assert len(dispatcher.workers) == 1
        await first.close()
        await second.close()
        await router.close()

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_peer_that_says_nothing_is_sent_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "_HELLO_S", 0.1)

    async def main() -> None:
        dispatcher = Dispatcher(ClusterIndex(), lambda worker, tokens: (b"", []))
        router = Router(dispatcher, f"unix:{tmp_path}/r.sock", KEY)
        await router.start()
        silent = await wire.connect(router.address, KEY, "decode")
        with pytest.raises(PeerDead, match=r"closed by the peer: no hello within 0\.1 s"):
            await silent.recv()
        await silent.close()
        await router.close()

    asyncio.run(asyncio.wait_for(main(), 20))
    assert not [r for r in caplog.records if r.exc_info]


def test_a_worker_that_is_given_up_hears_why(tmp_path: Path) -> None:
    async def main() -> None:
        index = ClusterIndex()
        dispatcher = Dispatcher(index, lambda worker, tokens: (b"", []), heartbeat_timeout_s=0.2)
        router = Router(dispatcher, "tcp:127.0.0.1:0", KEY)
        await router.start()
        silent = await wire.connect(router.address, KEY, "decode")
        await silent.send("hello", hello(b"a"))
        assert (await silent.recv())[0] == "hello_ack"
        with pytest.raises(PeerDead, match="closed by the peer: no heartbeat"):
            await silent.recv()
        assert not dispatcher.workers

        older = await wire.connect(router.address, KEY, "decode")
        await older.send("hello", hello(b"a"))
        await older.recv()
        newer = await wire.connect(router.address, KEY, "decode")
        await newer.send("hello", hello(b"a", incarnation=2))
        assert (await newer.recv())[0] == "hello_ack"
        with pytest.raises(PeerDead, match="closed by the peer: the worker connected anew"):
            await older.recv()
        for connection in (silent, older, newer):
            await connection.close()
        await router.close()

    asyncio.run(asyncio.wait_for(main(), 20))
