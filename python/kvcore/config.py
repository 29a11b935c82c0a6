"""Configuration: one schema of frozen dataclasses behind the TOML file and the command line.

A value comes from the command line, else from the TOML file (``--config`` or ``KVCORE_CONFIG``),
else from the default below. Each field carries its help text and allowed range, so that a wrong
value is refused with the field, the value and what is allowed, and an unknown key with the
nearest valid name.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import math
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast, get_type_hints

from kvcore.errors import InvalidArgument

DEFAULT_MODEL = "smollm2-135m-instruct"
PAGE_FORMATS = {"bfloat16": "bf16", "float32": "f32"}
"""What pages hold of a model that computes in a dtype."""
T = TypeVar("T")

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_MOST_BYTES = 2**60  # the core counts bytes in 64 bits and adds to them


def _opt(
    default: Any,
    help_text: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    flag: str = "",
    size: bool = False,
    readable: bool = False,
) -> Any:
    meta = dict(help=help_text, low=low, high=high, choices=choices, flag=flag, size=size)
    meta["readable"] = readable
    return dataclasses.field(default=default, metadata=meta)


@dataclasses.dataclass(frozen=True)
class HttpConfig:
    """The OpenAI-compatible front."""

    host: str = _opt("127.0.0.1", "address to listen on; a non-loopback one needs an API key")
    port: int = _opt(8000, "TCP port, 0 picks a free one", low=0, high=65535)
    api_key_file: str = _opt("", "file (mode 0600) with the API key that clients must send")
    served_name: str = _opt(
        "", "model name shown to clients (default: the model's own)", readable=True
    )
    max_body_bytes: int = _opt(4 * 2**20, "largest request body", low=1024, size=True)
    request_timeout_s: float = _opt(600.0, "deadline of one request, seconds", low=0.1, high=86400)
    max_queue: int = _opt(256, "requests that may wait for a worker before 429", low=0)
    max_wait_s: float = _opt(60.0, "longest wait for free pages before 429, seconds", low=0)


@dataclasses.dataclass(frozen=True)
class RouterConfig:
    """The router's control socket and its patience with workers."""

    address: str = _opt(
        "",
        "control socket unix:PATH or tcp:HOST:PORT (default: a private one)",
        flag="router-address",
    )
    key_file: str = _opt("", "pre-shared key of the control socket (default: a fresh one)")
    heartbeat_ms: int = _opt(500, "how often workers report, milliseconds", low=20, high=10000)
    heartbeat_timeout_s: float = _opt(
        2.0, "silence after which a worker is dead (a local one that runs: 5 times)", low=0.1
    )
    max_attempts: int = _opt(3, "times one request is dispatched", low=1, high=10)
    rejoin_wait_s: float = _opt(
        1.0, "wait for a lost worker that nothing here restarts", low=0, high=60
    )


@dataclasses.dataclass(frozen=True)
class FleetConfig:
    """Which workers ``serve`` starts on this machine."""

    prefill: int = _opt(1, "prefill workers", low=0, high=64)
    decode: int = _opt(1, "decode workers", low=0, high=64)
    mono: int = _opt(0, "workers that do both; replaces prefill and decode", low=0, high=64)
    max_restarts: int = _opt(
        5, "restarts of one worker within a minute before it counts as failing", low=0, high=1000
    )
    pin: bool = _opt(True, "give each worker its own CPUs when there are enough")


@dataclasses.dataclass(frozen=True)
class WorkerConfig:
    """What every worker of a deployment is told; page size and dtype must agree between them."""

    page_size: int = _opt(64, "tokens per page", choices=("16", "32", "64", "128"))
    kv_bytes: int = _opt(2**30, "memory for KV pages, e.g. 512Mi or 2Gi", low=2**20, size=True)
    kv_profile: str = _opt(
        "exact",
        "how decode and mono workers keep KV: exact, or compressed as balanced or small",
        choices=("exact", "balanced", "small"),
    )
    dtype: str = _opt("bfloat16", "weights and KV", choices=("bfloat16", "float32"))
    threads: int = _opt(1, "compute threads of each worker", low=1, high=1024)
    transport: str = _opt(
        "shm",
        "how KV moves between workers; only rdma-or-tcp falls back, and says so",
        choices=("shm", "tcp", "rdma", "rdma-or-tcp"),
    )
    checksums: str = _opt("sampled", "KV checksums on shm", choices=("sampled", "all", "off"))
    pacing_bytes_per_s: int = _opt(0, "limit of the KV stream, 0 = none", low=0, size=True)
    max_batch: int = _opt(64, "sequences decoded together", low=1, high=4096)
    token_budget: int = _opt(512, "prompt tokens computed per step", low=16, high=65536)

    @property
    def allow_fallback(self) -> bool:
        """Whether KV may move another way than the preferred one."""
        return self.transport == "rdma-or-tcp"


