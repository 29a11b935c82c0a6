"""``kvcore serve`` as a user runs it: real processes, a tiny real model, the openai client."""

from __future__ import annotations

import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from kvcore import config
from kvcore.serve import rundir
from support import served_model
from support.live import FLAGS, PROMPT, Serve, alive, kill_in_mid_request


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return served_model.make(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    serve = Serve(tmp_path_factory.mktemp("pair"), model)
    serve.wait_ready()
    yield serve
    serve.process.kill()
    serve.process.wait()


@pytest.fixture(scope="module")
def mono(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    serve = Serve(tmp_path_factory.mktemp("mono"), model, "--mono", "1")
    serve.wait_ready()
    yield serve
    serve.process.kill()
    serve.process.wait()


@pytest.fixture(autouse=True)
def _show_log(request: pytest.FixtureRequest) -> Iterator[None]:
    """The server's log stands beside a failure."""
    serves = [request.getfixturevalue(n) for n in ("pair", "mono") if n in request.fixturenames]
    before = [len(serve.log) for serve in serves]
    yield
    for serve, start in zip(serves, before, strict=True):
        sys.stdout.write(serve.log[start:])


def test_pair_and_mono_say_the_same(pair: Serve, mono: Serve) -> None:
    more = {"extra_body": {"return_token_ids": True}}
    for size in (1, 15, 16, 17, 200):
        answers = [s.ask(PROMPT[:size], **more).choices[0].model_dump() for s in (pair, mono)]
        assert answers[0]["token_ids"] == answers[1]["token_ids"]
        assert len(answers[0]["token_ids"]) == 12 or answers[0]["finish_reason"] == "stop"
    warm = {"temperature": 1.5, "seed": 7, "top_p": 0.9, **more}
    answers = [s.ask(**warm).choices[0].model_dump() for s in (pair, mono)]
    assert answers[0]["token_ids"] == answers[1]["token_ids"]


def test_the_second_time_it_is_cached(pair: Serve) -> None:
    prompt = "Once upon a time there was a page. " * 8
    first, second = pair.ask(prompt), pair.ask(prompt)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens >= len(prompt) // 64 * 64 - 64
    facts = [answer.model_dump()["kvcore"] for answer in (first, second)]
    assert facts[0]["transport"] == ["shm"]
    assert 0 < facts[1]["kv_bytes"][0] < facts[0]["kv_bytes"][0]
    assert second.choices[0].text == first.choices[0].text
    assert pair.stats("computed_prompt_tokens")["decode"] == 0
    metrics = httpx.get(pair.url + "/metrics").text
    hits = re.search(r'kvcore_router_events\{event="prefix_hits"\} (\S+)', metrics)
    assert hits and float(hits[1]) >= 1, "router and workers name pages by the same keys"


def test_chat_streams(pair: Serve) -> None:
    ask = {"model": pair.model, "messages": [{"role": "user", "content": "hi"}], "temperature": 0}
    whole = pair.client.chat.completions.create(**ask, max_tokens=9, logprobs=True, top_logprobs=2)
    stream = pair.client.chat.completions.create(**ask, max_tokens=9, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == whole.choices[0].message.content
    entries = whole.choices[0].logprobs.content
    assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 2 for entry in entries)


def test_many_at_once_with_clients_that_leave(pair: Serve) -> None:
    alone = [pair.ask(f"prompt number {i}, " * (i + 1)).choices[0].text for i in range(8)]
    texts: dict[int, str] = {}

    def run(index: int) -> None:
        texts[index] = pair.ask(f"prompt number {index}, " * (index + 1)).choices[0].text

    def leave(index: int) -> None:
        stream = pair.ask("leaving early " * index, count=400, stream=True)
        next(iter(stream))
        stream.close()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
    threads += [threading.Thread(target=leave, args=(i + 1,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [texts[i] for i in range(8)] == alone
    pair.wait(lambda: set(pair.stats("running").values()) == {0.0}, 10)


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_kill_9_of_the_only_worker_in_mid_request(pair: Serve, role: str) -> None:
    """The worker is back, and the request dispatched again, within 2 s; the answer is the same."""
    took = []
    for number in range(3):
        prompt = f"{role} {number} " + "x" * 100
        text, seconds = kill_in_mid_request(pair, role, prompt)
        whole = pair.ask(prompt, 1800, extra_body={"ignore_eos": True})
        assert text == whole.choices[0].text
        took.append(seconds)
    print(f"dispatched again after {[round(seconds, 2) for seconds in took]} s")
    assert statistics.median(took) < 2.0
    pair.wait(lambda: set(pair.stats("owned_pages").values()) == {0.0}, 10)
    pair.wait_ready()


def test_workers_share_the_weights_of_their_template(pair: Serve) -> None:
    assert pair.log.count("decoder, bfloat16") == len(pair.templates()) == 1
    for role in ("prefill", "decode"):
        name = Path(f"/proc/{pair.pids(role)[-1]}/comm").read_text()
        assert name == f"kvcore-{role}\n"
        shown = Path(f"/proc/{pair.pids(role)[-1]}/cmdline").read_bytes().split(b"\0")
        assert shown[3:5] == [b"worker", b"template"], "ps names no role that is another's"
    assert "load the model each" not in pair.log


@pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="two workers need two CPUs to be pinned"
)
def test_only_what_computes_is_pinned(pair: Serve) -> None:
    """What sends and receives may run beside it and need not interrupt it layer by layer."""
    for role in ("prefill", "decode"):
        tasks = Path(f"/proc/{pair.pids(role)[-1]}/task").iterdir()
        cpus = [len(os.sched_getaffinity(int(task.name))) for task in tasks]
        assert cpus.count(1) == 1 and len(cpus) > 3, cpus


def test_a_killed_template_takes_no_worker_along(pair: Serve) -> None:
    workers, (template,) = [pair.pids(r)[-1] for r in ("prefill", "decode")], pair.templates()
    os.kill(template, signal.SIGKILL)
    pair.wait(lambda: len(pair.templates()) == 2, 20)
    assert pair.ask(count=3).usage.completion_tokens == 3
    assert all(alive(pid) for pid in workers)


def test_sigterm_ends_all(mono: Serve) -> None:
    pids = mono.pids() + mono.templates()
    assert pids and all(alive(pid) for pid in pids)
    mono.process.send_signal(signal.SIGTERM)
    assert mono.process.wait(20) == 0
    assert not any(alive(pid) for pid in pids)
    assert list(mono.temp.iterdir()) == []


def test_kill_9_of_serve_leaves_no_orphan(pair: Serve) -> None:
    pids = [pid for pid in pair.pids() + pair.templates() if alive(pid)]
    assert len(pids) == 3
    pair.process.kill()
    pair.process.wait()
    end = time.monotonic() + 5
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.02)
    (left,) = pair.temp.glob("kvcore-*")
    assert (left / "control.key").exists()
    assert rundir.sweep(str(pair.temp)) == [left]
    assert list(pair.temp.iterdir()) == []


@pytest.mark.parametrize("ignored", [False, True])
def test_a_terminal_that_closes_during_the_start(
    model: Path, tmp_path: Path, ignored: bool
) -> None:
    """SIGHUP ends the server as SIGTERM does; not where nohup had it ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        serve = Serve(tmp_path, model, "--mono", "1")
    finally:
        signal.signal(signal.SIGHUP, before)
    try:
        assert "1 worker starting" in serve.wait(lambda: "starting" in serve.log and serve.log)
        serve.process.send_signal(signal.SIGHUP)
        if ignored:
            assert serve.out.readline() == "kvcore: tiny is ready, 1 worker\n"
            serve.process.terminate()
        assert serve.process.wait(20) == 0
        assert serve.out.read() == "" and list(serve.temp.iterdir()) == []
    finally:
        serve.process.kill()
        serve.process.wait()


def test_workers_by_hand(model: Path, tmp_path: Path) -> None:
    """A server without workers says that it waits, and is ready only when it can serve."""
    key, address = tmp_path / "key", f"unix:{tmp_path}/router.sock"
    config.make_key_file(key)
    flags = ["--prefill", "0", "--decode", "0", "--router-address", address]
    serve = Serve(tmp_path, model, *flags, "--key-file", str(key))
    join = ["--router", address, "--key-file", str(key)]
    try:
        assert serve.out.readline() == f"kvcore: waits for workers, {' '.join(join)}\n"
        assert httpx.get(serve.url + "/health").status_code == 503
        argv = [sys.executable, "-m", "kvcore", "worker", "mono", "--model", str(model)]
        argv += [*join, *FLAGS[:4]]
        with subprocess.Popen(argv, env=serve.env) as worker:
            assert serve.out.readline() == "kvcore: tiny is ready, 1 worker\n"
            assert httpx.get(serve.url + "/health").status_code == 200
            assert serve.ask(count=3).usage.completion_tokens == 3
            worker.terminate()
        assert worker.returncode == 0
    finally:
        serve.process.terminate()
        serve.process.wait()
    assert list(serve.temp.iterdir()) == []


def test_run_without_http(model: Path, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "kvcore", "run", str(model), "hello", "--max-tokens", "5"]
    env = {**os.environ, "HOME": "/dev/null"}  # nothing has to be kept
    env |= {"XDG_CACHE_HOME": "/dev/null", "XDG_DATA_HOME": "/dev/null"}
    done = subprocess.run(
        [*argv, "--kv-bytes", "16Mi"], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\n") and len(done.stdout) > 1
