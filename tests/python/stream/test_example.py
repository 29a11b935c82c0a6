"""examples/stream_two_processes.py over both kinds of link."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest

EXAMPLE = pathlib.Path(__file__).resolve().parents[3] / "examples/stream_two_processes.py"


@pytest.mark.parametrize("scheme", ["tcp", "shm"])
def test_pages_go_from_prefill_to_decode(scheme: str, tmp_path: pathlib.Path) -> None:
    address = "tcp:127.0.0.1:0" if scheme == "tcp" else f"shm:{tmp_path}/decode.sock"
    example = [sys.executable, str(EXAMPLE)]
    decode = subprocess.Popen(
        [*example, "decode", "--listen", address], stdout=subprocess.PIPE, text=True
    )
    try:
        assert decode.stdout is not None
        grant = decode.stdout.readline().strip()
        prefill = subprocess.run(
            [*example, "prefill", grant], capture_output=True, text=True, check=True, timeout=60
        ).stdout
        arrived = decode.communicate(timeout=60)[0]
    finally:
        decode.kill()
        decode.wait()
    assert decode.returncode == 0
    assert {*re.findall(r"layer (\d) is in place", arrived)} == {"0", "1", "2", "3"}
    (size,) = re.findall(rf"complete: first token: 42, (\d+) bytes over {scheme}", arrived)
    assert f"sent: {size} bytes" in prefill
    (last,) = re.findall(r"K of the last token: .+", prefill)
    assert last in arrived


def test_it_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 60
