"""Run directories: removed by their owner, swept when it was killed, never while it lives."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvcore.errors import IoError
from kvcore.serve import rundir

OWNER = """
import sys, tempfile, time
from kvcore.serve import rundir
tempfile.tempdir = sys.argv[1]
with rundir.private() as path:
    print(path, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def owner(folder: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    argv = [sys.executable, "-c", OWNER, str(folder)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def test_it_is_private_and_goes_with_its_owner(folder: Path) -> None:
    with rundir.private() as path:
        assert path.parent == folder and path.stat().st_mode & 0o777 == 0o700
        (path / "router.sock").touch()
        with rundir.private() as other:
            assert other != path and path.is_dir(), "of the same process, and it lives"
    assert os.listdir(folder) == []


def test_a_killed_owner_is_swept_and_a_living_one_is_not(
    folder: Path, owner: tuple[subprocess.Popen[str], Path]
) -> None:
    process, path = owner
    (path / "control.key").touch()
    with rundir.private():
        assert path.is_dir()
    process.kill()
    process.wait()
    with rundir.private() as own:
        assert os.listdir(folder) == [own.name]


def test_what_is_not_ours_is_left_alone(folder: Path) -> None:
    (folder / "kvcore-empty").mkdir()
    (folder / "kvcore-file").touch()
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / rundir.MARK).touch()
    (folder / "kvcore-link").symlink_to(folder / "elsewhere")
    if os.geteuid() == 0:
        (folder / "kvcore-foreign").mkdir()
        (folder / "kvcore-foreign" / rundir.MARK).touch()
        os.chown(folder / "kvcore-foreign", 12345, 12345)
    before = sorted(folder.rglob("*"))
    assert rundir.sweep() == []
    assert sorted(folder.rglob("*")) == before


def test_no_room_is_said_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "absent"))
    with pytest.raises(IoError, match=r"run directory.*absent"), rundir.private():
        pass
