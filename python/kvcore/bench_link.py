"""``kvcore bench link``: what the links between two processes or two hosts can do.

Side A serves, side B measures; both are this module. The two find each other by addresses alone
(``tcp:HOST:PORT``, ``shm:/path.sock``) and the pre-shared key. Each link gets a line: the round
trip of a message, the time of one small write until its completion, and the bandwidth of scattered
writes and reads in three block sizes. Figures are of this moment on this machine: memory of both
sides is touched first, and the first repetition of each is not counted.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kvcore.config import read_key_file
from kvcore.errors import InvalidArgument, KvcoreError, PeerDead, Timeout, Unauthenticated
from kvcore.transport import Link, Region, Transport

__all__ = ["LinkFigures", "measure", "run", "serve", "table"]

log = logging.getLogger("kvcore.bench")

REGION_BYTES = 64 << 20
BLOCKS_KIB = (4, 64, 1024)
_MOST_SEGMENTS = 1024  # of one operation
_PING, _BYE, _BUSY = b"ping", b"bye", b"busy"
_WAIT_S = 10.0
_IDLE_S = 30.0  # of side B; then the next may measure


class _Refused(PeerDead):
    """Side A answers, but not with what can be measured."""


@dataclass
class LinkFigures:
    """One measured link, or the reason why there are no figures.

    Attributes:
        address, scheme: of side A, and how the bytes moved.
        rtt_us_p50, rtt_us_p99: a message of 4 bytes there and back.
        write_us_p50, write_us_p99: one write of 4 KiB, from posting to its completion.
        write_gbps, read_gbps: GB/s (decimal) by block size in KiB, up to 1024 blocks at a time.
        error: why it could not be measured; the rest is 0 then.
    """

    address: str
    scheme: str = ""
    rtt_us_p50: float = 0.0
    rtt_us_p99: float = 0.0
    write_us_p50: float = 0.0
    write_us_p99: float = 0.0
    write_gbps: dict[int, float] = field(default_factory=dict)
    read_gbps: dict[int, float] = field(default_factory=dict)
    error: str = ""


def serve(addresses: Sequence[str], key: bytes, announce: Callable[[str], None]) -> None:
    """Side A: listens and answers one measuring side after the other, until interrupted.

    Args: announce: told each address as soon as it is listened on, port filled in.
    """
    with Transport(key=key, role="bench a") as transport:
        region = transport.allocate(REGION_BYTES)
        region.data[:] = bytes(REGION_BYTES)
        for address in addresses:
            announce(_listen(transport, address))
        measured: threading.Thread | None = None
        while True:
            link = transport.accept()
            if measured is not None:
                measured.join(1.0)  # it may just be at its last words
                if measured.is_alive():
                    link.send(_BUSY)
                    link.close()
                    continue
            log.info("measured by %s", link.info()["peer_address"])
            measured = threading.Thread(target=_answer, args=(link, region), daemon=True)
            measured.start()


def _listen(transport: Transport, address: str) -> str:
    try:
        return transport.listen(address)
    except InvalidArgument as error:
        raise InvalidArgument(f"--a {address}: {error}") from error


def _answer(link: Link, region: Region) -> None:
    with contextlib.suppress(KvcoreError):  # it has gone, or sleeps: the next one
        with region.grant(rights="rw") as grant:
            link.send(json.dumps({"token": grant.token.hex(), "bytes": region.nbytes}).encode())
            while (message := link.recv(_IDLE_S)) != _BYE:
                link.send(message)
        link.close()


def measure(address: str, key: bytes, repetitions: int = 5) -> LinkFigures:
    """Side B: the figures of the link to a side A at ``address``; never raises for the link."""
    figures = LinkFigures(address)
    try:
        with Transport(key=key, role="bench b") as transport:
            link = transport.connect(address)
            link.wait_up(_WAIT_S)
            _measure(transport, link, figures, repetitions)
    except KvcoreError as error:
        figures.error = _advice(address, error)
    return figures


def _advice(address: str, error: KvcoreError) -> str:
    if isinstance(error, Unauthenticated):
        return f"{error}; --key-file must hold the same 32 bytes on both sides"
    if isinstance(error, (PeerDead, Timeout)) and not isinstance(error, _Refused):
        return f"{error}; does `kvcore bench link --a ...` serve there, and is the way open?"
    return str(error)


def _measure(transport: Transport, link: Link, figures: LinkFigures, repetitions: int) -> None:
    token, nbytes = _granted(link.recv(_WAIT_S))
    region = transport.allocate(nbytes)
    region.data[:] = bytes(nbytes)
    figures.scheme = link.info()["scheme"]

    def ping() -> None:
        link.send(_PING)
        link.recv(_WAIT_S)

    def small_write() -> None:
        link.write(region, [(0, 0, 4096)], token).wait(_WAIT_S)

    figures.rtt_us_p50, figures.rtt_us_p99 = _percentiles(ping, 40 * repetitions)
    figures.write_us_p50, figures.write_us_p99 = _percentiles(small_write, 40 * repetitions)
    for kib in BLOCKS_KIB:
        segments = _blocks(nbytes, kib << 10)
        moved = sum(n for _, _, n in segments)

        def write(segments: list[tuple[int, int, int]] = segments) -> None:
            link.write(region, segments, token).wait(_WAIT_S)

        def read(segments: list[tuple[int, int, int]] = segments) -> None:
            link.read(region, segments, token).wait(_WAIT_S)

        figures.write_gbps[kib] = moved / _median(write, repetitions) / 1e9
        figures.read_gbps[kib] = moved / _median(read, repetitions) / 1e9
    link.send(_BYE)


def _granted(message: bytes) -> tuple[bytes, int]:
    """Token and size of side A's region."""
    if message == _BUSY:
        raise _Refused("side A is being measured by another process: try again when it has ended")
    try:
        granted = json.loads(message)
        return bytes.fromhex(granted["token"]), min(granted["bytes"], REGION_BYTES)
    except (ValueError, KeyError, TypeError) as error:
        text = f"its first message is {message[:40]!r}: no `kvcore bench link --a` serves there"
        raise _Refused(text) from error


