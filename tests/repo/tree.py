"""Where the sources of this checkout are; shared by the repository's own tests."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[2]
CPP_SUFFIXES = {".h", ".cpp", ".cu", ".cuh"}

# Which rooms of csrc a room may include (docs/architecture.md explains why).
CPP_LAYERS: dict[str, set[str]] = {
    "base": set(),
    "pages": {"base"},
    "kernels": {"base"},
    "wire": {"base"},
    "transport": {"base"},
    "prefix": {"base", "pages"},
    "compress": {"base", "pages", "kernels"},
    "tiers": {"base", "pages", "kernels", "compress"},
    "stream": {"base", "pages", "kernels", "compress", "wire", "transport"},
    "sched": {"base"},
}
CPP_LAYERS["store"] = {*CPP_LAYERS}
CPP_LAYERS["apps"] = {*CPP_LAYERS}
CPP_LAYERS["bindings"] = {*CPP_LAYERS} - {"apps"}

# Which packages of kvcore a Python module may import.
THIN = {
    "pages",
    "keys",
    "prefix",
    "kernels",
    "_bounds",  # a part of kernels
    "compress",
    "head_pages",
    "wire",
    "transport",
    "_operations",  # a part of transport
    "_waiting",  # another
    "_arguments",  # another
    "stream",
    "sched",
}
FOUNDATION = {"errors", "_tensors", "config", "_core", "_version"}
PYTHON_LAYERS: dict[str, set[str]] = {
    "errors": set(),
    "_tensors": {"_core", "errors"},
    "config": {"errors"},
    "reference": set(),
    **{name: FOUNDATION | THIN for name in THIN},
    "ops": FOUNDATION | THIN,
    "model": FOUNDATION | THIN | {"ops"},
    "worker": FOUNDATION | THIN | {"ops", "model"},
    "router": FOUNDATION | THIN | {"model"},
    "info": FOUNDATION | THIN,
    "bench_link": FOUNDATION | THIN,
    "planner": FOUNDATION | THIN | {"router"},
    "integrations": FOUNDATION | THIN | {"ops", "model"},
    "serve": FOUNDATION | THIN | {"model", "router", "info"},
    "cli": FOUNDATION
    | THIN
    | {"ops", "model", "worker", "router", "serve", "info", "planner", "bench_link"},
    "__main__": {"cli"},
    "__init__": set(),
}


def cpp_files() -> Iterator[pathlib.Path]:
    """Every C++ and CUDA source of csrc and tests."""
    for folder in ("csrc", "tests/cpp", "tests/fuzz"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in CPP_SUFFIXES:
                yield path


def python_files(*folders: str) -> Iterator[pathlib.Path]:
    """Every Python source below the folders (default: package, tests, benchmarks, examples)."""
    for folder in folders or ("python", "tests", "benchmarks", "examples", "docs", ".ci"):
        yield from sorted((ROOT / folder).rglob("*.py"))
