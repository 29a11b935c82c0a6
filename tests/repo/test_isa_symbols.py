"""No wide instruction leaks: an ISA's files define weak symbols in their own namespace only.

A weak symbol (say, an instantiation of std::vector) compiled with AVX-512 flags may be the copy
that the linker keeps for the whole library, and then crashes on a machine without AVX-512.
"""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess

import pytest
import tree

ISA_OBJECT = re.compile(r"_(avx2|avx512)\.cpp\.o")
SYMBOL = re.compile(r"^[0-9a-f]+ ([A-Za-z]) (.+)$")


def leaks(nm_lines: list[str], isa: str) -> list[str]:
    """Weak or unique symbols that do not belong to the ISA's namespace."""
    bad = []
    for line in nm_lines:
        m = SYMBOL.match(line.strip())
        if m and m[1] in "WVu" and f"::{isa}::" not in m[2]:
            bad.append(m[2])
    return bad


def isa_objects() -> list[pathlib.Path]:
    """Of every build but the sanitizers', whose run-time support is weak by design."""
    found = [p for p in (tree.ROOT / "build").rglob("*.o") if ISA_OBJECT.search(p.name)]
    return [p for p in found if not any("san" in part for part in p.relative_to(tree.ROOT).parts)]


def test_isa_objects_define_no_foreign_weak_symbol() -> None:
    if shutil.which("nm") is None:
        pytest.skip("nm (binutils) is not installed")
    objects = isa_objects()
    if not objects:
        pytest.skip("no object files under build/: install from this checkout first")
    bad = []
    for path in objects:
        isa = ISA_OBJECT.search(path.name)
        assert isa is not None
        out = subprocess.run(
            ["nm", "-C", "--defined-only", str(path)], capture_output=True, text=True, check=True
        )
        bad += [f"{path.name}: {s}" for s in leaks(out.stdout.splitlines(), isa[1])]
    assert not bad, "\n".join(bad)


def test_a_leak_is_found() -> None:
    lines = [
        "0000000000000000 W std::vector<float>::resize(unsigned long)",
        "0000000000000010 W kvcore::kernels::avx512::qk<4>(float*)",
        "0000000000000020 T main",
    ]
    assert leaks(lines, "avx512") == ["std::vector<float>::resize(unsigned long)"]
