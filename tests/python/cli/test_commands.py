"""The command line: exit codes and messages, without a model."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kvcore import cli, info, wire
from kvcore.config import make_key_file
from kvcore.errors import KvcoreError
from kvcore.serve.launcher import assign_cpus
from support import served_model

USABLE = f"this process may use {len(os.sched_getaffinity(0))} CPUs"


def kvcore(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    try:
        code = cli.main(argv)
    except SystemExit as error:
        code = int(error.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["serve", "--page-sice", "64"], "did you mean --page-size?"),
        (["serve", "--page-size", "48"], "worker.page_size = 48"),
        (["serve", "--port", "x"], "--port"),
        (["serve", "--host", "0.0.0.0"], "api-key-file"),
        (["serve", "--host", "example.com"], "api-key-file"),
        (["serve", "--config", "/nonexistent.toml"], "/nonexistent.toml"),
        (["serve", "--mono", "1", "--decode", "1"], "fleet.mono = 1"),
        (["serve", "--kv-bytes", "900Ti", "--port", "0"], "worker.kv_bytes"),
        (["serve", "--threads", "999", "--port", "0"], f"worker.threads = 999: {USABLE}"),
        (["run", "m", "x", "--threads", "999"], f"worker.threads = 999: {USABLE}"),
        (["worker", "mono", "--router", "unix:/x", "--threads", "999"], USABLE),
        (["serve", "--kv-bytes", "5"], "must be >= 1Mi"),
        (["serve", "--max-wait-s", "nan"], "http.max_wait_s = nan"),
        (["serve", "--router-address", "foo", "--port", "0"], "router.address"),
        (["serve", "--key-file", "/nonexistent", "--port", "0"], "/nonexistent"),
        (["serve", "no-such-model", "--port", "0"], "no-such-model"),
        (["worker", "king", "--router", "unix:/x"], "king"),
        (["worker", "decode"], "--router"),
        (["worker", "decode", "--router", "unix:/x", "--key-file", "/nonexistent"], "/nonexistent"),
        (["worker", "decode", "--router", "unix:/x", "--cpus", "a"], "--cpus a"),
        (["worker", "decode", "--router", "unix:/x", "--cpus", "9999"], "--cpus 9999"),
        (["worker", "mono", "--router", "foo"], "--router"),
        (["worker", "mono", "--router", "unix:"], "--router"),
        (["worker", "mono", "--router", "unix:/" + "x" * 200], "107 bytes"),
        (["worker", "mono", "--router", "tcp:127.0.0.1:0"], "port 0"),
        (["worker", "mono", "--router", "tcp:10.0.0.1:80"], "--key-file"),
        (["worker", "mono", "--router", "unix:/x", "--kv-bytes", "900Ti"], "worker.kv_bytes"),
        (["worker", "mono", "--router", "unix:/x", "--runtime-dir", "/absent"], "/absent"),
        (["run", "m", "\udcff"], "PROMPT = '\\udcff': not valid UTF-8"),
        (["run", "\udcff", "x"], "model = '\\udcff': not valid UTF-8"),
        (["run", "~no-such-user/m", "x"], "~no-such-user/m"),
        (["run", "m" * 5000, "x"], "too long"),
        (["run", "m", ""], "PROMPT: is empty"),
        (["run", "m", "x", "--max-tokens", "0"], "--max-tokens: 0: must be >= 1"),
        (["run", "m", "x", "--max-tokens", "x"], "invalid int value: 'x'"),
        (["run", "m", "x", "--temperature", "nan"], "--temperature: nan: must be >= 0"),
        (["run", "m", "x", "--top-p", "0"], "--top-p: 0: must be >= 1e-09 and <= 1"),
        (["run", "m", "x", "--seed", "-1"], "--seed: -1: must be >= 0 and <= 18446744073709551615"),
        (["run", "m", "x", "--kv-bytes", "900Ti"], "worker.kv_bytes"),
        (["demo", "--max-tokens", "0"], "--max-tokens: 0: must be >= 1"),
        (["nonsense"], "nonsense"),
        ([], "COMMAND"),
    ],
)
def test_wrong_usage_exits_2(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    argv: list[str],
    message: str,
) -> None:
    """Before anything is loaded: a model that would be read is not there."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("kvcore.model.hub.KNOWN_MODELS", {})
    code, _, err = kvcore(capsys, *argv)
    assert code == 2
    assert message in err


