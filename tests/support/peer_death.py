"""Rounds of a hand-over in which one side is killed with SIGKILL at a named step of the protocol.

The survivor lives in this process and serves round after round; each victim is a new process. A
relay between them (``link_proxy``) sees every frame and kills at the step, however fast the two
are. After each round the survivor must know within the limit, hold no page, and the pages, freed
and stamped anew at once, must keep their stamp.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvcore import stream

from support.link_proxy import Proxy, Unit
from support.stream_pages import alloc, make_pool, stamp_pages, wrong_slices

STEPS = [
    "connect", "hello", "proof", "up", "granted", "open", "first_write", "mid_write",
    "all_written", "committed", "done",
]  # fmt: skip
VICTIMS = ["sender", "receiver"]
LINKS = ["shm", "tcp"]
TOKENS = 200
LIMIT_S = 2.0
UNBOUND = {"connect", "hello", "proof", "up", "granted"}  # the receiver knows no sender yet
UNBOUND_DEADLINE_S = 0.5  # of the grant, which then is all that ends it

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["support.peer_death"])


def _wait_for_death(endpoint: stream.Endpoint | None = None) -> None:
    while True:
        if endpoint is None:
            time.sleep(1)
        else:
            select.select([endpoint.event_fd], [], [], 1)
            endpoint.poll()


def _send(pipe: Connection, stamp: int) -> None:
    grant, hold = pipe.recv()
    if hold:
        pipe.send("granted")
        _wait_for_death()
    pool = make_pool()
    pages, _ = alloc(pool, TOKENS)
    stamp_pages(pool, pages, stamp)
    endpoint = stream.Endpoint(pool)
    _push(endpoint.open(grant, pages), pool.spec.num_layers)
    _wait_for_death(endpoint)


def _push(sender: stream.Sender, num_layers: int) -> None:
    for layer in range(num_layers):
        sender.publish_upto(layer, TOKENS)
    sender.mark()
    sender.commit(b"payload")


def _receive(pipe: Connection, listen: str) -> None:
    pool = make_pool()
    endpoint = stream.Endpoint(pool, [listen])
    pages, _ = alloc(pool, TOKENS)
    pipe.send((endpoint.addresses[0], endpoint.grant(os.urandom(16), pages, TOKENS)))
    _wait_for_death(endpoint)


def _readdressed(grant: bytes, address: str, by: str) -> bytes:
    """The grant with another address at its end, where the only one stands."""
    old = address.encode()
    tail = len(old).to_bytes(4, "little") + old
    assert grant.endswith(tail)
    return grant[: -len(tail)] + len(by).to_bytes(4, "little") + by.encode()


@dataclass
class Killer:
    """Watches a relay and kills the victim at the step. ``reached`` tells when."""

    step: str
    total_bytes: int
    pid: int = 0
    reached_at: float | None = None
    _written: int = 0
    _writes: int = 0

    def __call__(self, unit: Unit | None) -> int | None:
        size = 0 if unit is None else len(unit.data)
        if unit is None:
            here = self.step == "connect"
        elif unit.name == "write":
            self._writes += 1
            self._written += unit.moved_bytes
            here = (
                (self.step == "first_write")
                or (self.step == "mid_write" and self._writes == 2)
                or (self.step == "all_written" and self._written >= self.total_bytes)
            )
            if here and self.step == "mid_write" and unit.payload_bytes:
                self.kill()
                return size - unit.payload_bytes // 2
        else:
            here = unit.name == {"up": "proof", "committed": "commit"}.get(self.step, self.step)
        if not here:
            return size
        if self.step == "up":
            time.sleep(0.02)  # both have understood by then
        self.kill()
        return None

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.reached_at = time.monotonic()


@dataclass
class Rounds:
    """The survivor of many rounds over one kind of link."""

    victim: str
    link: str
    folder: Path
    seconds: list[float] = field(default_factory=list)
    completed: int = 0

    def __post_init__(self) -> None:
        self.pool = make_pool()
        self.free_frames = self.pool.stats().free_frames
        listen = [self._address("survivor")] if self.victim == "sender" else []
        self.endpoint = stream.Endpoint(self.pool, listen)
        self._number = 0

    def _address(self, name: str) -> str:
        return f"shm:{self.folder}/{name}.sock" if self.link == "shm" else "tcp:127.0.0.1:0"

    def close(self) -> None:
        refs_lost = self.endpoint.stats().refs_lost
        self.endpoint.close()
        assert refs_lost == 0

    def round(self, step: str) -> float:
        """One death at this step. Returns the seconds until the survivor was told."""
        self._number += 1
        pages, owned = alloc(self.pool, TOKENS)
        shape = self.pool.spec
        killer = Killer(step, shape.num_layers * len(pages) * _slice_bytes(self.pool))
        ours = self._number * 2
        if self.victim == "sender":
            request = self._kill_sender(step, killer, pages, ours)
        else:
            stamp_pages(self.pool, pages, ours)
            request = self._kill_receiver(step, killer, pages)
        event = self._event(request)
        assert killer.reached_at is not None, f"step {step} was never reached"
        took = max(0.0, time.monotonic() - killer.reached_at)
        self._check(step, event, took, pages, ours)
        self._reuse(owned, pages, ours + 1)
        self.seconds.append(took)
        return took

    def _proxy(self, target: str, killer: Killer) -> Proxy:
        return Proxy(target, killer, f"{self.folder}/proxy-{self._number}.sock")

    def _kill_sender(self, step: str, killer: Killer, pages: list[int], stamp: int) -> bytes:
        deadline = UNBOUND_DEADLINE_S if step in UNBOUND else 30.0
        request = os.urandom(16)
        grant = self.endpoint.grant(request, pages, TOKENS, deadline_s=deadline)
        ours, theirs = _context.Pipe()
        process = _context.Process(target=_send, args=(theirs, stamp), daemon=True)
        process.start()
        assert process.pid is not None
        killer.pid = process.pid
        address = self.endpoint.addresses[0]
        proxy = self._proxy(address, killer)
        ours.send((_readdressed(grant, address, proxy.address), step == "granted"))
        if step == "granted":
            assert ours.recv() == "granted"
            killer.kill()
        process.join(20)
        proxy.stop()
        return request

    def _kill_receiver(self, step: str, killer: Killer, pages: list[int]) -> bytes:
        ours, theirs = _context.Pipe()
        process = _context.Process(
            target=_receive, args=(theirs, self._address(f"victim-{self._number}")), daemon=True
        )
        process.start()
        assert process.pid is not None
        killer.pid = process.pid
        address, grant = ours.recv()
        proxy = self._proxy(address, killer)
        if step == "granted":
            killer.kill()
            process.join(20)
            sender = self.endpoint.open(grant, pages)
        else:
            sender = self.endpoint.open(_readdressed(grant, address, proxy.address), pages)
            _push(sender, self.pool.spec.num_layers)
        process.join(20)
        proxy.stop()
        return sender.request_id

    def _event(self, request: bytes) -> tuple[Any, ...]:
        end = time.monotonic() + 5
        while time.monotonic() < end:
            select.select([self.endpoint.event_fd], [], [], 0.1)
            for event in self.endpoint.poll():
                if event[1] == request:
                    return event
        raise AssertionError("the survivor was never told")

    def _check(
        self, step: str, event: tuple[Any, ...], took: float, pages: list[int], stamp: int
    ) -> None:
        where = f"{self.victim} killed at {step} over {self.link}: {event[:1] + event[2:]}"
        assert took <= LIMIT_S, f"{where} after {took:.2f} s"
        if event[0] == "failed":
            assert step != "done", where
            expected = {"PeerDead"}
            if self.victim == "sender" and step in UNBOUND:
                expected = {"Timeout"}
            elif step in ("connect", "hello"):  # a peer with another key ends it so, too
                expected |= {"Unauthenticated", "TransportError"}
            assert event[2] in expected, where
            return
        # All had arrived before the death was known: then it is whole, and right.
        assert step in ("committed", "done"), where
        self.completed += 1
        if self.victim == "sender":
            assert wrong_slices(self.pool, pages, stamp) == 0, where

    def _reuse(self, owned: list[int], pages: list[int], stamp: int) -> None:
        """Frees the pages and gives them to somebody else at once: nothing may land there."""
        end = time.monotonic() + 1
        while self.pool.stats().io_pages and time.monotonic() < end:
            time.sleep(0.001)
        assert self.pool.stats().io_pages == 0, "pages are held after the end"
        self.pool.decref(owned)
        assert self.pool.stats().free_frames == self.free_frames
        again = self.pool.alloc(len(owned))
        assert set(again) == set(owned)
        stamp_pages(self.pool, pages, stamp)
        time.sleep(0.005)
        assert wrong_slices(self.pool, pages, stamp) == 0, "a foreign stamp"
        self.pool.decref(again)


def _slice_bytes(pool: Any) -> int:
    s = pool.spec
    return 64 + s.num_kv_heads * s.page_size * 2 * s.head_dim_k * 2
