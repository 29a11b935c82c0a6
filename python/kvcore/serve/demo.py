"""``kvcore demo``: real chat prompts over HTTP on a prefill and a decode worker, then on one."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any
from urllib.parse import urlsplit

from rich import box
from rich.console import Console
from rich.table import Table

from kvcore.errors import IoError, KvcoreError
from kvcore.model import hub
from kvcore.serve.document import EIGHT, QUESTIONS, SHORT, document

_READY_S = 300.0
_REQUEST_S = 300.0
_KV_BYTES = "512Mi"


class DemoFailed(KvcoreError):
    """Something did not work; the message says what and shows the server's last lines."""


@dataclasses.dataclass
class Result:
    """One answered prompt as its client saw it; times in ms from the sending of the request."""

    name: str
    text: str
    token_ids: list[int]
    ttft_ms: float
    gaps_ms: list[float]
    prompt_tokens: int
    cached_tokens: int
    facts: dict[str, Any]
    equal_to_mono: bool | None = None

    def percentile(self, share: float) -> float | None:
        """TPOT at ``share`` of this answer's tokens; None for a single token."""
        if not self.gaps_ms:
            return None
        ordered = sorted(self.gaps_ms)
        return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]

    def record(self) -> dict[str, Any]:
        """The line of ``--json``."""
        return {
            "name": self.name,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": len(self.token_ids),
            "ttft_ms": round(self.ttft_ms, 3),
            "tpot_p50_ms": _rounded(self.percentile(0.5)),
            "tpot_p99_ms": _rounded(self.percentile(0.99)),
            "kv_bytes": self.facts["kv_bytes"][0],
            "transport": self.facts["transport"][0],
            "arrived_fraction": self.facts["arrived_fraction"][0],
            "exposed_ms": round(1e3 * self.facts["exposed_s"][0], 3),
            "equal_to_mono": self.equal_to_mono,
        }


def run(model: str, transport: str, max_tokens: int, json_file: str | None) -> int:
    """Run the demo; returns 0 only if every answer came and equals the single process's.

    SIGTERM ends it as SIGINT does: with the server stopped and nothing left behind.
    """
    if json_file:
        _write(json_file, "a", [])  # refused now rather than when all is done
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        return _run(model, transport, max_tokens, json_file)
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: types.FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough: the server is being stopped
    raise KeyboardInterrupt


def _write(path: str, mode: str, lines: Sequence[str]) -> None:
    try:
        with open(path, mode, encoding="utf-8") as file:
            file.writelines(lines)
    except OSError as error:
        raise IoError(f"--json {path}: {error.strerror}") from error


def _run(model: str, transport: str, max_tokens: int, json_file: str | None) -> int:
    console = Console()
    with console.status(f"model {model}: looking, fetching and converting it if needed"):
        hub.resolve(model)
    flags = ["--transport", transport]
    with _serving(model, ["--prefill", "1", "--decode", "1", *flags], 2, console) as ask:
        console.print("A router, one prefill worker and one decode worker are ready.")
        results = _ask_all(ask, max_tokens, console.print)
    with _serving(model, ["--mono", "1"], 1, console) as ask:
        console.print("The same prompts on one worker that does both ...")
        alone = _ask_all(ask, max_tokens, lambda *text, **style: None)
    for result, other in zip(results, alone, strict=True):
        result.equal_to_mono = result.token_ids == other.token_ids
    console.print(_table(results))
    console.print(f"\n{_compare(results, alone)}")
    if json_file:
        _write(json_file, "w", [json.dumps(result.record()) + "\n" for result in results])
    problems = _problems(results, transport)
    for problem in problems:
        console.print(f"[red]not well:[/red] {problem}")
    if not problems:
        console.print("[green]All is well.[/green]")
    return 1 if problems else 0


def _problems(results: Sequence[Result], transport: str) -> list[str]:
    found = []
    for result in results:
        record = result.record()
        if not result.equal_to_mono:
            found.append(f"{result.name}: the answer is not the one of a single process")
        if record["transport"] != transport:
            found.append(f"{result.name}: came over {record['transport'] or 'no transport'}")
        if not record["kv_bytes"] or record["arrived_fraction"] is None:
            found.append(f"{result.name}: no KV was handed over")
    first, again = results[1], results[2]
    if again.cached_tokens < 0.8 * first.prompt_tokens:
        found.append(f"{again.name}: only {again.cached_tokens} tokens found in the prefix index")
    return found


Ask = Callable[[str, str, int, Callable[[str], None]], Result]


def _ask_all(ask: Ask, max_tokens: int, show: Callable[..., None]) -> list[Result]:
    def part(piece: str) -> None:
        show(piece, end="", markup=False, highlight=False, soft_wrap=True)

    text = document()
    results = []
    prompts = [("short", SHORT)]
    prompts += [("document", text + "\n\n" + QUESTIONS[0])]
    prompts += [("again", text + "\n\n" + QUESTIONS[1])]
    for (name, prompt), question in zip(prompts, (SHORT, *QUESTIONS), strict=True):
        show(f"\n[bold]{name}:[/bold] {question}", highlight=False)
        results.append(ask(name, prompt, max_tokens, part))
        show("")
    show(f"\n[bold]{len(EIGHT)} at once[/bold]")
    with _pool(len(EIGHT)) as pool:
        jobs = [
            pool.submit(ask, f"at once {i + 1}", prompt, max_tokens, lambda piece: None)
            for i, prompt in enumerate(EIGHT)
        ]
        for prompt, job in zip(EIGHT, jobs, strict=True):
            results.append(job.result())
            answer = " ".join(results[-1].text.split())
            show(f"- {prompt} {answer}", markup=False, highlight=False)
    return results


