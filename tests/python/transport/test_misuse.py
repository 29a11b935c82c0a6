"""What is wrong with a call is told by a typed error, and nothing else is touched by it."""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from kvcore.errors import Cancelled, InvalidArgument, IoError, Timeout
from kvcore.transport import Link, Region, Transport

NBYTES = 4096


class Pair(NamedTuple):
    ours: Transport
    theirs: Transport
    link: Link  # of ours
    peer: Link  # the same one, of theirs


@pytest.fixture(params=["tcp", "shm"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    address = "tcp:127.0.0.1:0" if request.param == "tcp" else f"shm:{tmp_path}/a.sock"
    with Transport() as ours, Transport() as theirs:
        link = ours.connect(theirs.listen(address))
        link.wait_up(10)
        yield Pair(ours, theirs, link, theirs.accept(10))


def test_memory_stays_when_its_tensor_gets_other_memory(pair: Pair) -> None:
    tensor = torch.zeros(1 << 20, dtype=torch.uint8)
    address, nbytes = tensor.data_ptr(), tensor.numel()
    region = pair.theirs.register(tensor)
    token = region.grant().token
    tensor.data = torch.zeros(1)
    others = [torch.full((nbytes,), 7, dtype=torch.uint8) for _ in range(8)]
    source = pair.ours.allocate(nbytes)
    source.data[:] = b"\5" * nbytes
    assert pair.link.write(source, [(0, 0, nbytes)], token).wait(10) == nbytes
    assert ctypes.string_at(address, nbytes) == b"\5" * nbytes
    assert all(bool((other == 7).all()) for other in others)


def test_a_region_of_another_transport_is_refused(pair: Pair) -> None:
    granted = pair.theirs.allocate(NBYTES).grant(rights="rw").token
    ours = pair.ours.allocate(NBYTES)
    with Transport() as third:
        foreign = third.allocate(NBYTES)
        assert foreign.id == ours.id, "what would be taken for it"
        for region in (foreign, np.zeros(NBYTES, np.uint8)):
            for post in (pair.link.write, pair.link.read):
                with pytest.raises(InvalidArgument, match="own transport"):
                    post(region, [(0, 0, 8)], granted)


def test_no_ranges_grant_nothing(pair: Pair) -> None:
    region = pair.ours.allocate(NBYTES)
    with pytest.raises(InvalidArgument, match="range"):
        region.grant([])


ROWS: list[tuple[Any, str]] = [
    ([(-1, 0, 8)], r"segments\[0\]=\(-1, 0, 8\)"),
    ([(0, 0, 8), (0, 0, 8, 9)], r"segments\[1\]=\(0, 0, 8, 9\)"),
    ([(0, 0)], r"segments\[0\]=\(0, 0\)"),
    ([(0, 0, 1 << 64)], r"segments\[0\]=.*2\*\*63"),
    ([(0, 0.5, 8)], r"segments\[0\]=\(0, 0.5, 8\)"),
    (["abc"], r"segments\[0\]='abc'"),
    (np.zeros((1, 2), np.int64), "segments"),
    (np.full((1, 3), -1, np.int64), r"segments\[0\]\[0\]=-1"),
]


@pytest.mark.parametrize(("rows", "says"), ROWS)
def test_segments(pair: Pair, rows: Any, says: str) -> None:
    region, token = pair.ours.allocate(NBYTES), pair.theirs.allocate(NBYTES).grant().token
    for post in (pair.link.write, pair.link.read):
        with pytest.raises(InvalidArgument, match=says):
            post(region, rows, token)


CALLS: list[tuple[Callable[[Pair, Region], Any], str]] = [
    (lambda p, r: p.link.write(r, [(0, 0, 8)], b"x" * 16, tag=1 << 64), "tag=18446744073709551616"),
    (lambda p, r: p.link.write(r, [(0, 0, 8)], b"x" * 16, deadline_s=float("nan")), "deadline_s"),
    (lambda p, r: p.link.send(b"x", deadline_s=float("inf")), "deadline_s=inf"),
    (lambda p, r: p.link.recv(float("nan")), "timeout_s=nan"),
    (lambda p, r: r.grant([(0, 8, 9)]), r"ranges\[0\]=\(0, 8, 9\)"),
    (lambda p, r: r.grant([(-8, 8)]), r"ranges\[0\]=\(-8, 8\)"),
    (lambda p, r: r.grant(expires_s=float("nan")), "expires_s=nan"),
    (lambda p, r: p.ours.register(np.array([{}], object)), "Python objects"),
    (lambda p, r: p.ours.register(torch.zeros(8, requires_grad=True)), "cannot be exported"),
    (lambda p, r: Transport(key="k" * 32), "key is a str"),
    (lambda p, r: Transport(handshake_s=0), "handshake_s=0"),
    (lambda p, r: Transport(keepalive_s=-1), "keepalive_s=-1"),
]


@pytest.mark.parametrize(("call", "says"), CALLS)
def test_arguments(pair: Pair, call: Callable[[Pair, Region], Any], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        call(pair, pair.ours.allocate(NBYTES))


def test_an_owner_that_is_not_told_need_not_look(pair: Pair) -> None:
    """More writes than its credits could hold arrivals of; then one that is told, alone."""
    token = pair.theirs.allocate(NBYTES).grant().token
    ours = pair.ours.allocate(NBYTES)
    for _ in range(150):
        ops = [pair.link.write(ours, [(0, 0, 8)], token, notify=False) for _ in range(1000)]
        for op in ops:
            op.wait(20)
    pair.link.write(ours, [(0, 0, 8)], token, tag=7).wait(20)
    assert pair.peer.arrival(10).tag == 7
    with pytest.raises(Timeout):
        pair.peer.arrival(0.05)


def test_more_memory_than_there_is(pair: Pair) -> None:
    with pytest.raises(IoError, match=f"nbytes={1 << 50}"):
        pair.ours.allocate(1 << 50)


def test_a_closed_transport_says_so(pair: Pair) -> None:
    told: list[BaseException] = []

    def wait() -> None:
        try:
            pair.theirs.accept()
        except Cancelled as error:
            told.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.05)
    pair.theirs.close()
    waiting.join(5)
    assert len(told) == 1, "close() wakes accept()"
    calls: list[Callable[[], Any]] = [
        lambda: pair.theirs.allocate(8),
        lambda: pair.theirs.connect("tcp:127.0.0.1:1"),
    ]
    for call in calls:
        with pytest.raises(InvalidArgument, match="it is closed"):
            call()
    with pytest.raises(Cancelled):
        pair.theirs.accept(1)
    with pytest.raises(Exception, match="closed"):
        pair.link.recv(10)
    with pytest.raises(Exception, match="closed"):
        pair.link.wait_up(1)  # it was, but is no more


def test_close_wakes_asyncio(tmp_path: Path) -> None:
    async def run() -> None:
        transport = Transport()
        transport.listen(f"shm:{tmp_path}/b.sock")
        waiting = asyncio.create_task(transport.accept_async())
        await asyncio.sleep(0.05)
        transport.close()
        with pytest.raises(Cancelled):
            await asyncio.wait_for(waiting, 5)

    asyncio.run(run())


def test_threads_that_wait_do_not_delay_each_other(pair: Pair) -> None:
    """One sits in recv() on a quiet link while another goes back and forth."""

    def echo() -> None:
        for _ in range(200):
            pair.peer.send(pair.peer.recv(10))

    def idle() -> None:
        with pytest.raises(Timeout):
            pair.ours.accept(3)

    quiet, other = threading.Thread(target=idle), threading.Thread(target=echo)
    quiet.start()
    time.sleep(0.02)
    other.start()
    took = []
    for _ in range(200):
        start = time.perf_counter()
        pair.link.send(b"ping")
        assert pair.link.recv(10) == b"ping"
        took.append(time.perf_counter() - start)
    other.join()
    quiet.join()
    # Were events taken by the wrong thread, a tenth of the trips would wait for its next look.
    assert sorted(took)[180] < 0.015


def test_a_forked_child_is_told_that_the_links_are_not_its_own(pair: Pair) -> None:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            for call in (lambda: pair.link.send(b"lost"), lambda: pair.ours.accept(1)):
                try:
                    call()
                except InvalidArgument as error:
                    code = 0 if "of its own" in str(error) else 2
                else:
                    code = 3
                    break
            pair.ours.close()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    pair.link.send(b"here")
    assert pair.peer.recv(10) == b"here"


def test_a_burst_of_links_holds() -> None:
    """Each link is three connections at first; none costs another its place."""
    with Transport() as theirs, Transport() as ours:
        address = theirs.listen("tcp:127.0.0.1:0")
        links = [ours.connect(address) for _ in range(100)]
        for link in links:
            link.wait_up(20)
        accepted = [theirs.accept(10) for _ in links]
        time.sleep(2.5)  # past the handshake's time
        for number, link in enumerate(links):
            link.send(str(number).encode())
        said = sorted(int(link.recv(10)) for link in accepted)
        assert said == list(range(len(links)))
