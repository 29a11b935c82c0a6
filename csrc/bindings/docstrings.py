"""Writes the docstrings of the stubs as a C++ table: ``docstrings.py OUT.cpp STUB.pyi...``."""

from __future__ import annotations

import ast
import itertools
import pathlib
import sys
from collections.abc import Iterator

_HEAD = """\
// Made by csrc/bindings/docstrings.py from python/kvcore/_core/*.pyi.
#include "bindings/doc.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace kvcore::bindings {
namespace {

constexpr Docstring kDocstrings[] = {  // sorted by name
"""
_TAIL = """\
};

}  // namespace

const char* doc(std::string_view name) {
  const auto* const found =
      std::ranges::lower_bound(kDocstrings, name, std::ranges::less{}, &Docstring::name);
  if (found == std::end(kDocstrings) || found->name != name)
    throw std::logic_error("no docstring in the stubs: " + std::string(name));
  return found->text;
}

}  // namespace kvcore::bindings
"""


def docstrings(prefix: str, body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    """(dotted name, text) of every class and function that has one."""
    for node in body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef):
            continue
        name = f"{prefix}.{node.name}"
        text = ast.get_docstring(node)
        if text:
            yield name, text
        if isinstance(node, ast.ClassDef):
            yield from docstrings(name, node.body)
            yield from attributes(name, node.body)


def attributes(prefix: str, body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    """The same of annotated attributes, whose text stands below them."""
    for node, below in itertools.pairwise(body):
        if isinstance(node, ast.AnnAssign) and isinstance(below, ast.Expr):
            yield f"{prefix}.{ast.unparse(node.target)}", str(ast.literal_eval(below.value))


def main(out: str, *stubs: str) -> None:
    found: dict[str, str] = {}
    for stub in map(pathlib.Path, stubs):
        found |= docstrings(stub.stem, ast.parse(stub.read_text()).body)
    rows = [f'    {{"{name}", R"__({text})__"}},\n' for name, text in sorted(found.items())]
    pathlib.Path(out).write_text(_HEAD + "".join(rows) + _TAIL)


if __name__ == "__main__":
    main(*sys.argv[1:])
