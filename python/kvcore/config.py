"""Configuration: one schema of frozen dataclasses behind the TOML file and the command line.

A value comes from the command line, else from the TOML file (``--config`` or ``KVCORE_CONFIG``),
else from the default below. Each field carries its help text and allowed range, so that a wrong
value is refused with the field, the value and what is allowed, and an unknown key with the
nearest valid name.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, cast, get_type_hints

from kvcore.errors import InvalidArgument

DEFAULT_MODEL = "smollm2-135m-instruct"
T = TypeVar("T")

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def _opt(
    default: Any,
    help_text: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    flag: str = "",
    size: bool = False,
) -> Any:
    meta = dict(help=help_text, low=low, high=high, choices=choices, flag=flag, size=size)
    return dataclasses.field(default=default, metadata=meta)


@dataclasses.dataclass(frozen=True)
class HttpConfig:
    """The OpenAI-compatible front."""

    host: str = _opt("127.0.0.1", "address to listen on; a non-loopback one needs an API key")
    port: int = _opt(8000, "TCP port, 0 picks a free one", low=0, high=65535)
    api_key_file: str = _opt("", "file (mode 0600) with the API key that clients must send")
    served_name: str = _opt("", "model name shown to clients (default: the model's own)")
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
    max_restarts: int = _opt(5, "restarts of one worker within a minute", low=0, high=1000)
    pin: bool = _opt(True, "give each worker its own CPUs when there are enough")


@dataclasses.dataclass(frozen=True)
class WorkerConfig:
    """What every worker of a deployment is told; page size and dtype must agree between them."""

    page_size: int = _opt(64, "tokens per page", choices=("16", "32", "64", "128"))
    kv_bytes: int = _opt(2**30, "memory for KV pages, e.g. 512Mi or 2Gi", low=2**20, size=True)
    dtype: str = _opt("bfloat16", "weights and KV", choices=("bfloat16", "float32"))
    threads: int = _opt(1, "compute threads of each worker", low=1, high=1024)
    transport: str = _opt("shm", "how KV moves between workers", choices=("shm", "tcp"))
    checksums: str = _opt("sampled", "KV checksums on shm", choices=("sampled", "all", "off"))
    pacing_bytes_per_s: int = _opt(0, "limit of the KV stream, 0 = none", low=0, size=True)
    max_batch: int = _opt(64, "sequences decoded together", low=1, high=4096)
    token_budget: int = _opt(512, "prompt tokens computed per step", low=16, high=65536)


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

    model: str = _opt(DEFAULT_MODEL, "Hugging Face directory, GGUF file, or a known name")
    http: HttpConfig = HttpConfig()
    router: RouterConfig = RouterConfig()
    fleet: FleetConfig = FleetConfig()
    worker: WorkerConfig = WorkerConfig()


def parse_bytes(text: str | int, name: str = "size") -> int:
    """Bytes from ``1073741824``, ``"512Mi"``, ``"2 GiB"`` or ``"1.5g"``. Raises InvalidArgument."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?i?)b?\s*", str(text).lower())
    if match is None or match[2] not in _UNITS:
        raise InvalidArgument(
            f"{name} = {text!r}: expected bytes such as 1073741824, 512Mi or 2GiB"
        )
    unit = _UNITS[match[2]]
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def _convert(name: str, kind: type, meta: Mapping[str, Any], value: Any) -> Any:
    if meta.get("size") and isinstance(value, str):
        value = parse_bytes(value, name)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise InvalidArgument(
            f"{name} = {value!r}: expected {kind.__name__}, got {type(value).__name__}"
        )
    choices = meta.get("choices")
    if choices and str(value) not in choices:
        raise InvalidArgument(f"{name} = {value!r}: allowed are {', '.join(choices)}")
    low, high = meta.get("low"), meta.get("high")
    if (low is not None and value < low) or (high is not None and value > high):
        upper = "" if high is None else f" and <= {high:g}"
        raise InvalidArgument(f"{name} = {value!r}: must be >= {low or 0:g}{upper}")
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
            raise InvalidArgument(f"unknown configuration key {name}{hint}")
        kind = hints[key]
        if dataclasses.is_dataclass(kind):
            if not isinstance(value, Mapping):
                raise InvalidArgument(f"{name} = {value!r}: expected a table")
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
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"configuration file {path}: {error}") from error


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
        group.add_argument(flag, type=kind, metavar=kind.__name__.upper(), **options)


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
                raise InvalidArgument(f"{section} = {table!r}: expected a table")
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
    """Write 32 fresh random bytes to a new file of mode 0600; returns them."""
    key = os.urandom(32)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags, 0o600), "wb") as file:
        file.write(key)
    return key


def deployment_secret(directory: str | Path | None = None) -> bytes:
    """The secret of all page keys: a 0600 file in the data directory, made on first use."""
    home = Path(directory) if directory else Path.home() / ".local" / "share" / "kvcore"
    path = home / "secret"
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        return make_key_file(path)
    except FileExistsError:
        return read_key_file(path)
    except OSError as error:
        raise InvalidArgument(f"data directory {home}: {error.strerror}") from error