@contextlib.contextmanager
def router(folder: Path, key: bytes) -> Iterator[str]:
    """A router of this key in a thread; its address."""
    up, loop = threading.Event(), asyncio.new_event_loop()

    async def handler(connection: wire.Connection) -> None:
        pytest.fail("a worker got in")

    def run() -> None:
        server = loop.run_until_complete(wire.serve(f"unix:{folder}/r.sock", key, handler))
        up.set()
        loop.run_forever()
        loop.run_until_complete(server.close())
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    assert up.wait(10)
    yield f"unix:{folder}/r.sock"
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)


@pytest.mark.parametrize("given", [True, False])
def test_a_wrong_key_is_refused_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str], tiny: Path, tmp_path: Path, given: bool
) -> None:
    make_key_file(tmp_path / "other.key")
    argv = ["--key-file", str(tmp_path / "other.key")] if given else []
    with router(tmp_path, make_key_file(tmp_path / "own.key")) as address:
        command = ("worker", "prefill", "--router", address, "--model", str(tiny))
        code, _, err = kvcore(capsys, *command, *argv)
    assert code == 2
    assert f"--router {address}: " in err and "did not prove the pre-shared key" in err
    assert (f"{tmp_path}/other.key" if given else "it wants a --key-file") in err


def test_a_router_that_is_not_there_yet_does_not_keep_the_model_from_loading(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))

    def build(*args: Any) -> None:
        raise KvcoreError("loading")

    monkeypatch.setattr("kvcore.worker.build.build_worker", build)
    code, _, err = kvcore(capsys, "worker", "mono", "--router", f"unix:{tmp_path}/r.sock")
    assert code == 1 and "loading" in err and f"no router at unix:{tmp_path}/r.sock yet" in err


def test_an_unknown_log_level_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCORE_LOG", "loud")
    code, _, err = kvcore(capsys, "info")
    assert code == 2 and "KVCORE_LOG = 'loud'" in err


