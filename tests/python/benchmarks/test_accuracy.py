"""Accuracy over compressed pages: the metrics tell what they should, and the gates hold."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def benchmarks() -> Iterator[None]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield
    sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture(scope="module")
def lm() -> Any:
    from kvcore import model

    torch.set_num_threads(1)
    try:
        return model.load(model.DEFAULT_MODEL)
    except model.ModelUnavailable as error:
        pytest.skip(f"the default model cannot be had: {error}")


def test_difference_and_bound(benchmarks: None) -> None:
    from compressed_run import Difference, difference, summary

    exact = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]))
    other = torch.log(torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]]))
    same = difference(exact, exact, np.array([0, 1]))
    assert (same.kl, same.dnll, same.agreement) == (0, 0, 1)
    found = difference(exact, other, np.array([0, 1]))
    assert found.kl == pytest.approx((0.5 * np.log(2) - 0.25 * np.log(2)) / 2)
    assert found.dnll == pytest.approx(np.log(2) / 2) and found.agreement == 0.5
    two = summary([Difference(0.1, 0.0, 1.0), Difference(0.3, 0.2, 0.5)])
    assert (two["kl"], two["dnll"]) == pytest.approx((0.2, 0.1))
    assert two["dnll_upper"] == pytest.approx(0.1 + 12.71 * 0.1)  # t * standard error


@pytest.mark.parametrize("path", ["kernel", "simulate"])
def test_a_short_context_over_compressed_pages(benchmarks: None, lm: Any, path: str) -> None:
    """Nothing changed gives 0 exactly, a profile little, the controls too much; all in turn."""
    import contexts
    from cases import accuracy
    from compressed_run import Context, difference

    def encode(text: str) -> list[int]:
        return list(lm.tokenizer(text, add_special_tokens=False)["input_ids"])

    text = contexts.texts(encode, contexts.SHORT, 1)[0]
    context = Context(lm, text.tokens[:-1], contexts.SHORT, path)
    exact = context.logits()
    kl = {}
    for method in accuracy.methods(lm):
        if "/" not in method.name:
            kl[method.name] = difference(exact, method.over(context), text.labels).kl
    assert torch.equal(context.logits(), exact)
    assert kl["bf16"] == 0
    for profile, gates in accuracy.GATES.items():
        assert 0 < kl[profile] <= gates["kl"]
    assert kl["control_random_pages"] > accuracy.GATES["small"]["kl"]
    assert kl["control_int4_per_token"] > kl["small"] > kl["balanced"]


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_profiles_pass_their_gates_and_controls_fail_them(lm: Any) -> None:
    command = [sys.executable, str(ROOT / "benchmarks/run.py"), "--case", "accuracy"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=3500)
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert {r["params"]["context"] for r in results} == {768, 4096}
    for result in results:
        table = result["params"]["table"]
        if table == "bf16":
            assert result["value"] == 0
        elif table.startswith("control_"):
            assert result["ratio"] < 1, table
        elif result["limit_name"] == "gate":
            assert result["ratio"] >= 1, (table, result["params"])
