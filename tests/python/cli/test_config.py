"""One schema for TOML and flags; wrong keys and values are refused by name."""

from __future__ import annotations

import argparse
import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
from kvcore import config
from kvcore.errors import InvalidArgument
from kvcore.model import hub


def from_toml(tmp_path: Path, text: str, **options: Any) -> config.Config:
    path = tmp_path / "kvcore.toml"
    path.write_text(text)
    return config.load({k.replace("__", "."): v for k, v in options.items()}, str(path))


def test_defaults() -> None:
    loaded = config.load({})
    assert loaded == config.Config()
    assert (loaded.fleet.prefill, loaded.fleet.decode, loaded.fleet.mono) == (1, 1, 0)


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    text = '[http]\nport = 9000\n[worker]\nkv_bytes = "512Mi"\nthreads = 2\n'
    loaded = from_toml(tmp_path, text, http__port=1, model="m")
    assert (loaded.http.port, loaded.worker.kv_bytes, loaded.worker.threads) == (1, 2**29, 2)
    assert loaded.model == "m"


def test_every_field_has_a_flag_and_takes_its_default() -> None:
    parser = argparse.ArgumentParser()
    for section in ("http", "router", "fleet", "worker"):
        config.add_arguments(parser, getattr(config, f"{section.title()}Config"), section)
    assert vars(parser.parse_args([])) == {}
    given = parser.parse_args(["--no-pin", "--kv-bytes", "2GiB", "--router-address", "unix:/x"])
    loaded = config.load(vars(given))
    assert (loaded.fleet.pin, loaded.worker.kv_bytes) == (False, 2**31)
    assert loaded.router.address == "unix:/x"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[worker]\npage_sice = 64\n", r"worker\.page_sice.*worker\.page_size"),
        ("[wroker]\npage_size = 64\n", r"wroker.*worker"),
        ("modell = 'x'\n", r"modell.*model"),
        ("[worker]\npage_size = 48\n", r"worker\.page_size = 48.*16, 32, 64, 128"),
        ("[http]\nport = 70000\n", r"http\.port = 70000.*65535"),
        ("[http]\nport = '80'\n", r"http\.port = '80'.*int"),
        ("[http]\nport = true\n", r"http\.port = True.*int"),
        ("[worker]\nkv_bytes = 'lots'\n", r"worker\.kv_bytes = 'lots'"),
        ("worker = 3\n", r"worker = 3.*table"),
        ("[fleet]\nmono = 1\nprefill = 1\n", r"fleet\.mono = 1"),
        ("[fleet]\nprefill = 0\n", r"fleet\.prefill = 0, fleet\.decode = 1"),
        ("[http\n", r"configuration file .*kvcore\.toml"),
        ("a = " + "[" * 9000, r"configuration file .*kvcore\.toml"),
        ("[http]\nport = " + "9" * 9000, r"configuration file .*kvcore\.toml"),
        ("[http]\nport = 0x" + "f" * 9000, r"http\.port = .*65535"),
        ("[http]\nmax_wait_s = " + "9" * 400, r"http\.max_wait_s = 9+\.\.\.: is too large"),
        ("[worker]\nkv_bytes = 5", r"kv_bytes = 5: must be >= 1Mi and <= 1048576Ti$"),
        ("[worker]\nthreads = 0", r"worker\.threads = 0: must be >= 1 and <= 1024$"),
        ("[worker]\npacing_bytes_per_s = 1e3", r"pacing_bytes_per_s = 1000\.0: expected int"),
        ("[worker]\npacing_bytes_per_s = " + "9" * 30, r"pacing_bytes_per_s = 9+: must be >= 0"),
        ("[http]\nhost = 'a\\u0000'".replace("'", '"'), r"http\.host = .*zero character"),
    ],
)
def test_refusals_name_the_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        from_toml(tmp_path, text)


