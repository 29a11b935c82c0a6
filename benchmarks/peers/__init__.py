"""Other systems, each in a virtual environment of its own; :class:`Peer` talks to one of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any


class Peer:
    """A running peer script: requests and replies are JSON objects, one a line.

    Between its turns it is stopped: threads that wait spinning (OpenMP's) would else take the cores
    from what they are compared with.
    """

    def __init__(self, script: str, python: str, *arguments: str) -> None:
        clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        self.process = subprocess.Popen(
            [python, str(Path(__file__).parent / script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=clean,
        )
        self.info = self.ask({"op": "info"})

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send one request and wait for its reply."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.send_signal(signal.SIGCONT)
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        self.process.send_signal(signal.SIGSTOP)
        if not line:
            raise RuntimeError(f"the peer ended with exit code {self.process.wait()}")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def close(self) -> None:
        """End the peer."""
        assert self.process.stdin is not None
        self.process.send_signal(signal.SIGCONT)
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
