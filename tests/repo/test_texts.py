"""Texts that must stay in step with the code."""

from __future__ import annotations

import re
import subprocess
import sys

import tree
from kvcore.serve import errors, protocol, shapes


def test_api_md_lists_exactly_the_public_names() -> None:
    done = subprocess.run(
        [sys.executable, str(tree.ROOT / "docs" / "make_api.py"), "--check"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_api_md_is_for_people() -> None:
    """Each name has a short text that is no signature or repr, and a call where it can be made."""
    rows = re.findall(r"^\| `(.+?)` \| (.*) \|$", (tree.ROOT / "docs/api.md").read_text(), re.M)
    assert len(rows) > 100
    for name, text in rows:
        where = f"{name}: {text}"
        assert re.fullmatch(r"\w+(\(.*\))?", name), where
        assert 15 < len(text) <= 200, where
        assert not re.search(r"<class|<built-in|typing\.|collections\.abc|0x|:\w+:`", where)
        assert not text.startswith(name.split("(")[0] + "("), where
        assert text[0].isupper() or text[0] == "`", where
    calls = {name.split("(")[0]: name for name, _ in rows}
    assert calls["rope_ptr"].startswith("rope_ptr(x, x_stride, rotation")
    want = "AttentionPlan(pool, num_q_heads, scale=None, threads=None, window=0, soft_cap=0.0)"
    assert calls["AttentionPlan"] == want


def test_http_md_names_every_field_endpoint_and_code() -> None:
    text = (tree.ROOT / "docs/http.md").read_text()
    named = set(re.findall(r"`([^`]+)`", text))
    fields = protocol._COMPLETION | protocol._CHAT | protocol._HARMLESS | {*protocol._NEUTRAL}
    fields |= {*protocol._NEUTRAL_IN_STREAM_OPTIONS, *protocol._NEUTRAL_IN_MESSAGES}
    fields |= {"include_usage", *protocol.KV_PROFILES, *protocol._ROLES}
    facts = {*shapes.facts([])}
    codes = {*errors._BY_CODE} - {"invalid_argument", "unsupported"}  # of fields, by a worker
    assert named >= fields | facts | codes, (fields | facts | codes) - named
    for path in re.findall(r'"(/[\w/]+)', (tree.ROOT / "python/kvcore/serve/app.py").read_text()):
        assert path in text, path


def test_architecture_says_which_rooms_are_planned() -> None:
    """A room is marked exactly when it has no source."""
    text = (tree.ROOT / "docs/architecture.md").read_text()
    rooms = dict(re.findall(r"^\| `csrc/(\w+)`( \(planned\))? \|", text, re.M))
    assert rooms.keys() == tree.CPP_LAYERS.keys()
    full = {path.relative_to(tree.ROOT).parts[1] for path in tree.cpp_files()}
    for room, mark in rooms.items():
        assert bool(mark) == (room not in full), room
    for path in re.findall(r"`((?:csrc|python)/[\w/.]+)`", text):
        assert (tree.ROOT / path).exists(), path


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
