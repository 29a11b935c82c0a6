"""O34 (vllm PR#41957): latent (MLA) caches are replicated over ranks.

Every rank of a prefill group holds the whole latent. All decode ranks read rank 0, and ranks could
not be told apart. Each receiver gets the whole latent once, receivers spread over the replicas, and
every sender's pages come back exactly once.
"""

from __future__ import annotations

from kvcore import stream
from kvcore.pages import PageSpec
from kvcore.stream import Side
from support import groups

LATENT = Side(
    PageSpec(3, 1, 576, 512, page_size=16, extent_pages=1, layout="canonical", latent=True)
)


def test_each_rank_gets_the_whole_latent_once_from_its_own_replica() -> None:
    hub = stream.LoopbackHub()
    senders = groups.make_group([LATENT] * 4, hub, "p")
    receivers = groups.make_group([LATENT] * 4, hub, "d")
    used = []
    for rank, receiver in enumerate(receivers):
        to, givers = groups.send(senders, receiver, 40, spread=rank)
        receiver.wait(1)
        assert receiver.events[0][0] == "complete"
        stats = receiver.events[0][3]
        assert stats.bytes == 3 * 3 * LATENT.spec.slice_bytes and stats.duplicates == 0
        assert receiver.wrong_layers(to, 40) == 0
        used += givers
    assert sorted(used) == [0, 1, 2, 3]
    for sender in senders:
        sender.wait(1)
        assert sender.events[0][0] == "sent"
    groups.close(senders + receivers)
    assert all(sender.pool.stats().held_pages == 0 for sender in senders)


def test_one_replica_feeds_every_rank() -> None:
    hub = stream.LoopbackHub()
    senders = groups.make_group([LATENT], hub, "p")
    receivers = groups.make_group([LATENT] * 4, hub, "d")
    sent = [groups.send(senders, receiver, 40, rank)[0] for rank, receiver in enumerate(receivers)]
    for receiver, to in zip(receivers, sent, strict=True):
        receiver.wait(1)
        assert receiver.wrong_layers(to, 40) == 0
    senders[0].wait(4)
    groups.close(senders + receivers)
    assert senders[0].pool.stats().held_pages == 0
