"""The code of docs/transport.md runs and does what it says there."""

from __future__ import annotations

import asyncio
import os
import pathlib
import re
import signal
import subprocess
import sys
from typing import Any

import pytest
from kvcore import errors
from kvcore.transport import Transport

GUIDE = pathlib.Path(__file__).resolve().parents[3] / "docs/transport.md"
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.S)


def test_the_asyncio_example(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(BLOCKS[0], GUIDE.name, "exec"), {})
    printed = capsys.readouterr().out
    assert printed == "[b'hello', 5]\n"
    assert f"# {printed.strip()}" in BLOCKS[0]


def test_a_wait_that_ends_is_not_an_operation_that_ends() -> None:
    made: dict[str, Any] = {"asyncio": asyncio}
    exec(compile(BLOCKS[1], GUIDE.name, "exec"), made)

    async def run() -> None:
        with Transport() as owner, Transport(pacing_bytes_per_s=1000) as peer:
            link = peer.connect(owner.listen("tcp:127.0.0.1:0"))
            await link.wait_up_async(10)
            source, target = peer.allocate(1 << 20), owner.allocate(1 << 20)
            op = link.write(source, [(0, 0, 1 << 20)], target.grant().token)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(op, 0.1)
            assert not op.done, "wait_for has ended the operation"
            with pytest.raises(errors.Cancelled):
                await made["within"](op, 0.1)
            assert op.done

    asyncio.run(run())


def test_an_ipv6_listener_takes_no_ipv4_peers() -> None:
    with Transport(key=bytes(32)) as owner, Transport(key=bytes(32)) as peer:
        try:
            bound = owner.listen("tcp:[::]:0")
        except errors.KvcoreError:
            pytest.skip("this host has no IPv6")
        port = bound.rsplit(":", 1)[1]
        peer.connect(f"tcp:[::1]:{port}").wait_up(10)
        with pytest.raises(errors.PeerDead):
            peer.connect(f"tcp:127.0.0.1:{port}").wait_up(10)


@pytest.mark.parametrize("scheme", ["tcp", "shm"])
def test_places_that_overlap(scheme: str, tmp_path: pathlib.Path) -> None:
    address = "tcp:127.0.0.1:0" if scheme == "tcp" else f"shm:{tmp_path}/l.sock"
    with Transport() as owner, Transport() as peer:
        link = peer.connect(owner.listen(address))
        source, target = peer.allocate(200), owner.allocate(200)
        source.data[:] = bytes(range(200))
        op = link.write(source, [(0, 0, 100), (100, 50, 100)], target.grant().token)
        if scheme == "shm":
            assert op.wait(10) == 200
        else:
            with pytest.raises(errors.Corrupt):
                op.wait(10)


OWNER = """
import sys
from kvcore.transport import Transport
with Transport(keepalive_s=0) as t:
    t.listen(sys.argv[1])
    print("up", flush=True)
    t.accept().send(t.allocate(1 << 20).grant().token)
    sys.stdin.read()
"""


@pytest.mark.parametrize("keepalive_s", [0, 0.5])
def test_a_stopped_owner_of_an_shm_link(keepalive_s: float, tmp_path: pathlib.Path) -> None:
    """Its copy may be half done: the writer's memory stays the link's past the deadline."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, f"shm:{tmp_path}/l.sock"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert owner.stdout is not None and owner.stdout.readline() == b"up\n"
        with Transport(keepalive_s=keepalive_s) as peer:
            link = peer.connect(f"shm:{tmp_path}/l.sock")
            token, source = link.recv(10), peer.allocate(1 << 20)
            owner.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, owner.pid, os.WSTOPPED)  # every thread of it
            op = link.write(source, [(0, 0, 1 << 20)], token, deadline_s=0.1)
            if keepalive_s:
                with pytest.raises(errors.PeerHung):
                    op.wait(10)
                return
            with pytest.raises(errors.Timeout, match="no operation within"):
                op.wait(0.5)
            assert not op.done
            owner.send_signal(signal.SIGCONT)
            try:
                assert op.wait(10) == 1 << 20
            except errors.Timeout:
                assert op.done
    finally:
        owner.kill()
        owner.communicate()
