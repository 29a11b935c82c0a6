"""`import kvcore` does no work: no torch, no numpy, no environment reading, under 100 ms."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys

import tree

ALLOWED_VARIABLES = {"KVCORE_ISA", "KVCORE_LOG", "KVCORE_CONFIG"}
# Of the XDG Base Directory Specification, read in one place.
ALLOWED_IN_CONFIG = {"XDG_CACHE_HOME", "XDG_DATA_HOME"}


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout


def test_import_is_fast_and_light() -> None:
    code = (
        "import sys, time; t = time.perf_counter(); import kvcore;"
        "ms = (time.perf_counter() - t) * 1e3;"
        "print(ms, 'torch' in sys.modules, 'numpy' in sys.modules)"
    )
    results = [run(code).split() for _ in range(3)]
    assert min(float(r[0]) for r in results) < 100
    assert results[0][1:] == ["False", "False"]


def test_this_is_the_installed_or_the_checkout_library() -> None:
    where = run(
        "import kvcore, kvcore._core; print(kvcore.__file__); print(kvcore._core.__file__)"
    ).split()
    assert os.path.dirname(where[0]) == os.path.dirname(where[1])


def test_only_these_environment_variables_are_read() -> None:
    bad = []
    for path in tree.cpp_files():
        names = re.findall(r'getenv\(\s*"(\w+)"', path.read_text())
        bad += [
            f"{path}: {n}" for n in names if n not in ALLOWED_VARIABLES and "csrc" in path.parts
        ]
    for path in tree.python_files("python/kvcore"):
        allowed = ALLOWED_VARIABLES | (ALLOWED_IN_CONFIG if path.name == "config.py" else set())
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.unparse(node) if isinstance(node, ast.Call | ast.Subscript) else ""
            m = re.match(r"os\.(environ\.get|getenv|environ)[\(\[]['\"](\w+)['\"]", text)
            if m and m[2] not in allowed and not isinstance(getattr(node, "ctx", None), ast.Store):
                bad.append(f"{path}:{getattr(node, 'lineno', 0)}: {m[2]}")
    assert not bad, "\n".join(bad)
