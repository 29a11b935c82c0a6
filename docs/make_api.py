"""Writes docs/api.md, the list of public names; ``--check`` compares (exit 1 when stale).

Each name has its signature (parameters and defaults) and the first sentence of its docstring. For
what is compiled both come from the stubs beside the core (python/kvcore/_core/*.pyi), whose
signatures are written for people.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import pathlib
import re
import sys
from typing import Any

MODULES = [
    "kvcore.errors",
    "kvcore.pages",
    "kvcore.keys",
    "kvcore.prefix",
    "kvcore.kernels",
    "kvcore.compress",
    "kvcore.head_pages",
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
STUBS = HERE.parent / "python" / "kvcore" / "_core"
_LONGEST_VALUE, _LONGEST_TEXT = 60, 160


def stub(obj: Any) -> ast.AST | None:
    """The stub of something compiled; None for what is not."""
    package, _, module = (getattr(obj, "__module__", None) or "").rpartition(".")
    if package != "kvcore._core":
        return None
    tree = ast.parse((STUBS / f"{module}.pyi").read_text())
    return next((n for n in tree.body if getattr(n, "name", "") == obj.__name__), None)


def documentation(obj: Any) -> str:
    """The docstring, that of the stub where the object is compiled; "" without one."""
    compiled = stub(obj)
    if isinstance(compiled, ast.ClassDef | ast.FunctionDef):
        return ast.get_docstring(compiled) or ""
    return inspect.getdoc(obj) or ""


def summary(text: str) -> str:
    """The first paragraph on one line, or its first sentence where it is long, as Markdown."""
    line = " ".join(text.split("\n\n")[0].split())
    if len(line) > _LONGEST_TEXT:
        line = re.split(r"(?<=\.) (?=[A-Z`])", line)[0]
    line = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", line)
    return line.replace("``", "`").replace("|", "/")


def parameters(obj: Any) -> str:
    """``(a, b=1, *, c=None)``, from the source or the stub; "" for what nobody makes by hand."""
    made_by = obj
    if inspect.isclass(obj):
        made_by = next(c for c in obj.__mro__ if {"__init__", "__new__"} & set(vars(c)))
    compiled = stub(made_by)
    if isinstance(compiled, ast.FunctionDef):
        return _written(compiled, skip=0)
    if isinstance(compiled, ast.ClassDef):
        found = [n for n in compiled.body if getattr(n, "name", "") == "__init__"]
        return _written(found[0], skip=1) if found else ""
    if made_by is object or (made_by is not obj and not made_by.__module__.startswith("kvcore")):
        return ""
    signature = inspect.signature(obj)
    shown = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    plain = signature.replace(parameters=shown, return_annotation=inspect.Signature.empty)
    return str(plain).replace("<factory>", "...")


def _written(node: ast.AST, skip: int) -> str:
    """The parameters of a stub's function without their types."""
    assert isinstance(node, ast.FunctionDef)
    args = node.args
    args.args = args.args[skip:]
    for arg in [*args.posonlyargs, *args.args, *args.kwonlyargs]:
        arg.annotation = None
    return f"({ast.unparse(args)})"


def constant(value: Any) -> str:
    """A value where it is short, else what it holds."""
    text = repr(value)
    if len(text) > _LONGEST_VALUE:
        inside = f" of {', '.join(map(repr, value))}" if isinstance(value, dict) else ""
        return f"a {type(value).__name__}{inside}"
    return f"`{text}`"


def constant_texts(package: str) -> dict[str, str]:
    """The strings that stand below assignments in a module and its loaded submodules, by name."""
    texts = {}
    for name, module in sorted(sys.modules.items()):
        path = getattr(module, "__file__", None) or ""
        if not (name == package or name.startswith(package + ".")) or not path.endswith(".py"):
            continue
        body = ast.parse(pathlib.Path(path).read_text()).body
        for node, below in itertools.pairwise(body):
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(below, ast.Expr):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]
                texts |= dict.fromkeys(names, str(ast.literal_eval(below.value)))
    return texts


def row(name: str, obj: Any, texts: dict[str, str]) -> str:
    """One line of a table. Raises ValueError for a name without a description."""
    if not (inspect.isclass(obj) or callable(obj)):
        text = summary(texts.get(name, ""))
        return f"| `{name}` | {text + ' ' if text else ''}Constant: {constant(obj)}. |"
    text = summary(documentation(obj))
    if not text:
        raise ValueError(f"{name} has no docstring: {obj!r}")
    error = inspect.isclass(obj) and issubclass(obj, BaseException)
    call = "" if error else parameters(obj)
    return f"| `{name}{call}` | {text} |"


def render() -> str:
    out = [
        "# Public names",
        "",
        "Made by `make docs` from the package itself; a test compares it. Types, shapes, units and",
        "errors stand in the docstrings: `help(kvcore.pages.Pool)`.",
        "",
    ]
    for name in MODULES:
        module = importlib.import_module(name)
        out += [f"## {name}", "", summary(inspect.getdoc(module) or ""), ""]
        names = getattr(module, "__all__", None) or sorted(
            n for n, v in vars(module).items() if inspect.isclass(v) and v.__module__ == name
        )
        if names:
            out += ["| name | what it is |", "|---|---|"]
            texts = constant_texts(name)
            out += [row(n, getattr(module, n), texts) for n in names]
            out.append("")
        else:
            out += ["No names for use from outside: `kvcore serve` and `kvcore worker` run it.", ""]
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
