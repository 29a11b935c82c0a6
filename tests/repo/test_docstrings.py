"""Every public name, method and property has a docstring where ``help`` finds it."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from typing import Any

import tree

sys.path.insert(0, str(tree.ROOT / "docs"))
import make_api


def text_of(obj: Any) -> str:
    """The docstring without the signature that pybind11 puts in front of a function's."""
    text: str = getattr(obj, "__doc__", None) or ""
    if type(obj).__name__ in ("builtin_function_or_method", "instancemethod"):
        return text.partition("\n\n")[2].strip()
    return text.strip()


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties that kvcore gives a class, inherited ones as well."""
    ours = [base for base in cls.__mro__ if base.__module__.partition(".")[0] == "kvcore"]
    for name in dict.fromkeys(name for base in ours for name in vars(base)):
        found = inspect.getattr_static(cls, name)
        found = getattr(found, "__func__", found)
        if not name.startswith("_") and (callable(found) or isinstance(found, property)):
            yield name, found


def undocumented(module: str, names: list[str]) -> Iterator[str]:
    for name in names:
        obj = getattr(importlib.import_module(module), name)
        if not (inspect.isclass(obj) or callable(obj)):
            continue
        if not text_of(obj):
            yield f"{module}.{name}"
        if inspect.isclass(obj):
            yield from (f"{module}.{name}.{m}" for m, found in members(obj) if not text_of(found))


def test_everything_public_has_a_docstring() -> None:
    missing = [
        name
        for module in make_api.MODULES
        for name in undocumented(module, getattr(importlib.import_module(module), "__all__", []))
    ]
    assert not missing, "\n".join(missing)


def test_help_has_what_the_stub_says() -> None:
    from kvcore.pages import Pool
    from kvcore.stream import Sender

    assert "OutOfPages: not as many are free" in (Pool.alloc.__doc__ or "")
    assert "Dropping a Sender aborts nothing" in (Sender.__doc__ or "")
    assert "256 KiB" in (Sender.commit.__doc__ or "")


def test_a_missing_one_is_found(monkeypatch: Any) -> None:
    from kvcore import pages

    class Bare:
        """Has one."""

        def method(self) -> None: ...

        @property
        def number(self) -> int:
            return 0

    Bare.__module__ = "kvcore.pages"
    monkeypatch.setattr(pages, "Bare", Bare, raising=False)
    assert [*undocumented("kvcore.pages", ["Bare", "Pool"])] == [
        "kvcore.pages.Bare.method",
        "kvcore.pages.Bare.number",
    ]


def test_a_signature_is_no_docstring() -> None:
    from kvcore.pages import Pool

    assert "->" in (Pool._stats.__doc__ or "") and not text_of(
        inspect.getattr_static(Pool, "_stats")
    )
    assert text_of(inspect.getattr_static(Pool, "alloc")).startswith("Page ids for new KV")
