"""The demo from end to end, on a tiny model: what it shows, writes and returns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kvcore.errors import IoError
from kvcore.serve import demo
from support import served_model

FIELDS = {"prompt_tokens", "cached_tokens", "ttft_ms", "tpot_p50_ms", "tpot_p99_ms", "kv_bytes"}
FIELDS |= {"transport", "arrived_fraction", "equal_to_mono"}


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_demo(tmp_path: Path, transport: str) -> None:
    model = served_model.make(tmp_path / "tiny", max_position=16384)
    record = tmp_path / "out.json"
    argv = [sys.executable, "-m", "kvcore", "demo", "--model", str(model), "--max-tokens", "6"]
    env = {**os.environ, "HOME": str(tmp_path)}
    done = subprocess.run(
        [*argv, "--json", str(record), "--transport", transport],
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All is well" in done.stdout and "\n\ntwo workers: " in done.stdout
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert len(lines) == 11
    for line in lines:
        assert set(line) >= FIELDS
        assert line["equal_to_mono"] is True and line["transport"] == transport
        assert line["kv_bytes"] > 0 and 0 <= line["arrived_fraction"] <= 1
    assert lines[1]["cached_tokens"] == 0
    assert lines[2]["cached_tokens"] > 0.9 * lines[2]["prompt_tokens"]
    assert lines[2]["kv_bytes"] < 0.1 * lines[1]["kv_bytes"]


def children(pid: int) -> list[int]:
    """All processes below ``pid``."""
    own = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [found for child in map(int, own) for found in (child, *children(child))]


def test_sigterm_leaves_nothing_behind(tmp_path: Path) -> None:
    """As SIGINT does: no process, and no run directory of the server."""
    model = served_model.make(tmp_path / "tiny")
    (tmp_path / "t").mkdir()
    argv = [sys.executable, "-m", "kvcore", "demo", "--model", str(model), "--max-tokens", "6"]
    env = {**os.environ, "HOME": str(tmp_path), "TMPDIR": str(tmp_path / "t")}
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdout=pipe, stderr=pipe, text=True, env=env) as process:
        end = time.monotonic() + 60
        while not list((tmp_path / "t").glob("kvcore-*/router.sock")):
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.05)
        below = children(process.pid)
        assert below
        process.terminate()
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert list((tmp_path / "t").iterdir()) == []
    assert not [pid for pid in below if Path(f"/proc/{pid}").exists()]


def test_a_record_that_cannot_be_written_is_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "_run", lambda *a: pytest.fail("the demo runs"))
    for path in (tmp_path, tmp_path / "absent" / "out.json"):
        with pytest.raises(IoError, match=f"--json {path}: "):
            demo.run("m", "shm", 1, str(path))


def result(name: str, **change: object) -> demo.Result:
    facts = {"kv_bytes": [5], "transport": ["shm"], "arrived_fraction": [1.0], "exposed_s": [0.0]}
    facts.update({key: [value] for key, value in change.items() if key in facts})
    made = demo.Result(name, "x", [1, 2], 1.0, [1.0], 3000, 2900, facts, True)
    for key, value in change.items():
        if key not in facts:
            setattr(made, key, value)
    return made


def test_all_well_only_if_all_is_well() -> None:
    good = [result("short"), result("document"), result("again"), result("at once 1")]
    assert demo._problems(good, "shm") == []
    for bad in (
        result("again", equal_to_mono=False),
        result("again", cached_tokens=100),
        result("again", transport="tcp"),
        result("again", kv_bytes=0),
        result("again", arrived_fraction=None),
    ):
        assert demo._problems([*good[:2], bad], "shm")
