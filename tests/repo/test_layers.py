"""The layer tables: which C++ room includes which, which Python package imports which."""

from __future__ import annotations

import ast
import re

import tree

INCLUDE = re.compile(r'\s*#\s*include\s+"(\w+)/')


def cpp_violations(room: str, text: str) -> list[str]:
    """Rooms included by `text` that `room` may not enter."""
    found = [m[1] for line in text.splitlines() if (m := INCLUDE.match(line))]
    return [
        r for r in found if r in tree.CPP_LAYERS and r != room and r not in tree.CPP_LAYERS[room]
    ]


def test_cpp_rooms_include_only_what_the_table_allows() -> None:
    bad = []
    for path in tree.cpp_files():
        parts = path.relative_to(tree.ROOT).parts
        if parts[0] == "csrc":
            assert parts[1] in tree.CPP_LAYERS, f"{path}: {parts[1]} is not in the layer table"
            bad += [
                f"{path}: may not include {r}/" for r in cpp_violations(parts[1], path.read_text())
            ]
    assert not bad, "\n".join(bad)


def test_python_h_is_seen_by_bindings_only() -> None:
    bad = [
        str(path)
        for path in tree.cpp_files()
        if "bindings" not in path.parts
        and re.search(r"#\s*include\s+[<\"](pybind11|Python\.h)", path.read_text())
    ]
    assert not bad, bad


def test_the_cpp_table_has_no_cycle() -> None:
    state: dict[str, int] = {}

    def visit(room: str) -> None:
        assert state.get(room) != 1, f"cycle through {room}"
        if state.get(room) == 2:
            return
        state[room] = 1
        for other in tree.CPP_LAYERS[room]:
            if other != room and room not in ("store", "apps", "bindings"):
                visit(other)
        state[room] = 2

    for room in tree.CPP_LAYERS:
        visit(room)


def test_a_forbidden_include_is_found() -> None:
    assert cpp_violations("kernels", '#include "pages/pool.h"\n') == ["pages"]
    assert cpp_violations("stream", '#include "pages/pool.h"\n#include <vector>\n') == []


def kvcore_imports(source: str, package: str) -> set[str]:
    """First components below kvcore that a module imports, relative imports resolved."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("kvcore.")}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                base = package.split(".")[: len(package.split(".")) - node.level + 1]
                module = ".".join([*base, module] if module else base)
            if module == "kvcore":
                found |= {a.name for a in node.names}
            elif module.startswith("kvcore."):
                found.add(module.split(".")[1])
    return found


def test_python_packages_import_only_what_the_table_allows() -> None:
    bad = []
    for path in tree.python_files("python/kvcore"):
        parts = path.relative_to(tree.ROOT / "python").with_suffix("").parts
        top = parts[1]
        assert top in tree.PYTHON_LAYERS, f"{path}: {top} is not in the layer table"
        imported = kvcore_imports(path.read_text(), ".".join(parts[:-1]))
        allowed = tree.PYTHON_LAYERS[top] | {top}
        bad += [
            f"{path}: may not import kvcore.{name}"
            for name in sorted(imported - allowed)
            if name != "__version__"
        ]
    assert not bad, "\n".join(bad)


def test_a_forbidden_import_is_found() -> None:
    assert kvcore_imports("from kvcore.worker import engine", "kvcore.router") == {"worker"}
    assert kvcore_imports("from ..worker import engine\nimport kvcore.ops", "kvcore.router") == {
        "worker",
        "ops",
    }