@contextlib.contextmanager
def _pool(size: int) -> Iterator[ThreadPoolExecutor]:
    """Threads whose answers are not waited for when the demo is interrupted."""
    pool = ThreadPoolExecutor(size)
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


@contextlib.contextmanager
def _serving(model: str, flags: list[str], count: int, console: Console) -> Iterator[Ask]:
    """``kvcore serve`` as a process of its own on a free port; stopped at the end."""
    argv = [sys.executable, "-m", "kvcore", "serve", model, "--port", "0", *flags]
    argv += ["--config", os.devnull, "--kv-bytes", _KV_BYTES, "--parent-pid", str(os.getpid())]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        server = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True
        )
        try:
            url = _wait_ready(server, count, console)
            name = str(_get(url, "/v1/models")["data"][0]["id"])
            yield lambda *request: _ask(url, name, *request)
        except (OSError, http.client.HTTPException, DemoFailed) as error:
            raise DemoFailed(f"{error}\n{_tail(log)}") from error
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(15)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _wait_ready(server: subprocess.Popen[str], count: int, console: Console) -> str:
    """The server's URL, once its workers are there."""
    assert server.stdout is not None
    words = server.stdout.readline().split()
    if not words:
        raise DemoFailed(f"the server ended with exit code {server.wait()}")
    url, end = words[-1], time.monotonic() + _READY_S
    with console.status("starting") as status:
        while True:
            there = sum(_get(url, "/health")["workers"].values())
            if there >= count:
                return url
            status.update(f"{url}: {there} of {count} workers ready")
            if server.poll() is not None:
                raise DemoFailed(f"the server ended with exit code {server.returncode}")
            if time.monotonic() > end:
                raise DemoFailed(f"the workers were not ready within {_READY_S:g} s")
            time.sleep(0.1)


def _tail(log: IO[str]) -> str:
    log.seek(0)
    return "".join(log.readlines()[-20:])


def _connect(url: str) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(urlsplit(url).netloc, timeout=_REQUEST_S)


def _get(url: str, path: str) -> Any:
    connection = _connect(url)
    with contextlib.closing(connection):
        connection.request("GET", path)
        return json.loads(connection.getresponse().read())


def _ask(
    url: str, model: str, name: str, prompt: str, max_tokens: int, show: Callable[[str], None]
) -> Result:
    """Stream one chat answer, noting when each token came."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    connection = _connect(url)
    with contextlib.closing(connection):
        start = time.perf_counter()
        connection.request("POST", "/v1/chat/completions", json.dumps(body))
        response = connection.getresponse()
        if response.status != 200:
            raise DemoFailed(f"{name}: status {response.status}: {response.read(500)!r}")
        return _read(name, _events(name, response), start, show)


def _events(name: str, response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    while line := response.readline():
        if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
            event = json.loads(line[6:])
            if "error" in event:
                raise DemoFailed(f"{name}: {event['error']['message']}")
            yield event


def _read(
    name: str, events: Iterator[dict[str, Any]], start: float, show: Callable[[str], None]
) -> Result:
    ids: list[int] = []
    texts, times, last = [], [], {}
    for event in events:
        last = event
        for choice in event["choices"]:
            now = time.perf_counter()
            ids += choice["token_ids"]
            times += [now] * len(choice["token_ids"])
            texts.append(choice["delta"].get("content", ""))
            show(texts[-1])
    if not ids or "kvcore" not in last:
        raise DemoFailed(f"{name}: the answer broke off")
    usage = last["usage"]
    return Result(
        name=name,
        text="".join(texts),
        token_ids=ids,
        ttft_ms=1e3 * (times[0] - start),
        gaps_ms=[1e3 * (b - a) for a, b in itertools.pairwise(times)],
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        facts=last["kvcore"],
    )


def _table(results: Sequence[Result]) -> Table:
    table = Table(
        title="What happened",
        caption="index: found in the prefix index; arrived: share of the KV that was there when "
        "prefill ended; as one process: token for token the answer of a single process",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column("request", no_wrap=True)
    headings = ["prompt\ntokens", "in\nindex", "TTFT\nms", "TPOT\np50 ms", "TPOT\np99 ms"]
    headings += ["KV\nMB", "over", "arrived", "as one\nprocess"]
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        record = result.record()
        arrived = record["arrived_fraction"]
        table.add_row(
            result.name,
            str(result.prompt_tokens),
            str(result.cached_tokens),
            f"{result.ttft_ms:.0f}",
            _shown(result.percentile(0.5)),
            _shown(result.percentile(0.99)),
            f"{record['kv_bytes'] / 1e6:.2f}",
            record["transport"],
            "-" if arrived is None else f"{100 * arrived:.1f} %",
            "[green]equal[/green]" if result.equal_to_mono else "[red]differs[/red]",
        )
    return table


def _compare(results: Sequence[Result], alone: Sequence[Result]) -> str:
    """Two workers against one, in the words of the table."""

    def line(label: str, group: Sequence[Result]) -> str:
        gaps = sorted(gap for result in group[3:] for gap in result.gaps_ms)
        ttft = statistics.median(result.ttft_ms for result in group[3:])
        p99 = gaps[round(0.99 * (len(gaps) - 1))] if gaps else 0.0
        return (
            f"{label}: document TTFT {group[1].ttft_ms:.0f} ms, again {group[2].ttft_ms:.0f} ms; "
            f"eight at once: median TTFT {ttft:.0f} ms, TPOT p99 {p99:.1f} ms"
        )

    return "\n".join((line("two workers", results), line("one process", alone)))


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
