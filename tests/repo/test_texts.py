"""Texts that must stay in step with the code."""

from __future__ import annotations

import re
import subprocess
import sys

import tree


def test_api_md_lists_exactly_the_public_names() -> None:
    done = subprocess.run(
        [sys.executable, str(tree.ROOT / "docs" / "make_api.py"), "--check"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_versions_agree() -> None:
    pyproject = re.search(r'^version = "(.+)"', (tree.ROOT / "pyproject.toml").read_text(), re.M)
    cmake = re.search(r"project\(kvcore VERSION (\S+)", (tree.ROOT / "CMakeLists.txt").read_text())
    package = re.search(
        r'__version__ = "(.+)"', (tree.ROOT / "python/kvcore/__init__.py").read_text()
    )
    assert pyproject and cmake and package
    assert pyproject[1] == cmake[1] == package[1]


def test_every_room_says_what_it_is() -> None:
    missing = [
        room
        for room in tree.CPP_LAYERS
        if not (tree.ROOT / "csrc" / room / "README.md").read_text().startswith(f"# {room}")
    ]
    assert not missing


def test_every_header_begins_with_its_purpose() -> None:
    bad = [
        str(p)
        for p in tree.cpp_files()
        if p.suffix == ".h"
        and not re.match(r"//\s*\S.{20,}", p.read_text())
        and "tests" not in p.parts
    ]
    assert not bad, bad


def test_case_table_names_existing_tests() -> None:
    table = (tree.ROOT / "tests/cases/README.md").read_text()
    named = set(re.findall(r"test_o\d+_\w+\.py", table))
    present = {p.name for p in (tree.ROOT / "tests/cases").glob("test_o*.py")}
    assert named == present
