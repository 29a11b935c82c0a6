"""The torch-free cluster of the guests, on this machine over tcp: a plain test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import kvcore

CLUSTER = Path(__file__).with_name("cluster.py")


def test_answers_and_stamps_are_right_over_tcp(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(kvcore.__file__).parents[1])}
    common = {"env": environment, "text": True, "stdout": subprocess.PIPE}
    prefill = subprocess.Popen([sys.executable, CLUSTER, "prefill", tmp_path], **common)
    try:
        serve = [sys.executable, CLUSTER, "serve", "tcp:127.0.0.1:0", tmp_path, "8"]
        done = subprocess.run(serve, **common, timeout=60, check=False)
        assert done.returncode == 0, done.stdout
        assert prefill.wait(20) == 0
    finally:
        prefill.kill()
        prefill.communicate()
    told = json.loads((tmp_path / "result.json").read_text())
    assert told["right"] == told["requests"] == 8 and told["wrong_slices"] == 0, told
    assert told["transports"] == ["tcp"] and told["retries"] == 0
    assert told["kv_bytes"] > 8 * 4096
