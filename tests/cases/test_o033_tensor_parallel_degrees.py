"""O33 (vllm#45330), O35 (sglang#15674): prefill and decode with unlike tensor parallelism.

8 KV heads from 8 ranks to 16 tripped an assert, since replication caps heads at 1; unequal degrees
were accepted and collapsed under load. The plan covers each layer and head of a receiver exactly
once, or refuses by name; what it plans arrives whole, 128 requests at once too.
"""

from __future__ import annotations

import itertools

import pytest
from kvcore import stream
from kvcore.errors import Unsupported
from kvcore.stream import Side, heads_of_rank, plan_shares
from support import groups

HEADS = (1, 2, 3, 4, 8, 10)
DEGREES = (1, 2, 4, 8, 16)


def ranks(heads: int, degree: int) -> list[Side]:
    return [groups.side(heads_of_rank(heads, degree, rank)) for rank in range(degree)]


@pytest.mark.parametrize("heads", HEADS)
def test_each_head_once_or_refused_by_name(heads: int) -> None:
    for p, d in itertools.product(DEGREES, DEGREES):
        uneven = [n for n in (p, d) if heads % n and n % heads]
        if uneven:
            with pytest.raises(Unsupported, match=f"tp_degree={uneven[0]} .*num_kv_heads={heads} "):
                ranks(heads, p), ranks(heads, d)
            continue
        senders = ranks(heads, p)
        for rank, receiver in enumerate(ranks(heads, d)):
            given = [
                (layer, head)
                for _, share in plan_shares(senders, receiver, rank)
                for layer in range(share.layer_begin, share.layer_begin + share.num_layers)
                for head in range(share.head_begin, share.head_begin + share.num_heads)
            ]
            first, count = receiver.head_begin, receiver.spec.num_kv_heads
            assert sorted(given) == list(itertools.product((0, 1), range(first, first + count)))


@pytest.mark.parametrize(
    ("heads", "p", "d"), [(4, 2, 1), (4, 1, 2), (3, 3, 1), (8, 8, 16), (8, 2, 4), (2, 4, 1)]
)
def test_what_is_planned_arrives(heads: int, p: int, d: int) -> None:
    hub = stream.LoopbackHub()
    senders = groups.make_group(ranks(heads, p), hub, "p")
    receivers = groups.make_group(ranks(heads, d), hub, "d")
    for rank, receiver in enumerate(receivers):
        to, _ = groups.send(senders, receiver, 75, rank)
        receiver.wait(1)
        assert receiver.events[0][0] == "complete", receiver.events
        assert receiver.wrong_layers(to, 75) == 0
    groups.close(senders + receivers)


def test_128_requests_at_once_between_unequal_degrees() -> None:
    hub = stream.LoopbackHub()
    senders = groups.make_group(ranks(4, 2), hub, "p", frames=300)
    (receiver,) = groups.make_group(ranks(4, 1), hub, "d", frames=300)
    sent = [groups.send(senders, receiver, 50)[0] for _ in range(128)]
    receiver.wait(128)
    assert {event[0] for event in receiver.events} == {"complete"}
    assert sum(receiver.wrong_layers(pages, 50) for pages in sent) == 0
    for rank in senders:
        rank.wait(128)
        assert {event[0] for event in rank.events} == {"sent"}
    groups.close([*senders, receiver])
