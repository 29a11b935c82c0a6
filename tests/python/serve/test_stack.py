"""Router, HTTP and worker processes together: hand-over, deaths, retries, cancels, capacity."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from fake_worker import answer
from kvcore.serve.launcher import WorkerFailed
from serve_fakes import MODEL
from stack import stack

PAIR = (("prefill", []), ("decode", []))


def ask(url: str, prompt: str = "hello", count: int = 8, **more: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": count, **more}
    return httpx.post(url + "/v1/completions", json=body, timeout=20)


def said(prompt: str, count: int) -> str:
    return bytes(answer(list(prompt.encode()), count)).decode()


def in_background(*args: Any, **kwargs: Any) -> tuple[threading.Thread, dict[str, Any]]:
    box: dict[str, Any] = {}

    def run() -> None:
        box["response"] = ask(*args, **kwargs)
        box["at"] = time.monotonic()

    thread = threading.Thread(target=run)
    thread.start()
    return thread, box


def generated(url: str) -> float:
    """Answer tokens so far, by the metrics."""
    found = re.search(
        r"^kvcore_generated_tokens_total (\S+)", httpx.get(url + "/metrics").text, re.M
    )
    return float(found[1]) if found else 0.0


def events_of(response: httpx.Response) -> list[Any]:
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) if line != "[DONE]" else line for line in lines]


def test_prefill_and_decode_through_http(tmp_path: Path) -> None:
    with stack(tmp_path, *PAIR) as s:
        response = ask(s.url)
        body = response.json()
        assert body["choices"][0]["text"] == said("hello", 8)
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["kvcore"]["kv_bytes"] == [5] and body["kvcore"]["transport"] == ["shm"]
        assert body["kvcore"]["arrived_fraction"] == [0.97]
        assert [e["kind"] for e in s.log(role="decode")] == ["joined", "reserve"]
        assert [e["kind"] for e in s.log(role="prefill")] == ["joined", "prefill"]
        health = httpx.get(s.url + "/health")
        assert health.json()["workers"] == {"prefill": 1, "decode": 1, "mono": 0}
        metrics = httpx.get(s.url + "/metrics").text
        assert 'kvcore_workers{role="decode"} 1.0' in metrics
        assert "kvcore_arrived_fraction_count 1.0" in metrics
        assert 'kvcore_kv_bytes_total{transport="shm"} 5.0' in metrics
        assert 'kvcore_router_events{event="dispatched"} 1.0' in metrics


def test_how_an_answer_was_made_is_known_although_the_prefill_worker_tells_late(
    tmp_path: Path,
) -> None:
    with stack(tmp_path, ("prefill", ["--told-s", "0.3"]), ("decode", [])) as s:
        facts = ask(s.url).json()["kvcore"]
    assert (facts["transport"], facts["prefill_s"], facts["kv_bytes"]) == (["shm"], [0.01], [5])
    assert facts["computed_prompt_tokens"] == [len("hello")]


def test_many_at_once(tmp_path: Path) -> None:
    with stack(tmp_path, *PAIR, ("decode", [])) as s:
        jobs = [in_background(s.url, f"prompt {i}" * 20, 20) for i in range(16)]
        for index, (thread, box) in enumerate(jobs):
            thread.join()
            text = box["response"].json()["choices"][0]["text"]
            assert text == said(f"prompt {index}" * 20, 20)
        assert len({e["pid"] for e in s.log("reserve")}) == 2


def test_the_prefix_index_follows_the_workers(tmp_path: Path) -> None:
    with stack(tmp_path, ("prefill", []), ("prefill", []), ("decode", [])) as s:
        for _ in range(6):
            assert ask(s.url, "x" * 300).status_code == 200
        assert len({e["pid"] for e in s.log("prefill")}) == 1


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_kill_before_the_first_token_is_retried_elsewhere(tmp_path: Path, role: str) -> None:
    slow = ["--prefill-s", "0.6"]
    with stack(tmp_path, ("prefill", slow), ("prefill", slow), ("decode", []), ("decode", [])) as s:
        thread, box = in_background(s.url)
        entry = s.wait(lambda: s.log("prefill" if role == "prefill" else "reserve"))[0]
        if role == "decode":
            s.wait(lambda: s.log("prefill"))
        os.kill(entry["pid"], signal.SIGKILL)
        killed = time.monotonic()
        thread.join()
        assert box["response"].json()["choices"][0]["text"] == said("hello", 8)
        assert box["response"].json()["kvcore"]["attempts"] == [2]
        assert box["at"] - killed < 2.0
        # The partner of the broken attempt was told to forget it.
        assert s.wait(lambda: s.log("cancel"))


def test_kill_in_mid_answer_goes_on_elsewhere(tmp_path: Path) -> None:
    dying = ["--delay-s", "0.02", "--die-after", "5"]
    with stack(tmp_path, ("prefill", []), ("decode", dying), ("decode", dying)) as s:
        response = ask(s.url, count=12, stream=True, stream_options={"include_usage": True})
        events = events_of(response)
        assert events[-1] == "[DONE]"
        text = "".join(c["text"] for e in events[:-1] for c in e["choices"])
        assert text == said("hello", 12)
        usage = events[-2]["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 12)
        again = s.log("reserve")[-1]
        assert again["prompt"] == 5 + 5


def test_kill_without_another_worker_is_an_error_within_2_s(tmp_path: Path) -> None:
    config = {"fleet": {"max_restarts": 0}}
    with stack(tmp_path, ("prefill", []), ("decode", ["--delay-s", "0.05"]), config=config) as s:
        thread, box = in_background(s.url, count=200)
        s.wait(lambda: s.log("reserve"))
        killed = time.monotonic()
        os.kill(s.pid("decode-1"), signal.SIGKILL)
        thread.join()
        assert box["response"].status_code == 503
        error = box["response"].json()["error"]
        assert error["code"] == "worker_lost" and "decode" in error["message"]
        assert box["at"] - killed < 2.0
        assert httpx.get(s.url + "/health").status_code == 503


def test_stream_broken_for_good_ends_with_an_error_event(tmp_path: Path) -> None:
    config = {"fleet": {"max_restarts": 0}}
    dying = ["--delay-s", "0.02", "--die-after", "3"]
    with stack(tmp_path, ("prefill", []), ("decode", dying), config=config) as s:
        client = openai.OpenAI(base_url=s.url + "/v1", api_key="x", max_retries=0)
        stream = client.completions.create(model=MODEL, prompt="hello", max_tokens=9, stream=True)
        with pytest.raises(openai.APIError, match="lost"):
            list(stream)
        client.close()


def test_a_restarted_worker_rejoins_and_serves(tmp_path: Path) -> None:
    with stack(tmp_path, *PAIR) as s:
        assert ask(s.url).status_code == 200
        first = s.pid("decode-1")
        os.kill(first, signal.SIGKILL)
        s.wait(lambda: s.log("joined", "decode")[-1]["pid"] != first)
        s.wait(lambda: s.roles()["decode"] == 1)
        assert ask(s.url).json()["choices"][0]["text"] == said("hello", 8)
        assert "kvcore_router_events" in httpx.get(s.url + "/metrics").text


def test_a_request_waits_for_the_restarted_worker(tmp_path: Path) -> None:
    config = {"router": {"rejoin_wait_s": 10.0}}
    with stack(tmp_path, ("prefill", ["--prefill-s", "0.3"]), ("decode", []), config=config) as s:
        thread, box = in_background(s.url)
        s.wait(lambda: s.log("prefill"))
        os.kill(s.pid("prefill-0"), signal.SIGKILL)
        thread.join()
        assert box["response"].json()["choices"][0]["text"] == said("hello", 8)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_with_default_settings_a_request_outlives_a_slow_restart(tmp_path: Path, role: str) -> None:
    """The stream stays open, with signs of life, and goes on where it broke."""
    slow = ["--restart-s", "3.5"]
    fleet = ("prefill", [*slow, "--prefill-s", "0.3"]), ("decode", [*slow, "--delay-s", "0.05"])
    with stack(tmp_path, *fleet) as s:
        thread, box = in_background(s.url, count=30, stream=True)
        kind = "prefill" if role == "prefill" else "reserve"
        pid = s.wait(lambda: s.log(kind))[0]["pid"]
        if role == "decode":
            s.wait(lambda: generated(s.url) >= 5)
        os.kill(pid, signal.SIGKILL)
        thread.join()
        events = events_of(box["response"])
        assert events[-1] == "[DONE]"
        assert "".join(e["choices"][0]["text"] for e in events[:-1]) == said("hello", 30)
        assert (role == "decode") == (": waiting\n" in box["response"].text)


def test_a_stopped_worker_is_noticed_by_its_silence(tmp_path: Path) -> None:
    config = {"router": {"heartbeat_timeout_s": 0.6, "heartbeat_ms": 100}}
    with stack(tmp_path, *PAIR, config=config) as s:
        pid = s.pid("decode-1")
        os.kill(pid, signal.SIGSTOP)
        try:
            s.wait(lambda: s.roles()["decode"] == 0, 2.0)
        finally:
            os.kill(pid, signal.SIGKILL)
        s.wait(lambda: s.roles()["decode"] == 1)


@pytest.mark.parametrize(("mute_s", "kept"), [("1.0", True), ("3.0", False)])
def test_a_silent_worker_that_runs_gets_patience(tmp_path: Path, mute_s: str, kept: bool) -> None:
    """Without CPU time for a while is not dead; silent for five timeouts is."""
    config = {"router": {"heartbeat_timeout_s": 0.3, "heartbeat_ms": 50}}
    with stack(tmp_path, ("mono", ["--mute-s", mute_s]), config=config) as s:
        time.sleep(2.0)
        lost = s.call(lambda: s.deployment.router.dispatcher.counters["workers_lost"])
        assert (lost == 0) == kept


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_told_to_both_workers(tmp_path: Path, stream: bool) -> None:
    slow = [("prefill", ["--prefill-s", "5"]), ("decode", [])]
    with stack(tmp_path, *slow) as s:
        with pytest.raises(httpx.ReadTimeout):
            body = {"model": MODEL, "prompt": "a", "stream": stream}
            httpx.post(s.url + "/v1/completions", json=body, timeout=0.5)
        s.wait(lambda: s.log("cancel", "prefill") and s.log("cancel", "decode"))
        assert s.call(lambda: s.deployment.router.dispatcher.num_running) == 0


def test_a_stop_string_cancels_the_rest(tmp_path: Path) -> None:
    whole = said("hello", 200)
    stop = whole[20:24]
    with stack(tmp_path, ("prefill", []), ("decode", ["--delay-s", "0.01"])) as s:
        body = ask(s.url, count=200, stop=stop).json()
        assert body["choices"][0]["text"] == whole[: whole.index(stop)]
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["usage"]["completion_tokens"] == whole.index(stop) + len(stop)
        s.wait(lambda: s.log("cancel", "decode"))


def test_too_many_requests_are_sent_away(tmp_path: Path) -> None:
    config = {"http": {"max_queue": 1}}
    slow = [("prefill", ["--prefill-s", "1.0"]), ("decode", [])]
    with stack(tmp_path, *slow, config=config) as s:
        first = in_background(s.url, "x" * 3000)
        s.wait(lambda: s.log("prefill"))
        second = in_background(s.url, "y" * 3000)
        s.wait(lambda: s.call(lambda: s.deployment.router.dispatcher.num_waiting) == 1)
        response = ask(s.url)
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["code"] == "no_capacity"
        for thread, box in (first, second):
            thread.join()
            assert box["response"].status_code == 200


def test_failures_of_workers(tmp_path: Path) -> None:
    failing = ["--fail", "invalid_argument", "--retryable", "0"]
    with stack(tmp_path, ("prefill", []), ("decode", failing)) as s:
        response = ask(s.url)
        assert response.status_code == 400
        assert "asked to" in response.json()["error"]["message"]


def test_retryable_failures_are_bounded(tmp_path: Path) -> None:
    with stack(tmp_path, ("prefill", []), ("decode", ["--fail", "internal"])) as s:
        assert ask(s.url).status_code == 500
        assert len(s.log("reserve")) == 3


def test_the_deadline_ends_a_request(tmp_path: Path) -> None:
    config = {"http": {"request_timeout_s": 0.5}}
    slow = [("prefill", ["--prefill-s", "5"]), ("decode", [])]
    with stack(tmp_path, *slow, config=config) as s:
        start = time.monotonic()
        assert ask(s.url).status_code == 504
        assert time.monotonic() - start < 1.5
        s.wait(lambda: s.log("cancel", "prefill"))


def test_a_worker_of_another_geometry_is_refused(tmp_path: Path) -> None:
    fleet = (("prefill", []), ("decode", ["--page-spec", "other"]))
    deployed = stack(tmp_path, *fleet, config={"fleet": {"max_restarts": 1}})
    with pytest.raises(WorkerFailed, match="2 times"), deployed:
        pass
    lines = (tmp_path / "log").read_text().splitlines()
    assert len({json.loads(line)["role"] for line in lines}) == 1


def test_a_worker_that_keeps_dying_takes_no_other_down(tmp_path: Path) -> None:
    """The one of its role that serves goes on."""
    fleet = (*PAIR, ("decode", ["--exit", "1"]))
    config = {"fleet": {"max_restarts": 1}}
    with stack(tmp_path, *fleet, config=config) as s:
        s.wait(lambda: s.call(lambda: s.deployment.launcher.restarts) >= 4, 20)
        assert ask(s.url).json()["choices"][0]["text"] == said("hello", 8)
        assert httpx.get(s.url + "/health").json()["workers"] == {
            "prefill": 1,
            "decode": 1,
            "mono": 0,
        }
        s.call(s.deployment.check)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("page_size=32 format=bf16", "page_size = '32', but this router serves '64'"),
        ("page_size=64 format=f32", "format = 'f32', but this router serves 'bf16'"),
        ("", "page_size = None, but"),
    ],
)
def test_the_first_worker_too_must_be_of_what_is_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, given: str, says: str
) -> None:
    deployed = stack(
        tmp_path, ("mono", ["--page-spec", given]), config={"fleet": {"max_restarts": 0}}
    )
    with pytest.raises(WorkerFailed), deployed:
        pass
    assert says in caplog.text and not (tmp_path / "log").exists()


def test_a_worker_that_cannot_start_is_not_tried_again(tmp_path: Path) -> None:
    deployed = stack(tmp_path, ("prefill", []), ("decode", ["--exit", "2"]))
    with pytest.raises(WorkerFailed, match="exit code 2") as caught, deployed:
        pass
    assert caught.value.exit_code == 2


def test_mono(tmp_path: Path) -> None:
    with stack(tmp_path, ("mono", [])) as s:
        assert ask(s.url).json()["choices"][0]["text"] == said("hello", 8)


def test_logprobs_pass_through(tmp_path: Path) -> None:
    with stack(tmp_path, *PAIR) as s:
        choice = ask(s.url, count=3, logprobs=2).json()["choices"][0]
        assert choice["logprobs"]["token_logprobs"] == [-1.0] * 3
        said_by = choice["logprobs"]
        for token, top in zip(said_by["tokens"], said_by["top_logprobs"], strict=True):
            assert top == {"(": -1.0, ")": -1.0, token: -1.0}


def test_shutdown_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    with stack(tmp_path, *PAIR) as s:
        pids = list(s.call(s.deployment.launcher.pids).values())
        runtime_dir = s.deployment.runtime_dir
        assert runtime_dir.stat().st_mode & 0o777 == 0o700
        thread, box = in_background(s.url, count=4000)
        s.wait(lambda: s.log("reserve"))
    thread.join()
    assert box["response"].status_code in (200, 503)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not runtime_dir.exists()


def test_shutdown_tells_every_client_why_and_takes_no_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Streams under way, a request that waits for a worker, a client that is still sending."""
    fleet = ("prefill", ["--restart-s", "60"]), ("decode", ["--delay-s", "0.1"])
    with stack(tmp_path, *fleet) as s:
        running = [in_background(s.url, count=4000, stream=stream) for stream in (True, False)]
        s.wait(lambda: len(s.log("reserve")) == 2 and s.log("prefill"))
        s.wait(lambda: generated(s.url) >= 4)
        os.kill(s.pid("prefill-0"), signal.SIGKILL)
        s.wait(lambda: s.roles()["prefill"] == 0)
        waiting = in_background(s.url)
        s.wait(lambda: s.call(lambda: s.deployment.router.dispatcher.num_waiting) == 1)
        parts = urlsplit(s.url)
        sending = socket.create_connection((parts.hostname, parts.port), timeout=5)
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
        sending.sendall(head.encode())
        time.sleep(0.1)
        began = time.monotonic()
    assert time.monotonic() - began < 3.0
    sending.close()
    for thread, _ in (*running, waiting):
        thread.join()
    event = events_of(running[0][1]["response"])[-1]
    assert event["error"]["message"] == "the server is shutting down"
    for _, box in (running[1], waiting):
        error = box["response"].json()["error"]
        assert (box["response"].status_code, error["code"]) == (503, "shutting_down")
    assert not [r for r in caplog.records if r.exc_info or r.levelno >= logging.ERROR]