@dataclasses.dataclass(frozen=True)
class WorkerLaunch:
    """All one worker process needs: the argument of ``kvcore.worker.process.run_worker``.

    ``router`` is a wire address, ``key_file`` holds the control socket's pre-shared key, ``cpus``
    (empty = leave alone) are the CPUs to pin to, ``runtime_dir`` (0700) is where its sockets go
    ("" = make a private one).
    """

    role: str
    router: str
    key_file: str
    model: str = DEFAULT_MODEL
    cpus: tuple[int, ...] = ()
    runtime_dir: str = ""
    worker: WorkerConfig = WorkerConfig()


@dataclasses.dataclass(frozen=True)
class Config:
    """The whole TOML file: ``model`` and one table per section."""

    model: str = _opt(
        DEFAULT_MODEL, "Hugging Face directory, GGUF file, or a known name", readable=True
    )
    http: HttpConfig = HttpConfig()
    router: RouterConfig = RouterConfig()
    fleet: FleetConfig = FleetConfig()
    worker: WorkerConfig = WorkerConfig()


def parse_bytes(text: str | int, name: str = "size") -> int:
    """Bytes from ``1073741824``, ``"512Mi"``, ``"2 GiB"`` or ``"1.5g"``. Raises InvalidArgument."""
    pattern = r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([kmgt]?i?)b?\s*"
    match = re.fullmatch(pattern, str(text).lower())
    if match is None or match[2] not in _UNITS:
        raise InvalidArgument(
            f"{name} = {_shown(text)}: expected bytes such as 1073741824, 512Mi or 2GiB"
        )
    unit = _UNITS[match[2]]
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def _shown(value: Any) -> str:
    """A value for a message, cut when it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to write the longest numbers
        return "a number of thousands of digits"
    return text if len(text) <= 80 else text[:77] + "..."


def _limit(value: float, size: bool) -> str:
    """A bound for a message: whole, and sizes in the unit that a user would write."""
    if size:
        for unit in ("ti", "gi", "mi", "ki"):
            if value and value % _UNITS[unit] == 0:
                return f"{int(value) // _UNITS[unit]}{unit.title()}"
    return f"{value:d}" if isinstance(value, int) else f"{value:g}"


def bounds(low: float | None, high: float | None, size: bool = False) -> str:
    """``>= low and <= high`` as a message says it; ``size``: in bytes."""
    found = [(">=", low), ("<=", high)]
    return " and ".join(f"{sign} {_limit(at, size)}" for sign, at in found if at is not None)


def _convert(name: str, kind: type, meta: Mapping[str, Any], value: Any) -> Any:
    size, low, high = meta.get("size", False), meta.get("low"), meta.get("high")
    if size:
        high = _MOST_BYTES if high is None else high
        value = parse_bytes(value, name) if isinstance(value, str) else value
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not (isinstance(value, kind) or (kind is float and whole)) or (kind is int and not whole):
        raise InvalidArgument(
            f"{name} = {_shown(value)}: expected {kind.__name__}, got {type(value).__name__}"
        )
    choices = meta.get("choices")
    if choices and str(value) not in choices:
        raise InvalidArgument(f"{name} = {_shown(value)}: allowed are {', '.join(choices)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidArgument(f"{name} = {value}: must be a finite number")
    if (low is not None and value < low) or (high is not None and value > high):
        raise InvalidArgument(f"{name} = {_shown(value)}: must be {bounds(low, high, size)}")
    if kind is float:
        return _float(name, value)
    return _text(name, value, meta.get("readable", False)) if kind is str else value


def _float(name: str, value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        raise InvalidArgument(f"{name} = {_shown(value)}: is too large") from None


def _text(name: str, value: str, readable: bool) -> str:
    """A path may hold any byte but zero; what clients are shown must be text."""
    if "\0" in value:
        raise InvalidArgument(f"{name} = {_shown(value)}: holds a zero character")
    return utf8(name, value) if readable else value


def utf8(name: str, value: str) -> str:
    """``value`` itself. Raises InvalidArgument when it came from bytes that are not UTF-8."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(
            f"{name} = {_shown(value)}: not valid UTF-8 at character {error.start}"
        ) from None
    return value


