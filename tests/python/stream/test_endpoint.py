"""kvcore.stream in one process over loopback: contract, errors, layer steps, accounting."""

from __future__ import annotations

import asyncio
import os
import select
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvcore import _core, kernels, stream
from kvcore.config import WorkerConfig
from kvcore.errors import Cancelled, Corrupt, InvalidArgument, Unsupported
from kvcore.pages import Pool
from support.stream_pages import alloc, make_pool, slice_of, stamp_pages, wrong_slices


class Pair:
    """A prefill and a decode endpoint on one hub."""

    def __init__(self, sender: dict[str, Any] | None = None, **receiver: Any) -> None:
        hub = stream.LoopbackHub()
        self.a, self.b = make_pool(), make_pool()
        self.prefill = stream.Endpoint(self.a, hub=hub, **(sender or {}))
        self.decode = stream.Endpoint(self.b, ["loopback:decode"], hub=hub, **receiver)

    def start(self, num_tokens: int, stamp: int = 1, **kw: Any) -> tuple[stream.Sender, list[int]]:
        to, _ = alloc(self.b, num_tokens)
        pages, _ = alloc(self.a, num_tokens)
        stamp_pages(self.a, pages, stamp)
        grant = self.decode.grant(os.urandom(16), to, num_tokens, **kw)
        return self.prefill.open(grant, pages), to

    def idle(self) -> bool:
        return self.a.stats().io_pages == 0 and self.b.stats().io_pages == 0


@pytest.fixture
def pair() -> Any:
    p = Pair()
    yield p
    p.prefill.close()
    p.decode.close()
    assert p.idle()


def wait(endpoint: stream.Endpoint, count: int = 1, seconds: float = 10.0) -> list[tuple[Any, ...]]:
    events: list[tuple[Any, ...]] = []
    while len(events) < count:
        assert select.select([endpoint.event_fd], [], [], seconds)[0], f"only {events}"
        events += endpoint.poll()
    return events


