"""What the guests showed goes into results/guests.json, which is committed with a nightly run."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

RESULTS = Path(__file__).with_name("results") / "guests.json"
_cases: list[dict[str, Any]] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    name = report.nodeid.rpartition("::")[2]
    if "rdma/test_guests.py" not in report.nodeid:
        return
    if report.when == "call" or report.outcome != "passed":
        case = {"case": name, "outcome": report.outcome, "seconds": round(report.duration, 1)}
        _cases.append(case | dict(report.user_properties))


def pytest_sessionfinish() -> None:
    """Cases that ran now replace what they said before; each names the commit it belongs to."""
    if not _cases:
        return
    git = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    commit = subprocess.run(
        git, cwd=RESULTS.parents[1], capture_output=True, text=True, check=False
    )
    about = {"commit": commit.stdout.strip(), "date": time.strftime("%Y-%m-%d")}
    told = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    known = {case["case"]: case for case in told}
    known |= {case["case"]: case | about for case in _cases}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(list(known.values()), indent=1) + "\n")
