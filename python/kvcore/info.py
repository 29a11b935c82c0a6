"""``kvcore info``: what this build and this machine can do, and why not where they cannot."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvcore import __version__, config
from kvcore.errors import KvcoreError

_IO_URING_SETUP = 425  # the same on all architectures
_COMPRESSING = ("balanced", "small")
_TRIAL_BYTES = 8 * 2**20


def gather() -> dict[str, Any]:
    """All facts as plain values; nothing is left open or allocated afterwards."""
    return {
        "version": __version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} CPUs usable",
        "isa": _isa(),
        "cuda": _cuda(),
        "rdma": _rdma(),
        "huge_pages": _huge_pages(),
        "io_uring": _io_uring(),
        "memory": _memory(),
        "transports": _transports(),
        "kv_profiles": _kv_profiles(),
        "build": _build(),
    }


def show(as_json: bool) -> int:
    """Write the facts to stdout; returns the exit code, 0."""
    facts = gather()
    if as_json:
        sys.stdout.write(json.dumps(facts, indent=2) + "\n")
        return 0
    for name, value in facts.items():
        sys.stdout.write(f"{name.replace('_', ' '):<12} {_line(value)}\n")
    return 0


def _line(value: Any) -> str:
    if isinstance(value, Mapping):
        if "why" in value:
            answer = "yes" if value["available"] else "no"
            return f"{answer}: {value['why']}"
        return ", ".join(f"{key.replace('_', ' ')} {_line(part)}" for key, part in value.items())
    if isinstance(value, list):
        return ("; " if any(" " in str(v) for v in value) else " ").join(map(str, value))
    return "unlimited" if value is None else str(value)


def _answer(available: bool, why: str) -> dict[str, Any]:
    return {"available": available, "why": why}


def _isa() -> dict[str, Any]:
    from kvcore import kernels

    return {"in_use": kernels.isa(), "available": kernels.available_isas()}


def _cuda() -> dict[str, Any]:
    """Whether a driver is there; kernels for it are not part of this version."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return _answer(False, f"no driver ({error})")
    code = driver.cuInit(0)
    if code != 0:
        return _answer(False, f"the driver is there, but cuInit failed with code {code}")
    count, version = ctypes.c_int(0), ctypes.c_int(0)
    driver.cuDeviceGetCount(ctypes.byref(count))
    driver.cuDriverGetVersion(ctypes.byref(version))
    seen = f"driver for CUDA {version.value // 1000}.{version.value % 1000 // 10}"
    return _answer(False, f"{seen} with {count.value} devices, but this build has no CUDA kernels")


def _transports() -> list[str]:
    return ["shm", "tcp", *(["rdma"] if _rdma()["available"] else [])]


def _rdma() -> dict[str, Any]:
    from kvcore._core import transport

    devices = Path("/sys/class/infiniband")
    names = sorted(p.name for p in devices.iterdir()) if devices.is_dir() else []
    missing = transport.rdma_missing()
    return _answer(not missing, missing or f"devices {', '.join(names)}")


def _huge_pages() -> dict[str, Any]:
    """Touch and collapse a small arena, as a worker does with its own."""
    from kvcore.pages import Arena

    setting = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    policy = setting.read_text().strip() if setting.is_file() else "not in this kernel"
    try:
        arena = Arena(_TRIAL_BYTES, huge_pages=True)
    except KvcoreError as error:
        return _answer(False, str(error))
    why = f"{arena.huge_bytes} of {arena.bytes} trial bytes in huge pages (shmem: {policy})"
    return _answer(arena.huge_bytes == arena.bytes, why)


def _io_uring() -> dict[str, Any]:
    libc = ctypes.CDLL(None, use_errno=True)
    params = ctypes.create_string_buffer(120)
    fd = libc.syscall(_IO_URING_SETUP, 1, params)
    if fd < 0:
        return _answer(False, f"io_uring_setup: {os.strerror(ctypes.get_errno())}")
    os.close(fd)
    return _answer(True, f"kernel {platform.release()} (not used by this version)")


def _memory() -> dict[str, Any]:
    with open("/proc/meminfo", encoding="ascii") as file:
        fields = dict(line.split(":", 1) for line in file)
    lock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return {
        "available_bytes": int(fields["MemAvailable"].split()[0]) * 1024,
        "memlock_bytes": None if lock == resource.RLIM_INFINITY else lock,
        "cgroup_bytes": _cgroup_limit(),
    }


def _cgroup_limit() -> int | None:
    """The least memory.max (v2) or limit_in_bytes (v1) over our group and its parents."""
    limits = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        v1 = "memory" in controllers.split(",")
        if not v1 and controllers:
            continue
        root = Path("/sys/fs/cgroup") / ("memory" if v1 else "")
        name = "memory.limit_in_bytes" if v1 else "memory.max"
        group_path = root / group.lstrip("/")
        for folder in (group_path, *group_path.parents):
            if folder.is_relative_to(root) and (folder / name).is_file():
                text = (folder / name).read_text().strip()
                limits += [int(text)] if text.isdigit() and int(text) < 2**62 else []
    return min(limits, default=None)


def _kv_profiles() -> list[str]:
    """The tables of the models calibrated on this machine; others are made when asked for."""
    from kvcore import compress

    found = ["exact"]
    try:
        paths = sorted((config.cache_dir() / "calibrations").glob("*.json"))
    except KvcoreError as error:
        return [*found, str(error)]
    for path in paths:
        try:
            epoch, statistics = compress.read_calibration(path.read_text())
            tables = [(name, compress.profile_class(statistics, name)) for name in _COMPRESSING]
        except (KvcoreError, OSError, UnicodeDecodeError) as error:
            found.append(f"{path.name}: {error}")
            continue
        said = (f"{name} {_table(table)}" for name, table in tables if table is not None)
        spec = statistics.spec
        found.append(f"model {epoch[:12]}, pages of {spec.page_size}: {', '.join(said)}")
    return found


def _table(table: Any) -> str:
    from kvcore import compress

    return f"{table.digest.hex()[:16]} ({100 * compress.page_share(table):.1f} % of bf16)"


def _build() -> str:
    from kvcore import _core

    return str(_core.__build__)
