"""O41 (nixl#2067, #1955): handles of transfers dropped while the transfer is under way.

A request handle released with work outstanding was used after it was freed. Whatever a user
drops, closes or cancels, every operation ends once and the memory stays until then.
"""

from __future__ import annotations

import gc
import pathlib
import random

import pytest
from kvcore import errors
from kvcore.transport import Op, Transport

SIZE = 4 << 20


@pytest.mark.parametrize("link", ["shm", "tcp"])
def test_64_transfers_dropped_at_random(tmp_path: pathlib.Path, link: str) -> None:
    rng = random.Random(41)
    with Transport() as owner, Transport() as peer:
        address = f"shm:{tmp_path}/o41.sock" if link == "shm" else "tcp:127.0.0.1:0"
        bound = owner.listen(address)
        target = owner.allocate(SIZE)
        token = target.grant(rights="rw").token
        for round_number in range(4):
            to_owner = peer.connect(bound)
            source = peer.allocate(SIZE)
            kept: list[Op] = []
            for i in range(64):
                move = to_owner.write if rng.random() < 0.7 else to_owner.read
                op = move(source, [(i * 1000, i * 1000, 60_000)], token)
                if rng.random() < 0.3:
                    op.cancel()
                if rng.random() < 0.5:
                    kept.append(op)
            del op, source
            gc.collect()
            if round_number % 2:
                to_owner.close()
            for op in kept:
                try:
                    assert op.wait(10) == 60_000
                except (errors.Cancelled, errors.PeerDead):
                    continue
            assert to_owner.info()["outstanding_ops"] == 0 or round_number % 2 == 0
