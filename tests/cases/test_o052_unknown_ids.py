"""O52 (vllm PR#43265), O54 (sglang PR#17430), O79 (sglang PR#39623).

Messages for no or another request.

A late notification tripped an assert and killed the engine, metadata of another request was
accepted, and unsolicited ids allocated state for ever. A message for an unknown, finished or
foreign hand-over is counted and dropped, and costs no memory.
"""

from __future__ import annotations

import os
import pathlib
import resource
import struct

from kvcore.transport import Transport
from support.stream_pair import push, stream_pair

TOKENS = 40
MAGIC, OPEN, MARK, COMMIT, ABORT, DONE = 0x4D53564B, 1, 2, 3, 4, 5


def message(kind: int, request: bytes, body: bytes) -> bytes:
    return struct.pack("<IBB", MAGIC, 2, kind) + request + os.urandom(16) + body


def bodies() -> list[tuple[int, bytes]]:
    return [
        (OPEN, bytes(16) + b"\0"),
        (MARK, struct.pack("<qq", 1, 1)),
        (COMMIT, struct.pack("<qI", 1, 5) + b"wrong"),
        (ABORT, struct.pack("<BI", 5, 3) + b"why"),
        (DONE, b""),
        (77, b"no such kind"),
    ]


def test_a_stranger_to_a_request_changes_nothing(tmp_path: pathlib.Path) -> None:
    with stream_pair(tmp_path, "tcp") as pair, Transport() as other:
        sender, request, _, _ = pair.start(TOKENS, stamp=1)
        for layer in range(3):
            sender.publish_upto(layer, TOKENS)
        link = other.connect(pair.decode.endpoint.addresses[0])
        link.wait_up(5)
        finished = os.urandom(16)
        for kind, body in bodies():
            if kind != OPEN:  # which would need the grant's secret
                link.send(message(kind, request, body))
            link.send(message(kind, finished, body), completion=True).wait(5)  # type: ignore[union-attr]
        push(sender, TOKENS, pair.prefill.pool.spec.num_layers)
        event = pair.decode.event(request)
        assert event[0] == "complete" and event[2] == b"payload"
        assert event[3].dropped == 3  # mark, commit and abort of another link than the sender's
        assert pair.decode.endpoint.stats().dropped == 8


def test_a_flood_of_random_ids_costs_no_memory(tmp_path: pathlib.Path) -> None:
    with stream_pair(tmp_path, "tcp") as pair, Transport() as other:
        link = other.connect(pair.decode.endpoint.addresses[0])
        link.wait_up(5)

        def flood(n: int) -> None:
            for i in range(n):
                kind, body = bodies()[i % 6]
                sent = link.send(message(kind, os.urandom(16), body), completion=i % 1000 == 999)
                if sent is not None:
                    sent.wait(10)

        flood(6_000)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        flood(60_000)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 8 << 10  # KiB
        sender, request, _, _ = pair.start(TOKENS, stamp=1)
        push(sender, TOKENS, pair.prefill.pool.spec.num_layers)
        assert pair.decode.event(request)[0] == "complete"
        assert pair.decode.endpoint.stats().dropped >= 66_000
