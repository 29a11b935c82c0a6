"""The demo from end to end, on a tiny model: what it shows, writes and returns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
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
    assert "All is well" in done.stdout
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert len(lines) == 11
    for line in lines:
        assert set(line) >= FIELDS
        assert line["equal_to_mono"] is True and line["transport"] == transport
        assert line["kv_bytes"] > 0 and 0 <= line["arrived_fraction"] <= 1
    assert lines[1]["cached_tokens"] == 0
    assert lines[2]["cached_tokens"] > 0.9 * lines[2]["prompt_tokens"]
    assert lines[2]["kv_bytes"] < 0.1 * lines[1]["kv_bytes"]


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
