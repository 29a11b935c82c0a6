"""The README's library example, run as it stands, against the reference."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from kvcore.reference import attention
from tree import ROOT


def test_the_library_example_is_causal_attention() -> None:
    blocks = re.findall(r"```python\n(.*?)```", ROOT.joinpath("README.md").read_text(), re.S)
    (example,) = [block for block in blocks if "AttentionPlan" in block]
    made: dict[str, Any] = {}
    exec(compile(example, "README.md", "exec"), made)
    want = attention(made["q"], made["k"], made["v"], np.arange(20), 64**-0.5)
    np.testing.assert_allclose(made["out"], want.out, rtol=1e-5, atol=1e-5)