def _blocks(nbytes: int, block: int) -> list[tuple[int, int, int]]:
    """Blocks spread over both regions, in opposite order: nothing is adjacent on both sides."""
    count = min(_MOST_SEGMENTS, nbytes // block)
    stride = nbytes // count // block * block
    return [(i * stride, (count - 1 - i) * stride, block) for i in range(count)]


def _seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _percentiles(work: Callable[[], None], repetitions: int) -> tuple[float, float]:
    """Median and 99th percentile in microseconds."""
    work()
    taken = sorted(_seconds(work) * 1e6 for _ in range(repetitions))
    return taken[len(taken) // 2], taken[min(len(taken) - 1, len(taken) * 99 // 100)]


def _median(work: Callable[[], None], repetitions: int) -> float:
    work()
    return sorted(_seconds(work) for _ in range(repetitions))[repetitions // 2]


@contextlib.contextmanager
def _other_process(addresses: Sequence[str], key_file: str) -> Iterator[list[str]]:
    """Side A in a process of its own; gives the addresses it listens on."""
    command = [sys.executable, "-m", "kvcore", "bench", "link"]
    for address in addresses:
        command += ["--a", address]
    if key_file:
        command += ["--key-file", key_file]
    environment = {"KVCORE_LOG": "warning", **os.environ}  # its errors, not its news
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        listening = []
        for _ in addresses:
            line = process.stdout.readline()
            if not line.startswith("listening on "):
                raise InvalidArgument(f"side A ended with code {process.wait()}, see above")
            listening.append(line.split()[-1])
        yield listening
    finally:
        process.terminate()
        process.wait()


def _usable(folder: str) -> list[str]:
    """An address of every link that two processes of this host can have."""
    addresses = [f"shm:{folder}/a.sock", "tcp:127.0.0.1:0"]
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        addresses.append("tcp:[::1]:0")
    return addresses


def run(a: Sequence[str], b: Sequence[str], key_file: str, as_json: bool, repetitions: int) -> int:
    """The command. With ``a`` alone it serves, with ``b`` alone it measures what serves there.

    With both, or neither, side A runs in a second process here; neither means every link that two
    processes of this host can have. Returns 1 when a link could not be measured.
    """
    key = read_key_file(key_file) if key_file else b""
    if a and not b:
        serve(a, key, lambda address: print(f"listening on {address}", flush=True))
        return 0
    if b and not a:
        return _show([measure(address, key, repetitions) for address in b], as_json)
    with (
        tempfile.TemporaryDirectory(prefix="kvcore-bench-") as folder,
        _other_process(a or _usable(folder), key_file) as listening,
    ):
        figures = [measure(address, key, repetitions) for address in b or listening]
    return _show(figures, as_json)


def _show(figures: Sequence[LinkFigures], as_json: bool) -> int:
    sys.stdout.write(
        json.dumps({"links": [_short(asdict(f)) for f in figures]}) if as_json else table(figures)
    )
    sys.stdout.write("\n")
    return 1 if any(f.error for f in figures) else 0


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    return round(value, 3) if isinstance(value, float) else value


def table(figures: Sequence[LinkFigures]) -> str:
    """The figures as text, a line a link; times in us, bandwidth in GB/s."""
    sizes = [f"{kib} KiB" for kib in BLOCKS_KIB]
    head = ["link", "rtt p50", "p99", "4 KiB write p50", "p99"]
    head += [f"write {s}" for s in sizes] + [f"read {s}" for s in sizes]
    rows = [
        [
            f.address,
            *(f"{v:.0f}" for v in (f.rtt_us_p50, f.rtt_us_p99, f.write_us_p50, f.write_us_p99)),
            *(f"{v:.2f}" for v in (*f.write_gbps.values(), *f.read_gbps.values())),
        ]
        for f in figures
        if not f.error
    ]
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in [head, *rows]
    ]
    if rows:
        lines.insert(0, "Times in us, bandwidth in GB/s.")
    else:
        lines = []
    return "\n".join([*lines, *(f"{f.address}: {f.error}" for f in figures if f.error)])
