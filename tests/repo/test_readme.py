"""The README's examples: the library's run against the reference, commands read by their parser."""

from __future__ import annotations

import ast
import re
import shlex
from typing import Any

import numpy as np
import pytest
from kvcore import cli, compress, config
from kvcore.pages import PageClass, PageSpec
from kvcore.reference import attention
from tree import ROOT

README = ROOT.joinpath("README.md").read_text()
COMMANDS = re.findall(r"^kvcore [^#\n]+", "\n".join(README.split("```")[1::2]), re.M)


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_is_one(line: str) -> None:
    options = vars(cli._parser().parse_args(shlex.split(line)[1:]))
    config.load(options)
    if "prompt" in options and not options["raw"]:
        assert options["prompt"].endswith("?"), "a chat is asked something"


def test_the_commands_are_found() -> None:
    kinds = {line.split()[1] for line in COMMANDS}
    assert kinds == {"serve", "run", "info", "worker"}


def test_the_openai_example_ends_soon_and_says_the_same_twice() -> None:
    (example,) = re.findall(r"```python\n(from openai.*?)```", README, re.S)
    calls = [node for node in ast.walk(ast.parse(example)) if isinstance(node, ast.Call)]
    given = {word.arg: ast.unparse(word.value) for call in calls for word in call.keywords}
    assert int(given["max_tokens"]) <= 128 and given["temperature"] == "0"


def test_it_says_how_long_things_take() -> None:
    for what in ("demo", "test"):
        after = README.split(f"<!-- ci: {what} -->")[1].split("\n\n", 1)[1][:200]
        assert re.search(r"about \d+ minutes", after), what


@pytest.mark.parametrize("profile", ["balanced", "small"])
def test_a_profile_has_the_bytes_that_the_log_tells(profile: str) -> None:
    """``compress.page_share`` of a table that takes its whole budget, for SmolLM2-135M."""
    spec = PageSpec(num_layers=30, num_kv_heads=3, head_dim_k=64, page_size=64)
    padded = -(-compress.budget_bytes(spec, profile) // 4096) * 4096
    share = 100 * padded / PageClass.open(spec).run_bytes(1)
    assert re.search(rf"^\| {profile} \| {share:.1f} % ", README, re.M), share
    assert f"{share:.1f} %" in ROOT.joinpath("docs/profiles.md").read_text()


def test_the_library_example_is_causal_attention() -> None:
    blocks = re.findall(r"```python\n(.*?)```", ROOT.joinpath("README.md").read_text(), re.S)
    (example,) = [block for block in blocks if "AttentionPlan" in block]
    made: dict[str, Any] = {}
    exec(compile(example, "README.md", "exec"), made)
    want = attention(made["q"], made["k"], made["v"], np.arange(20), 64**-0.5)
    np.testing.assert_allclose(made["out"], want.out, rtol=1e-5, atol=1e-5)
