"""kvcore.transport: the Python face of links, sync and asyncio, over tcp and shm."""

from __future__ import annotations

import asyncio
import gc
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from kvcore import errors
from kvcore.transport import BACKGROUND, Link, Op, Transport

ROOT = pathlib.Path(__file__).resolve().parents[3]
KEY = bytes(range(32))
SIZE = 1 << 20


@pytest.fixture(params=["tcp", "shm"])
def address(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> str:
    return "tcp:127.0.0.1:0" if request.param == "tcp" else f"shm:{tmp_path}/l.sock"


@pytest.fixture
def pair(address: str) -> Iterator[tuple[Transport, Transport, Link, Link]]:
    with Transport(key=KEY, identity=b"owner") as owner, Transport(key=KEY) as peer:
        to_owner = peer.connect(owner.listen(address))
        to_owner.wait_up(5)
        yield owner, peer, owner.accept(5), to_owner


Pair = tuple[Transport, Transport, Link, Link]


def test_messages_and_identity(pair: Pair) -> None:
    _, _, to_peer, to_owner = pair
    assert to_owner.info()["peer_identity"] == b"owner"
    for i in range(100):
        to_owner.send(bytes([i]) * i)
        to_peer.send(memoryview(bytearray(b"x" * i)), BACKGROUND)
    for i in range(100):
        assert to_peer.recv(5) == bytes([i]) * i
        assert to_owner.recv(5) == b"x" * i
    with pytest.raises(errors.Timeout):
        to_owner.recv(0.01)
    with pytest.raises(errors.InvalidArgument):
        to_owner.send(bytes(1024 * 1024 + 1))


def test_a_send_completes_when_the_peer_has_it(pair: Pair) -> None:
    _, _, to_peer, to_owner = pair
    op = to_owner.send(b"hello", completion=True)
    assert op is not None and op.wait(5) == 5
    assert to_peer.recv(0) == b"hello"
    assert to_owner.send(b"nobody asks") is None
    late = to_owner.send(b"late", deadline_s=-1)
    assert late is not None
    with pytest.raises(errors.Timeout, match="deadline passed"):
        late.wait(5)


def test_role_and_digests_reach_the_peer(address: str) -> None:
    model, layout = bytes([1] * 32), bytes([2] * 32)
    with Transport(role="decode", model_digest=model, layout_digest=layout) as owner:
        bound = owner.listen(address)
        with Transport(model_digest=model) as peer, Transport(model_digest=layout) as other:
            link = peer.connect(bound)
            link.wait_up(5)
            info = link.info()
            assert info["peer_role"] == "decode"
            assert (info["peer_model"], info["peer_layout"]) == (model, layout)
            with pytest.raises(errors.Unsupported, match="another model"):
                other.connect(bound).wait_up(5)
    with pytest.raises(errors.InvalidArgument, match="layout_digest has 3 bytes"):
        Transport(layout_digest=b"abc")


def test_a_bound_grant_serves_its_peer_alone(address: str) -> None:
    with Transport() as owner, Transport(identity=b"a") as a, Transport(identity=b"b") as b:
        bound, target = owner.listen(address), owner.allocate(SIZE)
        token = target.grant(peer=b"a").token
        assert a.connect(bound).write(a.allocate(100), [(0, 0, 100)], token).wait(5) == 100
        with pytest.raises(errors.Stale):
            b.connect(bound).write(b.allocate(100), [(0, 0, 100)], token).wait(5)


def test_revoke_waits_for_a_late_fence() -> None:
    class LateFence:
        """The core of a transport whose fence comes with an event."""

        def __init__(self, core: object) -> None:
            self.core, self.polls = core, 0

        def __getattr__(self, name: str) -> object:
            return getattr(self.core, name)

        def revoke_grant(self, token: bytes) -> bool:
            self.token = token
            return True

        def poll(self, max_events: int) -> list[tuple[object, ...]]:
            self.polls += 1
            return [("fenced", 0, self.token)] if self.polls == 3 else []

    with Transport() as transport:
        grant = transport.allocate(SIZE).grant()
        late = transport._core = LateFence(transport._core)
        grant.revoke()
        assert late.polls == 3
        transport._core = late.core


def test_write_read_and_arrival(pair: Pair) -> None:
    owner, peer, to_peer, to_owner = pair
    target, source = owner.allocate(SIZE), peer.allocate(SIZE)
    source.data[:] = os.urandom(SIZE)
    grant = target.grant([(4096, 8192), (500_000, 100_000)], rights="rw")
    op = to_owner.write(
        source, [(0, 4096, 8192), (9000, 500_001, 99_999)], grant.token, tag=2**64 - 1
    )
    assert op.wait(5) == 8192 + 99_999 and op.done
    arrival = to_peer.arrival(5)
    assert (arrival.tag, arrival.bytes, arrival.grant) == (2**64 - 1, 8192 + 99_999, grant.token)
    assert abs(arrival.at_ns - time.monotonic_ns()) < 5e9
    assert target.data[4096:12288] == source.data[:8192]
    assert target.data[500_001:600_000] == source.data[9000:108_999]
    back = peer.allocate(8192)
    assert to_owner.read(back, [(0, 4096, 8192)], grant.token).wait(5) == 8192
    assert back.data == source.data[:8192]
    with pytest.raises(errors.InvalidArgument, match="not inside one granted range"):
        to_owner.write(source, [(0, 4095, 2)], grant.token).wait(5)
    grant.revoke()
    grant.revoke()
    with pytest.raises(errors.Stale):
        to_owner.write(source, [(0, 4096, 1)], grant.token).wait(5)
    with pytest.raises(errors.InvalidArgument, match="region of 1048576 bytes"):
        to_owner.write(source, [(SIZE, 4096, 1)], grant.token)
    with pytest.raises(errors.InvalidArgument, match="rights"):
        target.grant(rights="x")


def test_numpy_and_torch_memory(pair: Pair) -> None:
    torch = pytest.importorskip("torch")
    owner, peer, _, to_owner = pair
    array = np.zeros((100, 30), np.float32)
    target = owner.register(array)
    source = peer.allocate(array.nbytes)
    expected = np.random.default_rng(1).random((100, 30), np.float32)
    source.data[:] = expected.tobytes()
    to_owner.write(source, [(0, 0, array.nbytes)], target.grant().token).wait(5)
    np.testing.assert_array_equal(array, expected)
    tensor = torch.zeros(50, 2, dtype=torch.bfloat16)
    region = owner.register(tensor)
    assert (region.nbytes, region.data) == (200, None)
    to_owner.write(source, [(0, 0, 200)], region.grant().token).wait(5)
    assert bytes(tensor.view(torch.uint8).numpy().tobytes()) == bytes(source.data[:200])
    for bad in (b"readonly", array[:, ::2], object(), tensor[:, :1]):
        with pytest.raises(errors.InvalidArgument):
            owner.register(bad)
    if to_owner.info()["scheme"] == "shm":
        private = peer.register(bytearray(100))
        with pytest.raises(errors.Unsupported, match="memfd"):
            to_owner.write(private, [(0, 0, 100)], target.grant().token).wait(5)


def test_deadline_cancel_and_pacing(pair: Pair) -> None:
    owner, peer, _, to_owner = pair
    token = owner.allocate(SIZE).grant().token
    source = peer.allocate(SIZE)
    to_owner.set_pacing(100_000)
    with pytest.raises(errors.Timeout):
        to_owner.write(source, [(0, 0, SIZE)], token, deadline_s=0.05).wait(5)
    op = to_owner.write(source, [(0, 0, SIZE)], token)
    with pytest.raises(errors.Timeout, match=r"no operation within 0.02 s"):
        op.wait(0.02)
    with pytest.raises(errors.InvalidArgument, match="used by 1 operations"):
        source.unregister()
    op.cancel()
    with pytest.raises(errors.Cancelled):
        op.wait(5)
    source.unregister()
    assert to_owner.info()["outstanding_ops"] == 0


def test_close_and_wrong_key(address: str) -> None:
    with Transport(key=KEY) as owner:
        bound = owner.listen(address)
        with Transport(key=bytes(32)) as stranger:
            link = stranger.connect(bound)
            with pytest.raises(errors.Unauthenticated):
                link.wait_up(5)
        peer = Transport(key=KEY)
        link = peer.connect(bound)
        accepted = owner.accept(5)
        peer.close()
        peer.close()
        with pytest.raises(errors.PeerDead):
            accepted.recv(5)
        with pytest.raises(errors.Cancelled):
            link.recv(5)
        with pytest.raises(errors.PeerDead):
            link.send(b"x")
        with pytest.raises(errors.Timeout):
            owner.accept(0.01)
    with pytest.raises(errors.InvalidArgument, match="32-byte key"):
        Transport().listen("tcp:0.0.0.0:0")


def test_asyncio(pair: Pair) -> None:
    owner, peer, to_peer, to_owner = pair
    target, source = owner.allocate(SIZE), peer.allocate(SIZE)
    token = target.grant(rights="rw").token

    async def main() -> None:
        async def push(i: int) -> int:
            return await to_owner.write(source, [(i * 1000, i * 1000, 1000)], token, tag=i)

        async def collect() -> list[int]:
            return [(await to_peer.arrival_async(5)).tag for _ in range(200)]

        tags, *moved = await asyncio.gather(collect(), *(push(i) for i in range(200)))
        assert tags == list(range(200)) and moved == [1000] * 200
        late = asyncio.ensure_future(to_peer.recv_async(5))
        await asyncio.sleep(0.05)
        assert not late.done()
        to_owner.send(b"now")
        assert await late == b"now"
        with pytest.raises(errors.Timeout):
            await to_peer.recv_async(0.02)
        with pytest.raises(errors.Stale):
            await to_owner.write(source, [(0, 0, 1)], bytes(16))

    asyncio.run(main())
    asyncio.run(main())  # a second loop


def test_memory_outlives_its_dropped_region(pair: Pair) -> None:
    owner, peer, _, to_owner = pair
    token = owner.allocate(SIZE).grant(rights="rw").token
    gc.collect()
    source = peer.allocate(SIZE)
    source.data[:100] = b"x" * 100
    assert to_owner.write(source, [(0, 0, 100)], token).wait(10) == 100
    source.data[:100] = bytes(100)
    assert to_owner.read(source, [(0, 0, 100)], token).wait(10) == 100
    assert source.data[:100] == b"x" * 100


def test_many_threads_wait_at_once(pair: Pair) -> None:
    owner, peer, _, to_owner = pair
    token = owner.allocate(SIZE).grant().token
    source = peer.allocate(SIZE)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(20):
                ops: list[Op] = [to_owner.write(source, [(0, 0, 100)], token) for _ in range(5)]
                assert [op.wait(10) for op in ops] == [100] * 5
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


def test_the_example_and_a_killed_peer(tmp_path: pathlib.Path) -> None:
    example = [sys.executable, str(ROOT / "examples/two_hosts.py")]
    server = subprocess.Popen(
        [*example, "serve", "tcp:127.0.0.1:0"], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    bound = server.stdout.readline().split()[-1]
    pushed = subprocess.run(
        [*example, "push", bound], capture_output=True, text=True, check=True, timeout=60
    )
    assert "67108864 bytes written over tcp" in pushed.stdout
    assert "67108864 bytes arrived, tag 42, last byte 255" in server.communicate(timeout=30)[0]

    server = subprocess.Popen(
        [*example, "serve", "tcp:127.0.0.1:0"], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    with Transport() as t:
        link = t.connect(server.stdout.readline().split()[-1])
        link.recv(10)
        start = time.monotonic()
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(errors.PeerDead):
            link.recv(10)
        assert time.monotonic() - start < 2
    server.communicate()


def test_arrays_of_segments_and_tensors_of_regions(pair: Pair) -> None:
    owner, peer, to_peer, to_owner = pair
    target, source = owner.allocate(SIZE), peer.allocate(SIZE)
    sent, landed = torch.from_dlpack(source), np.from_dlpack(target)
    assert sent.dtype == torch.uint8 and sent.shape == (SIZE,)
    sent.copy_(torch.arange(SIZE, dtype=torch.int32).to(torch.uint8))
    at = np.arange(100) * 1000
    blocks = np.stack([at, at[::-1], np.full(100, 1000)], axis=1)
    token = target.grant(rights="rw").token
    for table in (blocks, np.asfortranarray(blocks), blocks.tolist()):
        landed_before = target.data[:]
        landed_before[:100_000] = bytes(100_000)
        assert to_owner.write(source, table, token).wait(10) == 100_000
        assert to_peer.arrival(10).bytes == 100_000
        expected = sent.numpy()[:100_000].reshape(100, 1000)[::-1].reshape(-1)
        assert np.array_equal(landed[:100_000], expected)
    assert to_owner.read(source, blocks[:3], token).wait(10) == 3000
    for wrong in (blocks[:, :2], blocks.astype(np.int32), blocks[0], blocks.astype(float)):
        with pytest.raises(errors.InvalidArgument, match=r"int64 \[n, 3\]"):
            to_owner.write(source, wrong, token)
    blocks[7, 1] = -1
    with pytest.raises(errors.InvalidArgument, match=r"segments\[7\]\[1\]=-1"):
        to_owner.write(source, blocks, token)


def test_a_tensor_of_a_region_outlives_its_transport() -> None:
    with Transport() as transport:
        tensor = torch.from_dlpack(transport.allocate(SIZE))
    gc.collect()
    tensor.fill_(7)
    assert int(tensor.sum(dtype=torch.int64)) == 7 * SIZE


def test_a_registered_tensor_is_lent_as_it_is() -> None:
    with Transport() as transport:
        region = transport.register(torch.arange(12).reshape(3, 4).contiguous().numpy())
        assert np.from_dlpack(region).nbytes == 96
        region.unregister()
        with pytest.raises(errors.InvalidArgument, match="unregistered"):
            region.__dlpack__()
