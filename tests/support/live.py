"""``kvcore serve`` as a user runs it, for tests: its process, log, URL and client."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai

PROMPT = "The quick brown fox jumps over the lazy dog. " * 6
FLAGS = ["--kv-bytes", "16Mi", "--page-size", "16", "--port", "0"]


class Serve:
    """One ``kvcore serve`` process, its log and its URL."""

    def __init__(self, folder: Path, model: Path, *flags: str) -> None:
        self.model = model.name
        self._log = folder / "log"
        self.temp = folder / "t"
        self.temp.mkdir()
        self.env = env = {**os.environ, "HOME": str(folder), "TMPDIR": str(self.temp)}
        for name in ("XDG_CACHE_HOME", "XDG_DATA_HOME"):
            env.pop(name, None)
        argv = [sys.executable, "-m", "kvcore", "serve", str(model), *FLAGS, *flags]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                argv, stdout=subprocess.PIPE, stderr=log, text=True, env=env
            )
        assert self.process.stdout is not None
        self.out = self.process.stdout
        line = self.out.readline()
        assert line, self.log
        self.url = line.split()[-1]
        self.client = openai.OpenAI(base_url=self.url + "/v1", api_key="x", max_retries=0)

    @property
    def log(self) -> str:
        return self._log.read_text()

    def wait(self, ready: Callable[[], Any], seconds: float = 120.0) -> Any:
        end = time.monotonic() + seconds
        while not (value := ready()):
            assert self.process.poll() is None and time.monotonic() < end, self.log
            time.sleep(0.02)
        return value

    def wait_ready(self) -> None:
        self.wait(lambda: httpx.get(self.url + "/health").status_code == 200)

    def pids(self, role: str = "") -> list[int]:
        """Of workers in the order they were started; later ones replace earlier ones."""
        found = re.findall(rf"({role}\S*-\d+) started \(pid (\d+)\)", self.log)
        return [int(pid) for _, pid in found]

    def stats(self, name: str) -> dict[str, float]:
        text = httpx.get(self.url + "/metrics").text
        found = re.findall(rf'role="(\w+)",stat="{name}".*}} (\S+)', text)
        return {role: float(value) for role, value in found}

    def templates(self) -> list[int]:
        """Process ids of templates in the order they were started."""
        return [int(pid) for pid in re.findall(r"template started \(pid (\d+)\)", self.log)]

    def event(self, name: str) -> float:
        text = httpx.get(self.url + "/metrics").text
        found = re.search(rf'kvcore_router_events\{{event="{name}"\}} (\S+)', text)
        return float(found[1]) if found else 0.0

    def ask(self, prompt: str = PROMPT, count: int = 12, **more: Any) -> Any:
        more = {"temperature": 0, **more}
        return self.client.completions.create(
            model=self.model, prompt=prompt, max_tokens=count, **more
        )


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def kill_in_mid_request(serve: Serve, role: str, prompt: str) -> tuple[str, float]:
    """The answer, and the seconds from the death of ``role`` until it was dispatched again."""
    worker, pieces, known = serve.pids(role)[-1], [], {"extra_body": {"ignore_eos": True}}

    def read() -> None:
        for chunk in serve.ask(prompt, 1800, stream=True, **known):
            pieces.extend(choice.text for choice in chunk.choices)

    if role == "prefill":
        os.kill(worker, signal.SIGSTOP)  # a prompt of a tiny model takes no time otherwise
    thread = threading.Thread(target=read)
    thread.start()
    if role == "prefill":
        serve.wait(lambda: serve.stats("running")["decode"] == 1, 20)
    else:
        serve.wait(lambda: pieces, 20)
    before = serve.event("dispatched")
    os.kill(worker, signal.SIGKILL)
    killed = time.monotonic()
    serve.wait(lambda: serve.event("dispatched") > before, 60)
    took = time.monotonic() - killed
    thread.join()
    return "".join(pieces), took
