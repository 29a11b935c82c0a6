"""What the docstrings of Sender and Pool say, of which nothing else would remind."""

from __future__ import annotations

import gc
import secrets
import select
import time
from collections.abc import Iterator
from typing import Any

import pytest
from kvcore import errors
from kvcore.stream import Endpoint, Sender
from support.stream_pages import alloc, make_pool

TOKENS = 40  # two full pages of 16 and a part
LAYERS = range(6)


@pytest.fixture
def pair(tmp_path: Any) -> Iterator[tuple[Endpoint, Endpoint]]:
    address = f"shm:{tmp_path}/decode.sock"
    with Endpoint(make_pool(), [address]) as decode, Endpoint(make_pool()) as prefill:
        yield decode, prefill


Pair = tuple[Endpoint, Endpoint]


def opened(pair: Pair, deadline_s: float = 30.0) -> Sender:
    decode, prefill = pair
    pages = alloc(decode.pool, TOKENS)[0]
    grant = decode.grant(secrets.token_bytes(16), pages, TOKENS, deadline_s=deadline_s)
    return prefill.open(grant, alloc(prefill.pool, TOKENS)[0])


def event_of(endpoint: Endpoint) -> tuple[Any, ...]:
    assert select.select([endpoint.event_fd], [], [], 10)[0]
    (event,) = endpoint.poll()
    return event


def test_publish_upto_takes_any_end(pair: Pair) -> None:
    sender = opened(pair)
    for layer in LAYERS:
        for end in (-5, 0, 15, TOKENS - 1):
            sender.publish_upto(layer, end)
        assert not sender.all_published, "a page that is not whole"
    for layer in LAYERS:
        sender.publish_upto(layer, TOKENS + 1000)
        sender.publish_upto(layer, TOKENS)
    assert sender.all_published
    with pytest.raises(errors.InvalidArgument, match="payload of 262145 bytes"):
        sender.commit(bytes((256 << 10) + 1))
    sender.commit(bytes(256 << 10))
    assert event_of(pair[0])[0] == "complete"


def test_publish_counts_pages_of_the_hand_over(pair: Pair) -> None:
    sender = opened(pair)
    with pytest.raises(errors.InvalidArgument, match="valid_tokens_in_last=16"):
        sender.publish(0, 2, 1, 16)
    sender.publish(0, 2, 1, TOKENS - 32)
    with pytest.raises(errors.InvalidArgument, match="published before"):
        sender.publish(0, 2, 1, TOKENS - 32)
    with pytest.raises(errors.InvalidArgument, match="layer=6"):
        sender.publish_upto(6, TOKENS)


def test_a_closed_endpoint_checks_and_sends_nothing(pair: Pair) -> None:
    sender = opened(pair)
    end = time.monotonic() + 10
    while sender.state == "connecting":  # before that the receiver knows of no sender
        assert time.monotonic() < end
        time.sleep(0.01)
    pair[1].close()
    assert (sender.state, sender.error[0]) == ("failed", "Cancelled")
    sender.push_cached_upto(TOKENS)
    sender.commit()
    with pytest.raises(errors.InvalidArgument, match="commit was given before"):
        sender.commit()
    assert event_of(pair[0])[2] == "Cancelled"
    with pytest.raises(errors.Cancelled):
        pair[1].open(b"", [])


@pytest.mark.parametrize("committed", [True, False])
def test_a_dropped_sender_aborts_nothing(pair: Pair, committed: bool) -> None:
    sender = opened(pair, deadline_s=30 if committed else 0.5)
    sender.push_cached_upto(TOKENS)
    if committed:
        sender.commit()
    del sender
    gc.collect()
    event = event_of(pair[0])
    assert event[0] == "complete" if committed else event[2] == "Timeout"


def test_alloc_gives_whole_frames() -> None:
    pool = make_pool(extent_pages=4)
    assert len(pool.alloc(3)) == 4
    assert len(pool.alloc(3, run_pages=1)) == 3
