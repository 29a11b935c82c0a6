"""``kvcore serve --kv-profile``: calibrated once, chosen per request, through kills and cancels."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support import served_model
from support.live import PROMPT, Serve, alive

SMALL = ["--kv-profile", "small", "--page-size", "64"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return served_model.make(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module", params=["pair", "mono"])
def small(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serve]:
    flags = ["--mono", "1"] if request.param == "mono" else []
    serve = Serve(tmp_path_factory.mktemp("small"), model, *SMALL, *flags)
    serve.wait_ready()
    yield serve
    serve.process.terminate()
    serve.process.wait()


@pytest.fixture(scope="module")
def exact(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    serve = Serve(tmp_path_factory.mktemp("exact"), model, "--mono", "1", "--page-size", "64")
    serve.wait_ready()
    yield serve
    serve.process.terminate()
    serve.process.wait()


def decoder(serve: Serve) -> str:
    return "decode" if serve.pids("decode") else "mono"


def ask(serve: Serve, prompt: str, count: int = 60, profile: str = "") -> Any:
    more: dict[str, Any] = {"ignore_eos": True, "return_token_ids": True}
    if profile:
        more["kv_profile"] = profile
    return serve.ask(prompt, count, extra_body=more)


def bytes_of(serve: Serve, *names: str) -> float:
    return sum(serve.stats(name)[decoder(serve)] for name in names)


def at_rest(serve: Serve) -> bool:
    """No sequence holds pages, and what is held is in the caches."""
    return all(set(serve.stats(n).values()) == {0.0} for n in ("running", "owned_pages"))


def test_the_model_is_calibrated_once_in_the_template_and_the_table_is_told(small: Serve) -> None:
    assert len(re.findall("calibrating for its KV profiles", small.log)) == 1
    assert small.log.index("calibrated on") < small.log.index("kv_profile small: table")
    forked = small.log.count("decoder, bfloat16") == len(small.templates()) == 1
    assert forked and "load the model each" not in small.log, "by the first server of a model too"
    share = re.search(
        r"kv_profile small: table (\w+), \d+ bytes a page, ([\d.]+) % of bf16", small.log
    )
    assert share and float(share[2]) < 40
    metrics = httpx.get(small.url + "/metrics").text
    line = next(x for x in metrics.splitlines() if "kvcore_kv_profile{" in x and "small" in x)
    assert f'profile="small",role="{decoder(small)}",table="{share[1]}' in line
    assert float(line.split()[-1]) == pytest.approx(float(share[2]) / 100, abs=0.001)
    assert small.stats("kv_drift")[decoder(small)] == 1.0  # nothing judged yet


def test_a_request_chooses_and_exact_is_what_an_exact_server_answers(
    small: Serve, exact: Serve
) -> None:
    prompt = "Which pages are whose? " * 12
    want = ask(exact, prompt).choices[0].model_dump()["token_ids"]
    ask(small, prompt)
    small.wait(lambda: small.stats("compressed_pages")[decoder(small)] > 0, 20)
    assert ask(small, prompt, profile="small").usage.prompt_tokens_details.cached_tokens >= 192
    again = ask(small, prompt, profile="exact")
    assert again.choices[0].model_dump()["token_ids"] == want
    assert ask(exact, prompt, profile="small").choices[0].model_dump()["token_ids"] == want
    for serve in (small, exact):
        with pytest.raises(Exception, match="kv_profile"):
            ask(serve, prompt, profile="tiny")


def test_long_prompts_many_at_once_and_clients_that_leave(small: Serve) -> None:
    answers: dict[int, Any] = {}

    def run(index: int) -> None:
        answers[index] = ask(small, f"{index} {PROMPT}" * (1 + index % 4), 40)

    def leave(index: int) -> None:
        stream = small.ask(f"leaving {index} " * 40, count=400, stream=True)
        next(iter(stream))
        stream.close()

    threads = [threading.Thread(target=f, args=(i,)) for i in range(10) for f in (run, leave)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answers[i].usage.completion_tokens for i in range(10)] == [40] * 10
    small.wait(lambda: at_rest(small), 20)


def test_kill_9_in_mid_request_and_bytes_are_back(small: Serve) -> None:
    role, pieces = decoder(small), []
    worker = small.pids(role)[-1]
    total = bytes_of(small, "free_bytes", "open_bytes", "compressed_bytes")

    def read() -> None:
        for chunk in small.ask(PROMPT, 900, stream=True, extra_body={"ignore_eos": True}):
            pieces.extend(choice.model_dump() for choice in chunk.choices)

    thread = threading.Thread(target=read)
    thread.start()
    small.wait(lambda: len(pieces) > 80, 30)
    os.kill(worker, signal.SIGKILL)
    thread.join(60)
    assert pieces[-1]["finish_reason"] == "length" and not alive(worker)
    small.wait(lambda: at_rest(small), 20)
    # None is lost: the cache has what is in use.
    assert bytes_of(small, "free_bytes", "open_bytes", "compressed_bytes") == total
    assert 0 < bytes_of(small, "open_bytes", "compressed_bytes") < total
    assert len(re.findall("calibrating for its KV profiles", small.log)) == 1


@pytest.mark.parametrize("command", ["serve", "run", "worker"])
@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--dtype", "float32"], "kv_profile 'small' compresses bf16 pages; these are f32"),
        (["--page-size", "128"], "holds no three pages"),
    ],
)
def test_what_cannot_be_compressed_is_refused_at_start(
    tmp_path: Path, command: str, flags: list[str], reason: str
) -> None:
    made = served_model.make(tmp_path / "tiny", max_position=256)
    argv = [sys.executable, "-m", "kvcore", command]
    argv += {"serve": [made, "--port", "0"], "run": [made, "hello"]}.get(
        command, ["mono", "--model", made, "--router", f"unix:{tmp_path}/router.sock"]
    )
    argv += ["--kv-bytes", "16Mi", "--kv-profile", "small", *flags]
    done = subprocess.run(
        [*map(str, argv)], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert reason in done.stderr


def test_run_answers_over_compressed_pages(model: Path, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "kvcore", "run", str(model), PROMPT, "--max-tokens", "70"]
    argv += ["--kv-bytes", "16Mi", "--kv-profile", "small"]
    env = {**os.environ, "HOME": str(tmp_path), "KVCORE_LOG": "info"}
    done = subprocess.run(argv, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 1 and "kv_profile small: table" in done.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("flags", [[], ["--mono", "1"]])
def test_the_real_model_answers_chats_over_small_pages(flags: list[str], tmp_path: Path) -> None:
    from kvcore import model as models

    try:
        files = models.resolve(models.DEFAULT_MODEL)
    except models.ModelUnavailable as error:
        pytest.skip(f"the default model cannot be had: {error}")
    serve = Serve(tmp_path, files.path, *SMALL, "--kv-bytes", "512Mi", *flags)
    try:
        serve.wait_ready()
        text = "The capital of France is Paris. The capital of Italy is Rome. " * 20
        chat = [{"role": "user", "content": text + "What is the capital of France?"}]
        for profile in ("small", "balanced", "exact"):
            got = serve.client.chat.completions.create(
                model=serve.model, messages=chat, max_tokens=24, temperature=0,
                extra_body={"kv_profile": profile},
            )  # fmt: skip
            assert "Paris" in got.choices[0].message.content
    finally:
        serve.process.terminate()
        serve.process.wait()
