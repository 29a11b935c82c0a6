"""``kvcore bench link``: figures of every link of this host, and errors that say what to do."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import threading
from typing import Any

import pytest
from kvcore import bench_link
from kvcore.config import make_key_file
from kvcore.transport import Transport

COMMAND = [sys.executable, "-m", "kvcore", "bench", "link"]


def bench(*args: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *args], capture_output=True, text=True, timeout=timeout)


def test_two_processes_of_this_host() -> None:
    done = bench("--repetitions", "1", "--json")
    assert done.returncode == 0, done.stderr
    links: list[dict[str, Any]] = json.loads(done.stdout)["links"]
    assert [link["scheme"] for link in links][:2] == ["shm", "tcp"]
    for link in links:
        assert not link["error"]
        assert 0 < link["rtt_us_p50"] <= link["rtt_us_p99"]
        assert 0 < link["write_us_p50"] <= link["write_us_p99"]
        for figures in (link["write_gbps"], link["read_gbps"]):
            assert list(figures) == ["4", "64", "1024"] and min(figures.values()) > 0


def test_two_sides_and_their_key(tmp_path: pathlib.Path) -> None:
    key, other = tmp_path / "key", tmp_path / "other"
    make_key_file(key)
    make_key_file(other)
    server = subprocess.Popen(
        [*COMMAND, "--a", "tcp:127.0.0.1:0", "--key-file", str(key)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        address = server.stdout.readline().split()[-1]
        wrong = bench("--b", address, "--key-file", str(other))
        assert wrong.returncode == 1 and "--key-file must hold the same 32 bytes" in wrong.stdout
        right = bench("--b", address, "--key-file", str(key), "--repetitions", "1")
        assert right.returncode == 0, right.stderr
        assert right.stdout.splitlines()[1].startswith("link") and address in right.stdout
    finally:
        server.kill()
        server.communicate()


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["--b", "tcp:127.0.0.1:1"], 1, "does `kvcore bench link --a ...` serve there"),
        (["--b", "ftp:x"], 1, "ftp:x"),
        (["--a", "tcp:0.0.0.0:0"], 2, "a 32-byte key is needed"),
        (["--a", "nonsense"], 2, "--a nonsense"),
        (["--b", "tcp:127.0.0.1:1", "--key-file", "/dev/null"], 2, "must be 0600"),
        (["--repetitions", "0"], 2, "must be"),
    ],
)
def test_errors_say_what_to_do(args: list[str], code: int, says: str) -> None:
    done = bench(*args)
    assert done.returncode == code, done.stderr
    assert says in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_a_side_that_dies_is_an_error_of_its_line() -> None:
    with Transport() as transport:
        address = transport.listen("tcp:127.0.0.1:0")
    figures = bench_link.measure(address, b"")
    assert figures.error and not figures.write_gbps
    assert address in bench_link.table([figures])


def test_who_answers_something_else() -> None:
    """Side A may measure with another just now, or be no side A at all."""
    with Transport() as other:
        address = other.listen("tcp:127.0.0.1:0")
        said = [b"busy", b"\xff\xfe", b"{}"]

        def answer() -> None:
            for message in said:
                other.accept(30).send(message)

        answering = threading.Thread(target=answer)
        answering.start()
        errors = [bench_link.measure(address, b"", 1).error for _ in said]
        answering.join()
    assert "another process" in errors[0]
    for error in errors[1:]:
        assert error.endswith("no `kvcore bench link --a` serves there")


def test_one_measures_at_a_time() -> None:
    serving = subprocess.Popen(
        [*COMMAND, "--a", "tcp:127.0.0.1:0"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert serving.stdout is not None
        address = serving.stdout.readline().split()[-1]
        with Transport() as first:
            link = first.connect(address)
            link.recv(30)  # it is measured, slowly
            assert "another process" in bench_link.measure(address, b"", 1).error
            link.close()
        assert not bench_link.measure(address, b"", 1).error
    finally:
        serving.terminate()
        serving.communicate()
