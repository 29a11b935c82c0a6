"""Lending over shm: bytes read where they lie, and how long the lender leaves them alone."""

from __future__ import annotations

import asyncio
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest
from kvcore import errors
from kvcore.transport import Borrowed, Grant, Link, Region, Transport


class Ends:
    """A lender and a borrower in this process."""

    def __init__(self, address: str) -> None:
        self.lender, self.borrower = Transport(), Transport()
        self.link: Link = self.borrower.connect(self.lender.listen(address))
        self.link.wait_up(5)
        self.lender.accept(5)
        self.region: Region = self.lender.allocate(1 << 20)
        self.region.data[:] = np.arange(1 << 20, dtype=np.uint32).astype(np.uint8).tobytes()


@pytest.fixture
def ends(tmp_path: pathlib.Path) -> Iterator[Ends]:
    made = Ends(f"shm:{tmp_path}/link.sock")
    yield made
    made.borrower.close()
    made.lender.close()


def test_spans_are_the_lenders_memory_read_only(ends: Ends) -> None:
    grant = ends.region.grant(rights="r")
    borrowed = ends.link.borrow(grant.token, [(5, 10), (4096, 8192)]).wait(5)
    assert [bytes(s) for s in borrowed.spans] == [
        bytes(ends.region.data[5:15]), bytes(ends.region.data[4096:12288])
    ]  # fmt: skip
    ends.region.data[5] = 77
    assert borrowed.spans[0][0] == 77
    assert borrowed.spans[0].readonly and borrowed.valid
    with pytest.raises(TypeError):
        borrowed.spans[0][0] = 1
    borrowed.give_back()
    borrowed.give_back()
    assert not borrowed.valid
    returned = grant.returned(5)
    assert (returned.lease, returned.error) == (borrowed.lease, None)
    with pytest.raises(errors.Timeout):
        grant.returned(0.1)


def test_arrays_are_read_only_also_through_dlpack(ends: Ends) -> None:
    grant = ends.region.grant(rights="r")
    with ends.link.borrow(grant.token, [(0, 4096)]).wait(5) as borrowed:
        array = borrowed.arrays()[0]
        other = np.from_dlpack(array)
        assert np.array_equal(other, np.frombuffer(ends.region.data[:4096], np.uint8))
        assert not array.flags.writeable and not other.flags.writeable
        assert other.ctypes.data == array.ctypes.data
        with pytest.raises(BufferError):
            array.__dlpack__()  # a consumer that knows of no read-only memory
    assert grant.returned(5).error is None


def test_revoke_waits_for_the_lease(ends: Ends) -> None:
    grant = ends.region.grant(rights="r")
    borrowed = ends.link.borrow(grant.token, [(0, 4096)]).wait(5)
    with pytest.raises(errors.Timeout):
        grant.revoke(timeout_s=0.1)
    with pytest.raises(errors.Stale):
        ends.link.borrow(grant.token, [(0, 4096)]).wait(5)
    with pytest.raises(errors.Timeout):
        grant.revoke(timeout_s=0.1)  # still
    borrowed.give_back()
    grant.revoke(timeout_s=5)
    grant.revoke()


def test_an_expired_lease_is_not_valid(ends: Ends) -> None:
    grant = ends.region.grant(rights="r", expires_s=0.3)
    borrowed = ends.link.borrow(grant.token, [(0, 4096)]).wait(5)
    assert borrowed.valid
    assert isinstance(grant.returned(5).error, errors.Timeout)
    assert not borrowed.valid


@pytest.mark.parametrize(
    ("ranges", "error"),
    [([], errors.InvalidArgument), ([(0, 0)], errors.InvalidArgument),
     ([(4000, 97)], errors.InvalidArgument), ([(0, 1 << 50)], errors.InvalidArgument)],
)  # fmt: skip
def test_ranges_outside_the_grant(
    ends: Ends, ranges: list[tuple[int, int]], error: type[Exception]
) -> None:
    grant = ends.region.grant([(0, 4096)], rights="r")
    with pytest.raises(error):
        ends.link.borrow(grant.token, ranges).wait(5)


def test_memory_that_cannot_be_lent(ends: Ends) -> None:
    memory = bytearray(4096)
    region = ends.lender.register(memory)
    with pytest.raises(errors.Unsupported, match="memfd"):
        ends.link.borrow(region.grant(rights="r").token, [(0, 10)]).wait(5)
    with pytest.raises(errors.InvalidArgument, match="reading"):
        ends.link.borrow(ends.region.grant(rights="w").token, [(0, 10)]).wait(5)


def test_tcp_does_not_lend() -> None:
    with Transport() as a, Transport() as b:
        link = b.connect(a.listen("tcp:127.0.0.1:0"))
        with pytest.raises(errors.Unsupported, match="tcp links cannot lend"):
            link.borrow(bytes(16), [(0, 10)])


def test_asyncio(ends: Ends) -> None:
    async def both() -> tuple[Borrowed, Grant]:
        grant = ends.region.grant(rights="r")
        borrowed = await ends.link.borrow(grant.token, [(0, 100)])
        borrowed.give_back()
        assert (await grant.returned_async(5)).error is None
        return borrowed, grant

    borrowed, _ = asyncio.run(both())
    assert len(borrowed.spans[0]) == 100


LENDER = """
import sys
from kvcore.transport import Transport
with Transport() as t:
    address = t.listen(sys.argv[1])
    region = t.allocate(1 << 20)
    region.data[:] = bytes([7]) * (1 << 20)
    grant = region.grant(rights="r")
    print(grant.token.hex(), flush=True)
    sys.stdin.read()
"""


def test_the_bytes_outlive_a_killed_lender(tmp_path: pathlib.Path) -> None:
    address = f"shm:{tmp_path}/link.sock"
    lender = subprocess.Popen(
        [sys.executable, "-c", LENDER, address],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert lender.stdout is not None
    token = bytes.fromhex(lender.stdout.readline())
    with Transport() as t:
        link = t.connect(address)
        borrowed = link.borrow(token, [(0, 1 << 20)]).wait(5)
        lender.send_signal(signal.SIGKILL)
        lender.wait()
        start = time.monotonic()
        with pytest.raises(errors.PeerDead):
            link.recv(5)
        assert time.monotonic() - start < 2
        assert borrowed.valid
        borrowed.give_back()
    assert bytes(borrowed.spans[0]) == bytes([7]) * (1 << 20)
    lender.communicate()
