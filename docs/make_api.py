"""Writes docs/api.md, the list of public names; ``--check`` compares (exit 1 when stale)."""

from __future__ import annotations

import importlib
import inspect
import pathlib
import sys

MODULES = [
    "kvcore.errors",
    "kvcore.pages",
    "kvcore.keys",
    "kvcore.prefix",
    "kvcore.kernels",
    "kvcore.wire",
    "kvcore.transport",
    "kvcore.stream",
    "kvcore.sched",
    "kvcore.ops",
    "kvcore.model",
    "kvcore.worker",
    "kvcore.router",
    "kvcore.reference",
]
HERE = pathlib.Path(__file__).parent


def first_line(obj: object) -> str:
    """The first line of a docstring, or the value of a constant."""
    doc = inspect.getdoc(obj) if callable(obj) or inspect.ismodule(obj) else None
    return doc.splitlines()[0] if doc else f"`{obj!r}`"


def render() -> str:
    out = [
        "# Public names",
        "",
        "Made by `make docs` from the package itself; a test compares it.",
        "",
    ]
    for name in MODULES:
        module = importlib.import_module(name)
        out += [f"## {name}", "", first_line(module), ""]
        out += ["| name | what it is |", "|---|---|"]
        names = getattr(module, "__all__", None) or sorted(
            n for n, v in vars(module).items() if inspect.isclass(v) and v.__module__ == name
        )
        for n in names:
            what = first_line(getattr(module, n)).replace("|", "/")
            out.append(f"| `{n}` | {what} |")
        out.append("")
    return "\n".join(out)


def main() -> int:
    path, text = HERE / "api.md", render()
    if "--check" in sys.argv:
        if path.read_text() != text:
            print("docs/api.md is stale: run `make docs`")
            return 1
        return 0
    path.write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
