"""Real shards: a prefill group of one tensor parallel degree feeds a decode group of another, each
rank a process, sums over gloo. The tokens are those of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import tp_llama

TOKENS = [(7 * i + 3) % tp_llama.VOCAB for i in range(150)]  # more than a chunk, no whole pages
COUNT = 24


class Process:
    """A rank, told and asked by JSON lines."""

    def __init__(self, **setup: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, tp_llama.__file__, json.dumps(setup)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )

    def tell(self, **message: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"rank ended with {self.process.wait(20)}"
        return json.loads(line)

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        try:
            assert self.process.wait(20) == 0
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise


@pytest.mark.parametrize(
    ("heads", "p", "d"),
    [((8, 4, 32), 2, 1), ((8, 4, 32), 1, 2), ((9, 3, 64), 3, 1)],
    ids=["tp2-to-tp1", "tp1-to-tp2", "tp3-to-tp1"],
)
def test_tokens_are_those_of_one_process(
    tmp_path: Path, heads: tuple[int, int, int], p: int, d: int
) -> None:
    common: dict[str, Any] = {"heads": heads, "num_tokens": len(TOKENS), "count": COUNT}
    givers = [
        Process(role="prefill", rank=rank, degree=p, group=str(tmp_path / "p"), **common)
        for rank in range(p)
    ]
    takers = [
        Process(
            role="decode", rank=rank, degree=d, senders=p, group=str(tmp_path / "d"),
            address=f"shm:{tmp_path}/d{rank}.sock", **common,
        )
        for rank in range(d)
    ]  # fmt: skip
    alone = tp_llama.Worker(heads, 0, 1)
    expected = alone.decode(alone.run(TOKENS), COUNT)
    assert len(set(expected)) > COUNT // 2  # the model says something
    for process in givers:
        process.read()
    granted = [process.read() for process in takers]
    for rank, process in enumerate(givers):
        shares = [
            (g["grant"], i) for g in granted for i, giver in enumerate(g["givers"]) if giver == rank
        ]
        assert shares  # every rank has something to give
        process.tell(tokens=TOKENS, shares=shares)
    for process in givers:
        answer = process.read()
        assert set(answer["events"]) == {"sent"}
        assert answer["token"] == expected[0]
    for process in takers:
        assert process.read() == {"event": "complete", "tokens": expected}
    for process in givers + takers:
        process.close()
