"""O50 (Mooncake#1369): many handshakes at a time crashed a daemon that encoded shared state.

Clients connect from many threads while regions come and go; every one gets in. (The same under
the thread sanitizer: tests/cpp/transport in the tsan preset.)
"""

from __future__ import annotations

import pathlib
import threading

import pytest
from kvcore.transport import Transport

THREADS, ROUNDS = 16, 12


@pytest.mark.parametrize("scheme", ["shm", "tcp"])
def test_all_get_in_while_regions_change(tmp_path: pathlib.Path, scheme: str) -> None:
    address = f"shm:{tmp_path}/o50.sock" if scheme == "shm" else "tcp:127.0.0.1:0"
    failures: list[BaseException] = []
    done = threading.Event()
    with Transport() as owner:
        bound = owner.listen(address)

        def client() -> None:
            try:
                for _ in range(ROUNDS):
                    with Transport() as peer:
                        connected = peer.connect(bound)
                        connected.send(b"here")
                        assert connected.recv(20) == b"welcome"
            except BaseException as error:
                failures.append(error)

        def regions() -> None:
            while not done.is_set():
                region = owner.allocate(1 << 16)
                region.grant().revoke()
                region.unregister()

        threads = [threading.Thread(target=client) for _ in range(THREADS)]
        changing = threading.Thread(target=regions)
        for thread in (*threads, changing):
            thread.start()
        for _ in range(THREADS * ROUNDS):
            link = owner.accept(20)
            assert link.recv(20) == b"here"
            link.send(b"welcome")
        for thread in threads:
            thread.join()
        done.set()
        changing.join()
    assert not failures, failures[0]