def publish_all(sender: stream.Sender, layers: int = 6) -> None:
    for layer in range(layers):
        sender.publish_upto(layer, sender.first_token + sender.num_tokens)


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 32, 33, 100])
def test_moves_all_bytes(pair: Pair, num_tokens: int) -> None:
    sender, to = pair.start(num_tokens, stamp=7)
    publish_all(sender)
    sender.mark()
    sender.commit(b"first token")
    ((kind, request_id, payload, stats),) = wait(pair.decode)
    assert (kind, request_id, payload) == ("complete", sender.request_id, b"first token")
    formula = -(-num_tokens // 16) * 6 * pair.b.spec.slice_bytes
    assert stats.bytes == stats.kv_bytes == sender.kv_bytes == formula
    assert stats.transport == "loopback" and stats.same_clock
    assert wrong_slices(pair.b, to, 7) == 0
    ((kind, _, sent),) = wait(pair.prefill)
    assert kind == "sent" and sent.bytes == formula
    assert sender.state == "done" and sender.error is None


def test_cached_pages_go_first(pair: Pair) -> None:
    sender, to = pair.start(70, stamp=3)
    sender.push_cached(0, 2)
    with pytest.raises(InvalidArgument, match="before"):
        sender.publish(0, 1, 1, 16)
    publish_all(sender)
    sender.commit()
    assert wait(pair.decode)[0][0] == "complete"
    assert wrong_slices(pair.b, to, 3) == 0


def test_commit_needs_every_slice(pair: Pair) -> None:
    sender, _ = pair.start(40)
    for layer in range(5):
        sender.publish_upto(layer, 40)
    sender.publish_upto(5, 39)  # the last page is not whole
    with pytest.raises(InvalidArgument, match="17 of 18"):
        sender.commit()
    sender.publish(5, 2, 1, 8)
    sender.commit()
    assert wait(pair.decode)[0][0] == "complete"


def test_release_fences(pair: Pair) -> None:
    sender, to = pair.start(64)
    sender.push_cached(0, 2)
    assert pair.decode.release(sender.request_id)
    assert not pair.decode.release(sender.request_id)
    assert pair.b.stats().io_pages == 0
    stamp_pages(pair.b, to, 99)  # somebody else's now
    publish_all(sender)
    kind, _, code, message = wait(pair.prefill)[0]
    assert kind == "failed" and code in ("Cancelled", "Stale") and message
    assert wrong_slices(pair.b, to, 99) == 0
    assert pair.decode.poll() == []


def test_sender_abort_reaches_the_receiver(pair: Pair) -> None:
    sender, _ = pair.start(64)
    sender.abort("client went away")
    assert wait(pair.decode)[0][2:] == ("Cancelled", "client went away")
    assert wait(pair.prefill)[0][0] == "failed"
    assert sender.state == "failed" and sender.error == ("Cancelled", "client went away")


def test_deadline(pair: Pair) -> None:
    sender, _ = pair.start(64, deadline_s=0.2)
    sender.publish_upto(0, 64)
    assert wait(pair.decode)[0][2] == "Timeout"
    assert wait(pair.prefill)[0][2] == "Timeout"


def test_a_flipped_slice_is_seen_or_changes_the_bytes() -> None:
    for checksums in ("off", "all"):
        p = Pair({"checksums": checksums}, checksums=checksums, flip_slice=4)
        sender, to = p.start(64, stamp=5)
        publish_all(sender)
        if checksums == "off":
            sender.commit()
            assert wait(p.decode)[0][0] == "complete"
            assert wrong_slices(p.b, to, 5) == 1
        else:
            assert wait(p.decode)[0][2] == "Corrupt"
            assert wait(p.prefill)[0][2] == "Corrupt"
        p.prefill.close()
        p.decode.close()
        assert p.idle()


def test_other_layouts_are_refused_by_name() -> None:
    p = Pair()
    other = make_pool(head_dim_k=64)
    with stream.Endpoint(other) as ep:
        grant = p.decode.grant(os.urandom(16), alloc(p.b, 20)[0], 20)
        with pytest.raises(Unsupported, match="head_dim_k=32"):
            ep.open(grant, alloc(other, 20)[0])
        assert other.stats().io_pages == 0
    p.decode.close()
    assert p.idle()


def test_bad_arguments(pair: Pair) -> None:
    to, _ = alloc(pair.b, 64)
    rid = os.urandom(16)
    with pytest.raises(InvalidArgument, match="15 bytes"):
        pair.decode.grant(rid[:15], to, 64)
    with pytest.raises(InvalidArgument, match="num_tokens=65"):
        pair.decode.grant(rid, to, 65)
    with pytest.raises(InvalidArgument, match="first_token=5"):
        pair.decode.grant(rid, to, 64, 5)
    with pytest.raises(InvalidArgument, match="deadline_s=0"):
        pair.decode.grant(rid, to, 64, deadline_s=0)
    with pytest.raises(InvalidArgument, match="listens nowhere"):
        pair.prefill.grant(rid, alloc(pair.a, 64)[0], 64)
    with pytest.raises(InvalidArgument, match="checksums='some'"):
        stream.Endpoint(pair.a, checksums="some")  # type: ignore[arg-type]
    grant = pair.decode.grant(rid, to, 64)
    with pytest.raises(InvalidArgument, match="already"):
        pair.decode.grant(rid, to, 64)
    with pytest.raises(InvalidArgument, match="lie in 4 of this side"):
        pair.prefill.open(grant, to[:3])
    with pytest.raises(Corrupt):
        pair.prefill.open(grant[:-1], to)
    with pytest.raises(Corrupt):
        stream.describe_grant(b"")
    assert stream.describe_grant(grant)["num_tokens"] == 64
    pair.decode.close()
    with pytest.raises(Cancelled):
        pair.decode.grant(rid, to, 64)


def test_events_come_to_asyncio(pair: Pair) -> None:
    async def main() -> tuple[Any, ...]:
        sender, _ = pair.start(33)

        def compute() -> None:
            publish_all(sender)
            sender.commit(b"x")

        threading.Timer(0.05, compute).start()
        async for event in pair.decode.events():
            return event
        raise AssertionError

    assert asyncio.run(asyncio.wait_for(main(), 10))[0] == "complete"


class TestLayerStep:
    """The prefill side's op: chunks of a prompt through a plan, published as they are appended."""

    def run(self, pair: Pair, rows: list[tuple[Any, list[int], int]], chunk: int, seed: int) -> Any:
        """Prefills rows of (sender or None, pages, tokens); returns the attention outputs."""
        spec = pair.a.spec
        plan = kernels.AttentionPlan(pair.a, 4)
        done = [0] * len(rows)
        outputs = []
        while any(d < n for d, (_, _, n) in zip(done, rows, strict=True)):
            counts = [min(chunk, n - d) for d, (_, _, n) in zip(done, rows, strict=True)]
            done = [d + c for d, c in zip(done, counts, strict=True)]
            width = max(len(p) for _, p, _ in rows)
            table = np.array([p + [0] * (width - len(p)) for _, p, _ in rows], np.int32)
            plan.prepare([0, *np.cumsum(counts).tolist()], done, table)
            senders = [(s, i) for i, (s, _, _) in enumerate(rows) if s is not None]
            step = stream.LayerStep(plan, senders) if senders else plan
            n = sum(counts)
            for layer in range(spec.num_layers):
                rng = np.random.default_rng([seed, layer, *done])
                q = rng.standard_normal((n, 4, 32), dtype=np.float32)
                k, v = rng.standard_normal((2, n, 2, 32), dtype=np.float32)
                out = np.empty_like(q)
                step.run_ptr(
                    layer, q.ctypes.data, 128, k.ctypes.data, 64, v.ctypes.data, 64,
                    out.ctypes.data, 0, 0,
                )  # fmt: skip
                outputs.append(out)
        return outputs

    def test_hands_over_what_it_computes(self, pair: Pair) -> None:
        rows, to = [], []
        for n in (70, 33):
            pages, _ = alloc(pair.a, n)
            to.append(alloc(pair.b, n)[0])
            grant = pair.decode.grant(os.urandom(16), to[-1], n)
            rows.append((pair.prefill.open(grant, pages), pages, n))
        outputs = self.run(pair, rows, chunk=32, seed=1)
        for sender, _, _ in rows:
            assert sender.all_published
            sender.commit()
        events = wait(pair.decode, 2)
        for _, _, _, stats in events:
            assert stats.mark_ns > 0 and 0 <= stats.arrived_fraction <= 1
        for (_, pages, n), received in zip(rows, to, strict=True):
            for layer in range(6):
                for i, page in enumerate(received):
                    valid = min(16, n - 16 * i)
                    got, sent = pair.b.read_slice(page, layer), pair.a.read_slice(pages[i], layer)
                    assert np.array_equal(got[0][:valid], sent[0][:valid])
                    assert np.array_equal(got[1][:valid], sent[1][:valid])
        plain = self.run(pair, [(None, p, n) for _, p, n in rows], chunk=32, seed=1)
        for a, b in zip(outputs, plain, strict=True):
            assert np.array_equal(a, b)  # publishing changes no bit

    def test_only_the_range_of_the_grant_is_sent(self, pair: Pair) -> None:
        """The decode side holds the first page already."""
        pages, _ = alloc(pair.a, 50)
        to, _ = alloc(pair.b, 34)
        grant = pair.decode.grant(os.urandom(16), to, 34, 16)
        sender = pair.prefill.open(grant, pages[1:])
        self.run(pair, [(sender, pages, 50)], chunk=16, seed=2)
        sender.commit()
        assert wait(pair.decode)[0][3].bytes == 3 * 6 * pair.b.spec.slice_bytes
        for i, page in enumerate(to):
            got, sent = pair.b.read_slice(page, 3), pair.a.read_slice(pages[1 + i], 3)
            assert np.array_equal(got[0][:2], sent[0][:2])

    def test_refuses_rows_and_pools_that_do_not_fit(self, pair: Pair) -> None:
        sender, _ = pair.start(16)
        plan = kernels.AttentionPlan(pair.a, 4)
        plan.prepare([0, 1], [1], np.array([[0]], np.int32))
        with pytest.raises(InvalidArgument, match="sequence 1"):
            stream.LayerStep(plan, [(sender, 1)])
        other: Pool = make_pool()
        elsewhere = kernels.AttentionPlan(other, 4)
        elsewhere.prepare([0, 1], [1], np.array([[0]], np.int32))
        with pytest.raises(InvalidArgument, match="another pool"):
            stream.LayerStep(elsewhere, [(sender, 0)])


def test_layers_are_told_as_they_arrive(pair: Pair) -> None:
    """Each layer once, when its last slice is in place, and its KV can be read then."""
    sender, to = pair.start(100, stamp=3, tell_layers=True)
    seen = []
    for layer in (2, 0):  # any order
        sender.publish_upto(layer, 100)
        ((kind, request, arrived),) = wait(pair.decode)
        assert (kind, request, arrived) == ("layer", sender.request_id, layer)
        for slot, page in enumerate(to):
            k, _ = pair.b.read_slice(page, layer)
            assert np.array_equal(k, slice_of(pair.b, 3, layer, slot)[0])
        seen.append(layer)
    sender.publish_upto(1, 64)  # a part of layer 1: nothing is told
    for layer in (3, 4, 5):
        sender.publish_upto(layer, 100)
    events = wait(pair.decode, 3)
    assert [e[2] for e in events] == [3, 4, 5]
    sender.publish_upto(1, 100)
    sender.commit()
    events = wait(pair.decode, 2)
    assert [e[0] for e in events] == ["layer", "complete"] and events[0][2] == 1
    assert wait(pair.prefill)[0][0] == "sent"


def test_layers_can_be_awaited(pair: Pair) -> None:
    async def early() -> list[Any]:
        seen: list[Any] = []
        async for kind, _, what, *_ in pair.decode.events():
            seen.append(what if kind == "layer" else kind)
            if kind == "layer" and len(seen) == 1:
                for layer in range(1, 6):  # only now: the first layer was told before the rest left
                    sender.publish_upto(layer, 100)
                sender.commit()
            if kind == "complete":
                return seen
        raise AssertionError("the events ended")

    sender, _ = pair.start(100, stamp=4, tell_layers=True)
    sender.publish_upto(0, 100)
    assert asyncio.run(asyncio.wait_for(early(), 10)) == [0, 1, 2, 3, 4, 5, "complete"]


def test_layers_are_not_told_unasked(pair: Pair) -> None:
    sender, _ = pair.start(100)
    publish_all(sender)
    sender.commit()
    assert [e[0] for e in wait(pair.decode)] == ["complete"]


def test_push_cached_is_all_or_nothing(pair: Pair) -> None:
    sender, _ = pair.start(48)
    sender.publish(3, 0, 1, 16)
    with pytest.raises(InvalidArgument, match=r"layer=3.*published before"):
        sender.push_cached(0, 3)
    assert not sender.all_published
    publish_all(sender)
    sender.commit()
    assert [e[0] for e in wait(pair.decode)] == ["complete"]


def test_pages_belong_to_one_hand_over(pair: Pair) -> None:
    """Two that fill the same pages would both be told that these are theirs."""
    to, _ = alloc(pair.b, 48)
    grant = pair.decode.grant(os.urandom(16), to, 48)
    other, _ = alloc(pair.b, 16)
    for pages in ([to[1]], [*other, to[0]], [other[0], other[0]]):
        held = pair.b.stats().io_pages
        with pytest.raises(InvalidArgument, match="one page, one hand-over"):
            pair.decode.grant(os.urandom(16), pages, 16 * len(pages))
        assert pair.b.stats().io_pages == held
    pages, _ = alloc(pair.a, 48)
    sender = pair.prefill.open(grant, pages)
    publish_all(sender)
    sender.commit(b"")
    wait(pair.decode)
    for again in (to, other):  # once it has ended they may be granted again
        assert pair.decode.grant(os.urandom(16), again, 16 * len(again))


def test_addresses_are_a_list() -> None:
    with pytest.raises(InvalidArgument, match=r"listen='tcp:127\.0\.0\.1:0'"):
        stream.Endpoint(make_pool(), "tcp:127.0.0.1:0")


def test_kv_falls_back_only_where_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def addresses(name: str) -> list[str]:
        return stream.stream_addresses(name, "/run/d.sock")

    monkeypatch.setattr(_core.transport, "rdma_missing", lambda: "no device")
    assert addresses("shm") == ["shm:/run/d.sock"]
    assert addresses("tcp") == ["tcp:127.0.0.1:0"]
    assert addresses("rdma") == ["rdma:127.0.0.1:0"]  # and the worker says why it cannot
    assert not caplog.records
    assert addresses("rdma-or-tcp") == ["tcp:127.0.0.1:0"]
    assert "KV moves over tcp, no device" in caplog.text
    monkeypatch.setattr(_core.transport, "rdma_missing", lambda: "")
    assert addresses("rdma-or-tcp") == ["rdma:127.0.0.1:0", "tcp:127.0.0.1:0"]
    for name, allowed in (("rdma", False), ("tcp", False), ("rdma-or-tcp", True)):
        assert WorkerConfig(transport=name).allow_fallback is allowed


def test_a_fallback_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    key, request = bytes(32), os.urandom(16)
    a, b = make_pool(), make_pool()
    addresses = [f"shm:{tmp_path}/d.sock", "tcp:127.0.0.1:0"]
    with (
        stream.Endpoint(b, addresses, key=key) as decode,
        stream.Endpoint(a, key=key, allow_fallback=True) as prefill,
    ):
        (tmp_path / "d.sock").unlink()
        (page, *_), _ = alloc(a, 1)
        sender = prefill.open(decode.grant(request, alloc(b, 1)[0], 1), [page])
        for layer in range(a.spec.num_layers):
            sender.publish_upto(layer, 1)
        sender.commit(b"")
        assert select.select([prefill.event_fd], [], [], 10)[0]
        ((kind, _, stats),) = prefill.poll()
        assert (kind, stats.transport) == ("sent", "tcp")
        assert prefill.stats().fallbacks == 1
    assert "1 hand-over links fell back" in caplog.text
