"""Run directories: sockets and keys of one process under the temporary directory.

A process that is killed leaves its directory behind, so the next one that makes its own removes
those of this user whose owners are gone. An owner holds a lock on its directory for as long as it
lives; the kernel drops it however the process ends, so no process id can be mistaken for another.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvcore.errors import IoError

log = logging.getLogger("kvcore.serve")
PREFIX = "kvcore-"
# Only a directory with this file is ever swept: it is made after the lock is held, so one that
# is just being made, or that is not ours, is left alone.
MARK = "owner"


@contextlib.contextmanager
def private() -> Iterator[Path]:
    """A new 0700 directory, removed at the end; directories of dead processes go first.

    Raises IoError when there is no room for it.
    """
    sweep()
    with contextlib.ExitStack() as stack:
        try:
            path = Path(tempfile.mkdtemp(prefix=PREFIX))
            lock = stack.enter_context(_opened(path))
            stack.callback(shutil.rmtree, path, ignore_errors=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
            (path / MARK).write_text(f"{os.getpid()}\n")
        except OSError as error:
            raise IoError(f"no run directory can be made: {error}") from error
        yield path


def sweep(folder: str | None = None) -> list[Path]:
    """Remove this user's run directories whose owners are gone; returns them."""
    root = Path(folder or tempfile.gettempdir())
    try:
        found = sorted(path for path in root.iterdir() if path.name.startswith(PREFIX))
    except OSError as error:
        log.info("%s is not swept: %s", root, error)
        return []
    return [path for path in found if _swept(path)]


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _swept(path: Path) -> bool:
    try:
        if os.lstat(path).st_uid != os.geteuid():
            return False
        with _opened(path) as folder:
            os.stat(MARK, dir_fd=folder, follow_symlinks=False)
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path)
    except BlockingIOError:  # its owner lives
        return False
    except (FileNotFoundError, NotADirectoryError):  # not one of ours, or somebody was quicker
        return False
    except OSError as error:
        log.info("%s is left behind: %s", path, error)
        return False
    log.info("removed %s of a process that was killed", path)
    return True
