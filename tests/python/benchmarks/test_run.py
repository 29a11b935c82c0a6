"""The benchmark program still runs, and its lines have the promised fields."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
FIELDS = {
    "case", "params", "median", "p99", "best", "bytes", "flops", "value", "unit", "limit_name",
    "limit", "ratio", "best_ratio", "isa", "threads", "repetitions", "clock", "commit",
}  # fmt: skip


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks/run.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=250)


def lines(*arguments: str) -> list[dict[str, Any]]:
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_list_names_the_cases() -> None:
    names = {line.split()[0] for line in run("--list").stdout.splitlines()}
    assert names >= {"decode_attention", "prefill_attention", "prefix_lookup", "model_step"}


def test_prefix_lookup_finds_and_pins_3000_tokens_within_a_millisecond() -> None:
    results = lines("--case", "prefix_lookup", "--quick", "--clock", "cpu")
    assert all(set(r) == FIELDS for r in results)
    first = results[0]
    assert first["params"]["tokens"] == 3000 and first["params"]["pages_found"] == 46
    assert first["unit"] == "us" and first["value"] < 1000
    assert first["p99"] >= first["median"] >= first["best"] > 0


def test_ratios_are_above_one_where_we_are_better() -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import harness
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    rest = {"bytes": 0, "flops": 0, "isa": "scalar", "threads": 1}
    rate = harness.rate_result("c", {}, [2.0, 1.0, 4.0], 10.0, "GB/s", "l", [2.0, 4.0, 1.0], **rest)
    assert (rate.median, rate.value, rate.limit, rate.ratio) == (2.0, 5.0, 2.0, 2.5)
    assert rate.best_ratio == 10.0 / 4.0 and rate.p99 == 4.0
    time = harness.time_result("c", {}, [0.2, 0.1], "ms", "peer", [0.4, 0.4], **rest)
    assert (time.value, time.limit, time.ratio) == (100.0, 400.0, 4.0)
    alone = harness.time_result("c", {}, [0.2], "ms", "none", [], **rest)
    assert alone.as_dict()["ratio"] is None


def test_unknown_peers_are_refused() -> None:
    done = run("--peer", "nobody=/bin/true")
    assert done.returncode != 0 and "NAME=PYTHON" in done.stderr


def test_claims_name_cases_and_status() -> None:
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        import tomli as tomllib
    claims = tomllib.loads((ROOT / "benchmarks/claims.toml").read_text())["claim"]
    names = {line.split()[0] for line in run("--list").stdout.splitlines()}
    for claim in claims:
        assert claim["status"] in ("measured", "simulated", "out of reach here")
        assert claim["status"] != "measured" or claim["case"] in names