def test_a_taken_port_is_said_so(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        code, _, err = kvcore(capsys, "serve", "--port", str(port))
    assert code == 1
    assert f"port {port} of 127.0.0.1 is taken" in err


def test_what_cannot_be_is_said_before_a_port_is_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = str(sock.getsockname()[1])
        code, _, err = kvcore(capsys, "serve", "--kv-bytes", "900Ti", "--port", port)
    assert code == 2 and "worker.kv_bytes" in err


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model whose weights must not be read: the refusal comes before."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("kvcore.model.load", lambda *a: pytest.fail("the model is loaded"))
    return served_model.make(tmp_path / "tiny")


def test_a_prompt_is_measured_before_the_weights_are_read(
    capsys: pytest.CaptureFixture[str], tiny: Path
) -> None:
    code, _, err = kvcore(capsys, "run", str(tiny), "x" * 2048, "--raw")
    assert code == 2 and "PROMPT: has 2048 tokens, must be >= 1 and < 2048" in err


def test_a_model_without_a_chat_template_is_named(
    capsys: pytest.CaptureFixture[str], tiny: Path
) -> None:
    (tiny / "tokenizer_config.json").write_text("{}")
    code, _, err = kvcore(capsys, "run", str(tiny), "x")
    assert code == 2 and "no chat template; --raw" in err


def test_what_the_system_refuses_is_said_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(info, "gather", lambda: os.listdir("/nonexistent/facts"))
    code, _, err = kvcore(capsys, "info")
    assert code == 1 and err.count("\n") == 1 and "/nonexistent/facts" in err


def test_a_data_directory_that_cannot_be_made_is_named(
    capsys: pytest.CaptureFixture[str], tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tiny / "config.json"
    for name, value in (("HOME", str(home)), ("XDG_DATA_HOME", str(home / "data"))):
        monkeypatch.setenv(name, value)
        code, _, err = kvcore(capsys, "serve", str(tiny), "--port", "0")
        assert code == 2 and value in err and "Set XDG_DATA_HOME" in err


def test_without_a_home_it_says_what_to_set(
    capsys: pytest.CaptureFixture[str], tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    code, _, err = kvcore(capsys, "serve", str(tiny), "--port", "0")
    assert code == 2 and "set HOME or XDG_DATA_HOME" in err
    code, _, err = kvcore(capsys, "run", "smollm2-135m-instruct", "x")
    assert code == 2 and "set HOME or XDG_CACHE_HOME" in err
    assert info.gather()["kv_profiles"] == [
        "exact",
        "no home directory: set HOME or XDG_CACHE_HOME",
    ]


def test_a_reader_that_leaves_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    argv = [sys.executable, "-m", "kvcore", "info", "--json"]
    done = subprocess.run(argv, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert done.returncode == 128 + signal.SIGPIPE and done.stderr == ""


def test_a_readable_key_file_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("secret")
    path.chmod(0o644)
    code, _, err = kvcore(capsys, "serve", "--host", "0.0.0.0", "--api-key-file", str(path))
    assert code == 2 and "others may read it" in err and "secret" not in err
    path.chmod(0o600)
    path.write_text(" \n")
    code, _, err = kvcore(capsys, "serve", "--host", "0.0.0.0", "--api-key-file", str(path))
    assert code == 2 and "is empty" in err


@pytest.mark.parametrize(
    ("command", "texts"),
    [
        ("worker", ["--transport {shm,tcp,rdma,rdma-or-tcp}"]),
        ("worker", ["--dtype {bfloat16,float32}", "--kv-bytes SIZE"]),
        ("worker", ["--checksums {sampled,all,off}", "--page-size {16,32,64,128}"]),
        ("run", ["answer at most (default: 128)", "likeliest token (default: 0.0)"]),
        ("run", ["have this share (default: 1.0)", "says the same (default: 0)"]),
        ("demo", ["workers (default: shm)", "per answer (default: 48)"]),
    ],
)
def test_help_says_what_is_allowed_and_the_default(
    capsys: pytest.CaptureFixture[str], command: str, texts: list[str]
) -> None:
    code, out, _ = kvcore(capsys, command, "--help")
    assert code == 0
    for text in texts:
        assert text in " ".join(out.split())


def test_every_flag_has_a_text() -> None:
    (commands,) = (a for a in cli._parser()._actions if isinstance(a, argparse._SubParsersAction))
    for name, parser in commands.choices.items():
        bare = [a.dest for a in parser._actions if not a.help and a.dest != "role"]
        assert not bare, f"{name}: {bare}"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = kvcore(capsys, "--version")
    assert code == 0 and out.startswith("kvcore ")


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = kvcore(capsys, "info", "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["isa"]["in_use"] in facts["isa"]["available"]
    for name in ("cuda", "rdma", "huge_pages", "io_uring"):
        assert isinstance(facts[name]["available"], bool) and facts[name]["why"]
    assert facts["memory"]["available_bytes"] > 0
    code, out, _ = kvcore(capsys, "info")
    assert {line[:12].strip() for line in out.splitlines()} >= {
        "isa",
        "cuda",
        "huge pages",
        "build",
        "kv profiles",
    }


def test_info_leaves_no_file_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    info.gather()
    assert len(os.listdir("/proc/self/fd")) == before


def test_importing_the_command_line_is_light() -> None:
    code = (
        "import sys, kvcore.cli; print([m for m in ('torch', 'numpy', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_orphans_end_with_their_parent() -> None:
    """A process that asked for it is killed with its parent, and ends if the parent is gone."""
    inner = "import time; from kvcore.cli import die_with_parent as d; d({}); print(1, flush=True)"
    script = (
        "import os, subprocess, sys\n"
        f"code = {inner!r}.format(os.getpid()) + '; time.sleep(60)'\n"
        "p = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE)\n"
        "p.stdout.readline(); print(p.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    pid = int(done.stdout)
    for _ in range(200):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            break
        if state == "Z":
            break
        subprocess.run(["sleep", "0.02"], check=True)
    else:
        raise AssertionError("the orphan lives")
    code = inner.format(os.getpid() + 100_000)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""


def test_cpus_are_shared_out() -> None:
    free = sorted(os.sched_getaffinity(0))
    assert assign_cpus(1, 1) == [(free[0],)]
    assert assign_cpus(len(free), 1) == [(cpu,) for cpu in free]
    assert assign_cpus(len(free) + 1, 1) == [()] * (len(free) + 1)