FLOATS = [
    (section, field.name)
    for section in ("http", "router", "fleet", "worker")
    for field in dataclasses.fields(getattr(config, f"{section.title()}Config"))
    if field.type == "float"
]


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize(("section", "name"), FLOATS)
def test_only_finite_numbers_are_taken(tmp_path: Path, section: str, name: str, value: str) -> None:
    want = rf"{section}\.{name} = {value}: must be a finite number"
    with pytest.raises(InvalidArgument, match=want):
        from_toml(tmp_path, f"[{section}]\n{name} = {value}\n")
    with pytest.raises(InvalidArgument, match=want):
        config.load({f"{section}.{name}": float(value)})


def test_the_floats_are_found() -> None:
    assert ("router", "rejoin_wait_s") in FLOATS and len(FLOATS) >= 4


@pytest.mark.parametrize("key", ["model", "http.served_name"])
def test_names_for_clients_are_text(key: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"{key} = .*not valid UTF-8 at character 1"):
        config.load({key: "a\udcff"})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"absent\.toml"):
        config.load({}, str(tmp_path / "absent.toml"))


def test_the_environment_names_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "other.toml"
    path.write_text("[http]\nport = 1234\n")
    monkeypatch.setenv("KVCORE_CONFIG", str(path))
    assert config.load({}).http.port == 1234


@pytest.mark.parametrize(
    ("text", "count"),
    [("5", 5), ("1k", 1000), ("2Ki", 2048), ("1.5g", 1_500_000_000), ("3 MiB", 3 * 2**20)],
)
def test_bytes(text: str, count: int) -> None:
    assert config.parse_bytes(text) == count


@pytest.mark.parametrize(
    "text", ["", "-1", "1x", "k", "1e9", "1.2.3", "9" * 5000, "9" * 400 + ".5"]
)
def test_wrong_bytes(text: str) -> None:
    with pytest.raises(InvalidArgument, match="expected bytes"):
        config.parse_bytes(text)


def test_key_files(tmp_path: Path) -> None:
    path = tmp_path / "key"
    key = config.make_key_file(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert config.read_key_file(path) == key and len(key) == 32
    with pytest.raises(FileExistsError):
        config.make_key_file(path)
    path.chmod(0o644)
    with pytest.raises(InvalidArgument, match="mode 0644"):
        config.read_key_file(path)
    path.chmod(0o600)
    path.write_bytes(b"short")
    with pytest.raises(InvalidArgument, match="32 bytes"):
        config.read_key_file(path)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(InvalidArgument):
        config.read_key_file(tmp_path / "link")


def test_caches_and_data_may_lie_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    for name, find, usual in (
        ("XDG_CACHE_HOME", config.cache_dir, ".cache"),
        ("XDG_DATA_HOME", config.data_dir, ".local/share"),
    ):
        for value in ("", "relative"):
            monkeypatch.setenv(name, value)
            assert find() == Path("/home/somebody") / usual / "kvcore"
        monkeypatch.setenv(name, str(tmp_path))
        assert find() == tmp_path / "kvcore"
    assert config.deployment_secret() and (tmp_path / "kvcore" / "secret").is_file()
    assert hub.default_cache_dir() == tmp_path / "kvcore"


def test_a_number_of_thousands_of_digits(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"kvcore\.toml: a number has too many digits$"):
        from_toml(tmp_path, "[http]\nport = " + "9" * 5000)


def test_deployment_secret_stays(tmp_path: Path) -> None:
    first = config.deployment_secret(tmp_path / "data")
    assert config.deployment_secret(tmp_path / "data") == first
    assert (tmp_path / "data").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "data" / "secret").stat().st_mode & 0o777 == 0o600


def test_processes_that_start_at_once_have_one_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second one looks just when the first has made the file, and before it has written it."""
    seen: list[bytes] = []
    real = os.open

    def opened(path: Any, flags: int, *mode: int, **more: Any) -> int:
        fd = real(path, flags, *mode, **more)
        if flags & os.O_CREAT and not seen:
            seen.append(b"")
            seen[0] = config.deployment_secret(tmp_path)
        return fd

    monkeypatch.setattr(os, "open", opened)
    assert config.deployment_secret(tmp_path) == seen[0]
    assert os.listdir(tmp_path) == ["secret"]
