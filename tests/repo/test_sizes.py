"""Files and functions stay readable: hard limits of 600 lines a file (tests 800), 80 a function."""

from __future__ import annotations

import ast
import pathlib
import re

import tree

FILE_LIMIT, TEST_FILE_LIMIT, FUNCTION_LIMIT, DEVICE_FUNCTION_LIMIT = 600, 800, 80, 150
# Exceptions by name, each with its reason.
LONG_FILES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {}
ORCHESTRATION_LIMIT = 2500
NOT_FUNCTIONS = re.compile(
    r"^\s*(namespace|class|struct|enum|union|extern|else|if|for|while|switch"
    r"|do|try|catch|}|typedef)\b"
)


def name_of(path: pathlib.Path) -> str:
    return path.relative_to(tree.ROOT).as_posix()


def test_files_are_short() -> None:
    bad = []
    for path in [*tree.cpp_files(), *tree.python_files()]:
        limit = TEST_FILE_LIMIT if "tests" in path.parts else FILE_LIMIT
        lines = len(path.read_text().splitlines())
        if lines > limit and name_of(path) not in LONG_FILES:
            bad.append(f"{name_of(path)}: {lines} lines, allowed {limit}")
    assert not bad, "\n".join(bad)


def cpp_functions(text: str) -> list[tuple[int, int]]:
    """(first line, lines) of blocks that look like function bodies, by formatted indentation."""
    lines = text.splitlines()
    found = []
    for i, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if (
            indent > 2
            or not line.rstrip().endswith("{")
            or NOT_FUNCTIONS.match(line)
            or ("(" not in line and ")" not in line)
        ):
            continue
        end = next(
            (j for j in range(i + 1, len(lines)) if lines[j].startswith(" " * indent + "}")), i
        )
        found.append((i + 1, end - i + 1))
    return found


def test_functions_are_short() -> None:
    bad = []
    for path in tree.python_files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_LIMIT and f"{name_of(path)}:{node.name}" not in LONG_FUNCTIONS:
                    bad.append(f"{name_of(path)}:{node.lineno} {node.name}: {lines} lines")
    for path in tree.cpp_files():
        limit = DEVICE_FUNCTION_LIMIT if path.suffix in (".cu", ".cuh") else FUNCTION_LIMIT
        for first, lines in cpp_functions(path.read_text()):
            if lines > limit and f"{name_of(path)}:{first}" not in LONG_FUNCTIONS:
                bad.append(f"{name_of(path)}:{first}: {lines} lines, allowed {limit}")
    assert not bad, "\n".join(bad)


def test_a_long_function_is_found() -> None:
    body = "int f(int x) {\n" + "  x += 1;\n" * 90 + "}\n"
    assert cpp_functions(body) == [(1, 92)]


def test_orchestration_stays_small() -> None:
    total = sum(
        len(path.read_text().splitlines())
        for path in tree.python_files("python/kvcore/worker", "python/kvcore/router")
    )
    assert total <= ORCHESTRATION_LIMIT, (
        f"worker + router have {total} lines, allowed {ORCHESTRATION_LIMIT}"
    )
