"""Hand-overs between two processes over shm and tcp: bytes, cancel, death of a side, fences."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import stream_peer

PEER = Path(stream_peer.__file__)
LAYERS = list(range(6))
KEY = "07" * 32


class Process:
    def __init__(self, **options: Any) -> None:
        self.child = subprocess.Popen(
            [sys.executable, str(PEER), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.addresses = self._read()["addresses"]

    def _read(self) -> Any:
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        assert line, "the process is gone"
        return json.loads(line)

    def __call__(self, do: str, **fields: Any) -> Any:
        assert self.child.stdin is not None
        self.child.stdin.write(json.dumps({"do": do, **fields}) + "\n")
        self.child.stdin.flush()
        return self._read()

    def event(self, seconds: float = 10.0) -> Any:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            events = self("wait", seconds=max(0.0, end - time.monotonic()))["events"]
            if events:
                (event,) = events
                return event
        raise AssertionError(f"no event within {seconds} s")

    def idle(self, seconds: float = 2.0) -> bool:
        end = time.monotonic() + seconds
        while self("stats")["io_pages"]:
            if time.monotonic() > end:
                return False
            time.sleep(0.01)
        return True

    def kill(self, how: int = signal.SIGKILL) -> None:
        os.kill(self.child.pid, how)
        if how == signal.SIGKILL:
            self.child.wait()

    def quit(self) -> None:
        if self.child.poll() is None:
            assert self("quit")["io_pages"] == 0
            self.child.wait(10)


@pytest.fixture(params=["shm", "tcp"])
def link(request: Any, tmp_path: Path) -> dict[str, Any]:
    address = f"shm:{tmp_path}/stream.sock" if request.param == "shm" else "tcp:127.0.0.1:0"
    return {"listen": [address], "scheme": request.param}


@pytest.fixture
def pair(link: dict[str, Any], request: Any) -> Iterator[tuple[Process, Process]]:
    """(prefill, decode); the prefill side is paced where the test asks for it."""
    prefill = Process(key=KEY, **getattr(request, "param", {}))
    decode = Process(key=KEY, listen=link["listen"])
    yield prefill, decode
    for process in (prefill, decode):
        if process.child.poll() is None:
            process.quit()


def start(prefill: Process, decode: Process, tokens: int, stamp: int, **kw: Any) -> Any:
    granted = decode("grant", tokens=tokens, **kw)
    opened = prefill("open", grant=granted["grant"], tokens=tokens, stamp=stamp)
    assert opened["request"] == granted["request"]
    return granted


SLOW = {"pacing_bytes_per_s": 200_000, "max_inflight_bytes": 32_768}
paced = pytest.mark.parametrize("pair", [SLOW], indirect=True)


def test_moves_all_bytes(pair: tuple[Process, Process], link: dict[str, Any]) -> None:
    prefill, decode = pair
    for stamp, tokens in enumerate((1, 16, 17, 200), start=1):
        granted = start(prefill, decode, tokens, stamp)
        for upto in range(64, tokens + 64, 64):
            prefill("publish", request=granted["request"], layers=LAYERS, upto=min(upto, tokens))
        prefill("commit", request=granted["request"])
        event = decode.event()
        assert event["kind"] == "complete" and event["transport"] == link["scheme"]
        assert event["payload"] == f"payload {granted['request']}"
        assert event["bytes"] == event["kv_bytes"] and event["same_clock"]
        assert decode("check", pages=granted["pages"], stamp=stamp)["wrong"] == 0
        assert prefill.event()["kind"] == "sent"
        assert prefill.idle() and decode.idle()
    assert prefill("stats")["links"] == decode.addresses  # one link for all


@paced
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_cancel_in_mid_flight(pair: tuple[Process, Process], side: str) -> None:
    prefill, decode = pair
    granted = start(prefill, decode, 200, 1)
    prefill("publish", request=granted["request"], layers=LAYERS, upto=200)
    time.sleep(0.1)
    if side == "prefill":
        prefill("abort", request=granted["request"])
        assert decode.event(2)["code"] == "Cancelled"
    else:
        released = decode("release", request=granted["request"], reuse=77)
        assert released == {"done": True, "io_pages": 0}
    assert prefill.event(2)["kind"] == "failed"
    assert prefill.idle() and decode.idle()
    if side == "decode":
        time.sleep(0.3)  # whatever was on its way has come by now
        assert decode("check", pages=granted["pages"], stamp=77)["wrong"] == 0


@paced
def test_deadline_on_both_sides(pair: tuple[Process, Process]) -> None:
    prefill, decode = pair
    granted = start(prefill, decode, 200, 1, deadline_s=0.3)
    prefill("publish", request=granted["request"], layers=LAYERS, upto=200)
    assert decode.event(2)["code"] == "Timeout"
    assert prefill.event(2)["code"] in ("Timeout", "Stale")
    assert prefill.idle() and decode.idle()


@paced
@pytest.mark.parametrize("step", ["opened", "publishing", "committed"])
@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_kill_9(pair: tuple[Process, Process], victim: str, step: str) -> None:
    prefill, decode = pair
    granted = start(prefill, decode, 200, 1)
    if step != "opened":
        prefill("publish", request=granted["request"], layers=LAYERS, upto=200)
    if step == "committed":
        prefill("commit", request=granted["request"])
    time.sleep(0.2)
    dead, alive = (prefill, decode) if victim == "prefill" else (decode, prefill)
    began = time.monotonic()
    dead.kill()
    event = alive.event(2)
    assert time.monotonic() - began < 2
    assert event["kind"] == "failed" and event["code"] == "PeerDead"
    assert alive.idle()
    assert alive("stats")["refs_lost"] == 0


@paced
def test_a_hung_peer_is_dead_after_the_keepalive(pair: tuple[Process, Process]) -> None:
    prefill, decode = pair
    granted = start(prefill, decode, 200, 1)
    prefill("publish", request=granted["request"], layers=LAYERS, upto=200)
    time.sleep(0.2)
    prefill.kill(signal.SIGSTOP)
    try:
        assert decode.event(4)["code"] == "PeerHung"
        assert decode.idle()
    finally:
        prefill.kill(signal.SIGCONT)
    assert prefill.event(4)["kind"] == "failed"
    assert prefill.idle()


def test_other_layouts_are_refused_at_once(link: dict[str, Any]) -> None:
    prefill = Process(key=KEY, spec={"head_dim_k": 64})
    decode = Process(key=KEY, listen=link["listen"])
    granted = decode("grant", tokens=20)
    began = time.monotonic()
    refused = prefill("open", grant=granted["grant"], tokens=20, stamp=1)
    assert time.monotonic() - began < 1
    assert refused["error"] == "Unsupported" and "head_dim_k=32" in refused["message"]
    decode("release", request=granted["request"])
    prefill.quit()
    decode.quit()


def test_a_wrong_key_gets_nowhere(link: dict[str, Any]) -> None:
    prefill = Process(key="08" * 32)
    decode = Process(key=KEY, listen=link["listen"])
    granted = start(prefill, decode, 20, 1)
    event = prefill.event(3)
    assert event["kind"] == "failed" and event["code"] == "Unauthenticated"
    assert prefill.idle()
    decode("release", request=granted["request"])
    prefill.quit()
    decode.quit()


def test_an_address_that_cannot_be_reached_is_named(tmp_path: Path) -> None:
    """shm comes first on one host; tcp is not taken silently in its place."""
    both = [f"shm:{tmp_path}/stream.sock", "tcp:127.0.0.1:0"]
    decode = Process(key=KEY, listen=both)
    for fallback in (False, True):
        prefill = Process(key=KEY, allow_fallback=fallback)
        granted = decode("grant", tokens=20)
        (tmp_path / "stream.sock").unlink(missing_ok=True)
        opened = prefill("open", grant=granted["grant"], tokens=20, stamp=1)
        if fallback:
            prefill("publish", request=granted["request"], layers=LAYERS, upto=20)
            prefill("commit", request=granted["request"])
            assert decode.event()["transport"] == "tcp"
            assert prefill.event()["kind"] == "sent"
        else:
            why = opened if "error" in opened else prefill.event(3)
            assert "stream.sock" in why["message"]
            decode("release", request=granted["request"])
        prefill.quit()
    decode.quit()
