"""O46 (TensorRT-LLM PR#12313), O47 (vllm PR#50047): what a dead peer leaves behind.

Clean-up ran only when new work came, which a full pool prevented; a dead peer's state stayed
until a long timeout, and its successor at the same address was not served. Death is known within
2 s, without any new work, and the next process at the same address is as good as the first.
"""

from __future__ import annotations

import multiprocessing
import os
import pathlib
import signal
import time
from multiprocessing.connection import Connection

import pytest
from kvcore import stream
from support.peer_death import _push, _receive
from support.stream_pages import alloc, make_pool

TOKENS = 200
context = multiprocessing.get_context("forkserver")


@pytest.mark.parametrize("link", ["shm", "tcp"])
def test_a_full_pool_is_free_again_and_the_successor_is_served(
    tmp_path: pathlib.Path, link: str
) -> None:
    address = f"shm:{tmp_path}/decode.sock" if link == "shm" else "tcp:127.0.0.1:0"
    pool = make_pool(7)  # 14 pages: one hand-over holds nearly all
    with stream.Endpoint(pool, pacing_bytes_per_s=200_000) as endpoint:
        for _ in range(3):
            address, grant, pid, ours = decode_process(address)
            pages, owned = alloc(pool, TOKENS)
            sender = endpoint.open(grant, pages)
            _push(sender, pool.spec.num_layers)
            pool.decref(owned)
            time.sleep(0.2)
            assert pool.stats().io_pages == len(pages)
            os.kill(pid, signal.SIGKILL)
            began = time.monotonic()
            while pool.stats().io_pages:  # nobody calls the endpoint meanwhile
                assert time.monotonic() - began < 2
                time.sleep(0.01)
            (event,) = endpoint.poll()
            assert event[0] == "failed" and event[2] == "PeerDead"
            assert endpoint.stats().sending == 0 and endpoint.stats().links == ()
            ours.close()


def decode_process(address: str) -> tuple[str, bytes, int, Connection]:
    ours, theirs = context.Pipe()
    process = context.Process(target=_receive, args=(theirs, address), daemon=True)
    process.start()
    bound, grant = ours.recv()
    assert process.pid is not None
    return bound, grant, process.pid, ours
