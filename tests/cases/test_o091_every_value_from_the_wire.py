"""O91 (llama.cpp#13067), O92 (llama.cpp#25764): enums and ranges from the wire, used unchecked.

A value of an enum that nobody had named crashed a server, and a bounds test in wrapping
arithmetic let negative strides pass. Every byte of a grant takes every value, and every range its
worst ones: it is refused by name, by the side that owns the memory.
"""

from __future__ import annotations

import os

import pytest
from kvcore import stream
from kvcore.errors import Corrupt, InvalidArgument, KvcoreError, Unsupported
from kvcore.transport import Transport
from support.stream_pages import alloc, make_pool

WORST = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 4096, 2**64 - 1]
SIZE = 4096


def test_every_byte_of_a_grant_takes_every_value() -> None:
    hub = stream.LoopbackHub()
    pool = make_pool()
    with stream.Endpoint(pool, ["loopback:o91"], hub=hub) as endpoint:
        pages, _ = alloc(pool, 40)
        grant = endpoint.grant(os.urandom(16), pages, 40)
        accepted = refused = 0
        for at in range(len(grant)):
            for value in range(256):
                changed = bytearray(grant)
                changed[at] = value
                try:
                    told = stream.describe_grant(bytes(changed))
                except (Corrupt, Unsupported) as error:
                    assert "grant" in str(error)
                    refused += 1
                else:
                    assert told["num_pages"] == len(pages) and told["kv_bytes"] > 0
                    accepted += 1
        assert accepted > 0 and refused > 10_000
        for cut in range(len(grant)):
            with pytest.raises((Corrupt, Unsupported)):
                stream.describe_grant(grant[:cut])


def test_ranges_at_their_worst_are_refused_by_the_owner() -> None:
    with Transport() as owner, Transport() as peer:
        link = peer.connect(owner.listen("tcp:127.0.0.1:0"))
        target, source = owner.allocate(SIZE), peer.allocate(SIZE)
        token = target.grant([(1024, 2048)], rights="rw").token
        before = bytes(target.data)
        for offset in WORST:
            for nbytes in (1, 16, SIZE):
                if offset >= 1024 and offset + nbytes <= 3072:
                    continue
                for move in (link.write, link.read):
                    with pytest.raises(InvalidArgument, match="not inside one granted range"):
                        move(source, [(0, offset, nbytes)], token).wait(5)
        assert bytes(target.data) == before
        for offset in WORST:
            for nbytes in WORST:
                if nbytes and offset + nbytes <= SIZE:
                    continue
                with pytest.raises(InvalidArgument):
                    link.write(source, [(offset, 1024, nbytes)], token)
                with pytest.raises(InvalidArgument):
                    target.grant([(offset, nbytes)])
        assert link.write(source, [(0, 1024, 2048)], token).wait(5) == 2048  # and it serves on


def test_ranges_that_overlap_or_are_empty_are_no_grant() -> None:
    with Transport() as owner:
        target = owner.allocate(SIZE)
        for ranges in ([(0, 0)], [(0, 100), (50, 100)], [(0, SIZE + 1)]):
            with pytest.raises(KvcoreError):
                target.grant(ranges)
