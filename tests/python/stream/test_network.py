"""Hand-overs between two hosts (network namespaces) whose switch loses packets, or is cut."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import pytest
from kvcore import stream
from support import netns
from support.stream_pages import alloc, make_pool, stamp_pages, wrong_slices
from support.stream_pair import Pair, Side, push

KEY = b"hand-overs over a network, 32 b."
TOKENS = 500


@contextlib.contextmanager
def two_hosts(keepalive_s: float = 2.0) -> Iterator[tuple[Pair, netns.Network]]:
    """Both endpoints in this process, each with its threads and sockets on a host of its own."""
    if why := netns.missing():
        pytest.skip(f"no shaped network namespaces: {why}")
    with netns.Network(["prefill", "decode"], "10.79.0") as network:
        ours, theirs = make_pool(64), make_pool(64)
        address = f"tcp:{network.address['decode']}:0"
        with network.inside("decode"):
            decode = stream.Endpoint(theirs, [address], key=KEY, keepalive_s=keepalive_s)
        with network.inside("prefill"):
            prefill = stream.Endpoint(ours, key=KEY, keepalive_s=keepalive_s)
        with decode, prefill:
            yield Pair(Side(ours, prefill), Side(theirs, decode)), network


def hand_over(pair: Pair, stamp: int) -> None:
    sender, request, to, pages = pair.start(TOKENS, stamp)
    push(sender, TOKENS, pair.prefill.pool.spec.num_layers)
    kind, _, payload, stats = pair.decode.event(request, 30)
    assert kind == "complete" and payload == b"payload"
    assert stats.bytes == stats.kv_bytes and stats.duplicates == 0
    assert wrong_slices(pair.decode.pool, to, stamp) == 0
    pair.decode.pool.decref(to)
    pair.prefill.pool.decref(pages)


def test_lost_packets_lose_no_byte() -> None:
    """A queue of a few packets drops many of them: all slices arrive once and are right."""
    with two_hosts() as (pair, network):
        network.shape("decode", 4e6, queue_bytes=9_000, burst_bytes=4_000)
        for stamp in range(3):
            hand_over(pair, stamp)
        assert network.dropped("decode") > 0
        assert pair.prefill.idle() and pair.decode.idle()


@pytest.mark.parametrize("keepalive_s", [0.5, 2.0])
def test_a_cut_network_ends_both_sides_in_time(keepalive_s: float) -> None:
    with two_hosts(keepalive_s) as (pair, network):
        hand_over(pair, 0)  # every lane of the link is up
        network.shape("decode", 1e6, queue_bytes=1 << 18, burst_bytes=16_000)
        sender, request, to, _ = pair.start(TOKENS, stamp=1)
        push(sender, TOKENS, pair.prefill.pool.spec.num_layers)
        until = time.monotonic() + 10
        while sender.bytes_sent == 0 and time.monotonic() < until:
            time.sleep(0.002)
        assert 0 < sender.bytes_sent < sender.kv_bytes  # in the middle
        network.cut("decode")
        cut = time.monotonic()
        for side in (pair.prefill, pair.decode):
            kind, _, code, message = side.event(request, 10)
            assert (kind, code) == ("failed", "PeerHung"), message
            assert side.idle()
        assert time.monotonic() - cut < keepalive_s + 1.5
        # Its pages are somebody else's at once, and what was under way never lands there.
        pair.decode.pool.decref(to)
        again, _ = alloc(pair.decode.pool, TOKENS)
        stamp_pages(pair.decode.pool, again, 2)
        time.sleep(0.1)
        assert wrong_slices(pair.decode.pool, again, 2) == 0