def from_mapping(cls: type[T], mapping: Mapping[str, Any], where: str = "") -> T:
    """A dataclass of the schema from nested mappings.

    Raises InvalidArgument for unknown keys and wrong values.
    """
    hints = get_type_hints(cls)
    known = {f.name: f for f in dataclasses.fields(cast(Any, cls))}
    values: dict[str, Any] = {}
    for key, value in mapping.items():
        name = f"{where}{key}"
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
            hint = f"; did you mean {where}{near[0]}?" if near else f"; known: {', '.join(known)}"
            raise InvalidArgument(f"unknown configuration key {name[:80]}{hint}")
        kind = hints[key]
        if dataclasses.is_dataclass(kind):
            if not isinstance(value, Mapping):
                raise InvalidArgument(f"{name} = {_shown(value)}: expected a table")
            values[key] = from_mapping(cast(type[Any], kind), value, name + ".")
        else:
            values[key] = _convert(name, kind, known[key].metadata, value)
    return cls(**values)


def read_toml(path: str | Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises InvalidArgument naming the file when it cannot be read."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise InvalidArgument(f"configuration file {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, and what tomllib lets through
        raise InvalidArgument(f"configuration file {path}: {number_error(error)}") from error


def number_error(error: Exception) -> str:
    """Why a text is no value: for numbers of thousands of digits without Python's own advice."""
    text = str(error)
    return "a number has too many digits" if "set_int_max_str_digits" in text else text


def add_arguments(parser: argparse.ArgumentParser, cls: type[Any], section: str) -> None:
    """Add one ``--flag`` per field of a section; absent flags stay absent from the namespace."""
    group = parser.add_argument_group(section)
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        flag = "--" + (field.metadata["flag"] or field.name).replace("_", "-")
        text = f"{field.metadata['help']} (default: {field.default!r})".replace("%", "%%")
        options: dict[str, Any] = dict(
            dest=f"{section}.{field.name}", default=argparse.SUPPRESS, help=text
        )
        if hints[field.name] is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, **options)
            continue
        kind: Any = str if field.metadata["size"] else hints[field.name]
        shown = "SIZE" if field.metadata["size"] else kind.__name__.upper()
        if field.metadata["choices"]:  # a wrong one is refused by load, wherever it comes from
            shown = f"{{{','.join(field.metadata['choices'])}}}"
        group.add_argument(flag, type=kind, metavar=shown, **options)


def load(options: Mapping[str, Any], path: str | None = None) -> Config:
    """The configuration from a TOML file with command line options laid over it.

    Args:
        options: keys ``model`` or ``section.field``; keys without a section are not for us.
        path: TOML file; None takes ``KVCORE_CONFIG`` when that is set.
    """
    path = path or os.environ.get("KVCORE_CONFIG") or None
    tables: dict[str, Any] = dict(read_toml(path)) if path else {}
    for key, value in options.items():
        section, _, field = key.partition(".")
        if value is None or not (field or key == "model"):
            continue
        if field:
            table = tables.setdefault(section, {})
            if not isinstance(table, dict):
                raise InvalidArgument(f"{section} = {_shown(table)}: expected a table")
            tables[section] = {**table, field: value}
        else:
            tables[section] = value
    config = from_mapping(Config, tables)
    return dataclasses.replace(config, fleet=_check_fleet(config.fleet, tables.get("fleet", {})))


def _check_fleet(fleet: FleetConfig, given: Mapping[str, Any]) -> FleetConfig:
    """Mono workers replace the default pair, but not a pair that was asked for."""
    counts = f"fleet.prefill = {fleet.prefill}, fleet.decode = {fleet.decode}"
    if fleet.mono:
        if given.get("prefill") or given.get("decode"):
            raise InvalidArgument(f"fleet.mono = {fleet.mono} with {counts}: mono does both")
        return dataclasses.replace(fleet, prefill=0, decode=0)
    if bool(fleet.prefill) != bool(fleet.decode):
        raise InvalidArgument(f"{counts}: one kind needs the other, both or neither >= 1")
    return fleet


def check_machine(worker: WorkerConfig, count: int) -> None:
    """Raises InvalidArgument when this machine lacks the memory for ``count`` workers' pages, or
    the CPUs for the threads of one."""
    usable = len(os.sched_getaffinity(0))
    if count and worker.threads > usable:
        text = f"worker.threads = {worker.threads}: this process may use {usable} CPUs"
        raise InvalidArgument(f"{text}, and a thread without one slows all others down")
    wanted = worker.kv_bytes * count
    with open("/proc/meminfo", encoding="ascii") as file:
        fields = dict(line.split(":", 1) for line in file)
    free = int(fields["MemAvailable"].split()[0]) * 1024
    if wanted > free:
        total = f"all {count} workers together want {wanted}" if count > 1 else f"asks for {wanted}"
        raise InvalidArgument(
            f"worker.kv_bytes = {worker.kv_bytes}: {total} bytes of KV pages, "
            f"but {free} bytes of memory are available"
        )


def cache_dir() -> Path:
    """Where converted models and calibrations live: ``kvcore`` in XDG_CACHE_HOME or ~/.cache."""
    return _base("XDG_CACHE_HOME", os.environ.get("XDG_CACHE_HOME", ""), ".cache")


def data_dir() -> Path:
    """Where the deployment's secret lives: ``kvcore`` in XDG_DATA_HOME or ~/.local/share."""
    return _base("XDG_DATA_HOME", os.environ.get("XDG_DATA_HOME", ""), ".local/share")


@contextlib.contextmanager
def data_of_its_own() -> Iterator[None]:
    """Page keys that no other process will see need no secret in the user's data directory."""
    before = os.environ.get("XDG_DATA_HOME")
    with tempfile.TemporaryDirectory() as path:
        os.environ["XDG_DATA_HOME"] = path
        try:
            yield
        finally:
            del os.environ["XDG_DATA_HOME"]
            if before is not None:
                os.environ["XDG_DATA_HOME"] = before


def _base(variable: str, given: str, below_home: str) -> Path:
    if os.path.isabs(given):  # others are to be ignored, by the XDG Base Directory Specification
        return Path(given) / "kvcore"
    try:
        return Path.home() / below_home / "kvcore"
    except RuntimeError as error:  # no HOME, and a user that has no entry
        raise InvalidArgument(f"no home directory: set HOME or {variable}") from error


def read_key_file(path: str | Path) -> bytes:
    """A pre-shared key: the 32 bytes of a file that only its owner may read.

    Raises InvalidArgument when it cannot be read, others may read it, or it has another size.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            key = file.read(33)
    except OSError as error:
        raise InvalidArgument(f"key file {path}: {error.strerror}") from error
    if mode & 0o077:
        raise InvalidArgument(f"key file {path}: mode {mode & 0o777:04o}, must be 0600")
    if len(key) != 32:
        raise InvalidArgument(f"key file {path}: must hold exactly 32 bytes")
    return key


def make_key_file(path: str | Path) -> bytes:
    """Write 32 fresh random bytes to a new file of mode 0600; returns them.

    The file appears whole: who finds it never reads a part. Raises FileExistsError.
    """
    key = os.urandom(32)
    partial = f"{os.fspath(path)}.{os.getpid()}.{os.urandom(4).hex()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(partial, flags, 0o600), "wb") as file:
            file.write(key)
        os.link(partial, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)
    return key


def deployment_secret(directory: str | Path | None = None) -> bytes:
    """The secret of all page keys: a 0600 file in the data directory, made on first use."""
    home = Path(directory) if directory else data_dir()
    path = home / "secret"
    if os.path.lexists(path):  # also where nothing can be written
        return read_key_file(path)
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        return make_key_file(path)
    except FileExistsError:  # another process was quicker
        return read_key_file(path)
    except OSError as error:
        raise InvalidArgument(
            f"data directory {home}: {error.strerror}. "
            "Set XDG_DATA_HOME to a directory that can be written"
        ) from error
