"""O76 (vllm#51579), O77 (vllm#25059), O109 (vllm#20965).

What a killed process leaves, and whose port.

Shared-memory files stayed after SIGKILL; two processes with the same defaults collided on a port.
Arenas have no name in any file system, a port is picked and published, and a dead owner's socket
file is replaced.
"""

from __future__ import annotations

import multiprocessing
import os
import pathlib
import signal

import pytest
from kvcore.errors import IoError
from kvcore.transport import Transport
from support.peer_death import _receive

context = multiprocessing.get_context("forkserver")


def test_twenty_kills_leave_no_shared_memory_and_the_address_is_free(
    tmp_path: pathlib.Path,
) -> None:
    before = set(os.listdir("/dev/shm"))
    for _ in range(20):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_receive, args=(theirs, f"shm:{tmp_path}/worker.sock"), daemon=True
        )
        process.start()
        assert ours.recv()[0] == f"shm:{tmp_path}/worker.sock"
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join(10)
    assert set(os.listdir("/dev/shm")) - before == set()
    assert os.listdir(tmp_path) == ["worker.sock"]


def test_twenty_with_the_same_defaults_get_ports_of_their_own() -> None:
    transports = [Transport() for _ in range(20)]
    addresses = [t.listen("tcp:127.0.0.1:0") for t in transports]
    assert len(set(addresses)) == 20
    for transport, address in zip(transports, addresses, strict=True):
        transport.connect(address).wait_up(5)
    with pytest.raises(IoError, match=addresses[0].rsplit(":", 1)[1]):
        transports[1].listen(addresses[0])  # a port that is taken is one clear error
    for transport in transports:
        transport.close()


def test_a_port_in_time_wait_can_be_had_again() -> None:
    address = "tcp:127.0.0.1:0"
    for _ in range(20):
        with Transport() as owner, Transport() as peer:
            address = owner.listen(address)
            link = peer.connect(address)
            link.wait_up(5)
            owner.accept(5).close()
