"""Incast: many senders, each on a host of its own, write to one receiver behind one shaped port.

Each role is a process (``python incast.py receiver|sender ...``) that is told by JSON lines. The
receiver counts what lands from whom; each sender keeps writes posted until it is stopped, and
knows how much of them was under way at most: sent, and not landed yet. Their sum is what the
receiver, and the network before it, had to hold for them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from kvcore.transport import Link, Transport

from support.netns import Network

KEY = b"incast test key, 32 bytes in all"
SLOT = 8 << 20  # of the receiver's region, for each sender
WRITE = 64 << 10
POSTED = 96  # writes of each sender
MTU_SHARE = 1448 / 1514  # payload of a full packet
MOMENT_S = 0.02
SWITCH_QUEUE = 8 << 20  # more than the credits: then nothing is dropped
# What a sender may have under way beyond its share of the credits: a write counts until all of it
# has landed, and no window is below 64 KiB.
SLACK = WRITE + (64 << 10)
CONGESTION_CONTROL = "reno"  # always there, and bound by the window; named, since hosts differ


def resident_bytes(field: str = "VmRSS") -> int:
    """Of this process, now or (VmHWM) at most since :func:`forget_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"/proc/self/status names no {field}")


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


class Receiver:
    """Grants a slot to each sender and polls; commands: links, reset, window, check."""

    def __init__(self, address: str, senders: int, credit_bytes: int) -> None:
        self.transport = Transport(key=KEY, credit_bytes=credit_bytes)
        self.region = self.transport.allocate(senders * SLOT)
        self.region.data[:] = bytes(len(self.region.data))
        grants = [self.region.grant([(i * SLOT, SLOT)]).token.hex() for i in range(senders)]
        self.hello = {"address": self.transport.listen(address), "grants": grants}
        self.taken: list[Link] = []
        self.lost: list[str] = []
        self.stop = threading.Event()
        self.poller = threading.Thread(target=self.poll)

    def poll(self) -> None:
        while not self.stop.is_set():
            self.transport._pump()
            while (link := self.transport._next_accepted()) is not None:
                self.taken.append(link)
            for link in self.taken:
                while link._arrivals:
                    arrival = link._arrivals.popleft()
                    if isinstance(arrival, Exception):
                        self.lost.append(repr(arrival))
            time.sleep(0.002)

    def links(self) -> int:
        return len(self.taken)

    def landed(self) -> dict[int, int]:
        """Payload bytes by sender, which names itself by its identity."""
        infos = [link.info() for link in self.taken if link._down is None]
        return {int(i["peer_identity"]): int(i["bytes_in"]) for i in infos}

    def window(self, seconds: float) -> dict[str, Any]:
        """What landed from each sender in this time, and the memory it took."""
        forget_peak()
        before, start, memory = self.landed(), time.monotonic(), resident_bytes()
        time.sleep(seconds)
        after, end = self.landed(), time.monotonic()
        return {
            "bytes": [after[s] - before[s] for s in sorted(after) if s in before],
            "seconds": end - start,
            "grown_bytes": resident_bytes("VmHWM") - memory,
            "lost": self.lost,
        }

    def check(self) -> list[int]:
        """Senders whose slot does not hold what they write."""
        return [
            i
            for i in range(len(self.region.data) // SLOT)
            if bytes(self.region.data[i * SLOT : i * SLOT + POSTED * WRITE])
            != bytes([i + 1]) * (POSTED * WRITE)
        ]


def receive(address: str, senders: str, credit_bytes: str) -> None:
    receiver = Receiver(address, int(senders), int(credit_bytes))
    receiver.poller.start()
    _say(receiver.hello)
    for line in sys.stdin:
        command = json.loads(line)
        _say(getattr(receiver, command.pop("do"))(**command))
    receiver.stop.set()
    receiver.poller.join()
    receiver.transport.close()


def at_once(senders: Iterable[list[tuple[int, int]]]) -> int:
    """The most that all had under way in one moment; each gives (moment, its most in it)."""
    total: Counter[int] = Counter()
    for moments in senders:
        total.update(dict(moments))
    return max(total.values())


def under_way(link: Link) -> int:
    """Bytes that have left and are not known to have landed: by the link's counts of one moment."""
    for _ in range(20):
        before, now = link.info(), link.info()
        if before["queued_bytes"] == now["queued_bytes"]:  # nothing left between the two looks
            return int(now["outstanding_ops"]) * WRITE - int(now["queued_bytes"])
    return 0


def send(address: str, number: str, grant: str) -> None:
    """Writes until standard input ends; says what was under way, since its first line, and when."""
    transport = Transport(key=KEY, identity=number.encode())
    region = transport.allocate(WRITE)
    region.data[:] = bytes([int(number) + 1]) * WRITE
    link = transport.connect(address)
    link.wait_up(10)
    _say({"up": True})
    measured, over = threading.Event(), threading.Event()

    def listen() -> None:
        for _ in sys.stdin:
            measured.set()
        over.set()

    threading.Thread(target=listen, daemon=True).start()
    base = int(number) * SLOT
    writes, acked, posted = [], 0, 0
    most: dict[int, int] = {}
    while not over.is_set() or writes:
        while not over.is_set() and len(writes) < POSTED:
            place = base + posted % POSTED * WRITE
            writes.append(link.write(region, [(0, place, WRITE)], bytes.fromhex(grant)))
            posted += 1
        if measured.is_set():
            moment = int(time.monotonic() / MOMENT_S)
            most[moment] = max(most.get(moment, 0), under_way(link))
        ended = [op for op in writes if op.done]
        acked += sum(op.wait() for op in ended)
        writes = [op for op in writes if op not in ended]
        time.sleep(0.002)
    _say({"posted": posted * WRITE, "acked": acked, "under_way": sorted(most.items())})
    transport.close()


def _say(answer: Any) -> None:
    print(json.dumps(answer), flush=True)


@dataclass(frozen=True)
class Outcome:
    """Of one run.

    Attributes:
        rates: payload bytes per second that landed from each sender while all were sending.
        under_way_bytes: of all senders together at any moment: sent, and not known to have landed.
            A write counts until all of it has.
        grown_bytes: of the receiver's resident memory at most, in that time.
        lost: errors, bytes that were posted and did not land, slots with wrong contents.
        dropped: packets that the shaped queue refused (TCP sent them again).
    """

    rates: list[float]
    under_way_bytes: int
    grown_bytes: int
    lost: list[str]
    dropped: int

    @property
    def goodput(self) -> float:
        return sum(self.rates)

    @property
    def fairness(self) -> float:
        """Jain's index: 1 = all alike, 1/n = one has it all."""
        return self.goodput**2 / (len(self.rates) * sum(r * r for r in self.rates))


class Role:
    """A process on one of the hosts."""

    def __init__(self, network: Network, host: str, *arguments: str) -> None:
        self.process = network.popen(
            host,
            [sys.executable, __file__, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process of the incast ended: {self.process.wait()}")
        return json.loads(line)

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def ask(self, **command: Any) -> Any:
        self.tell(json.dumps(command))
        return self.read()

    def stop(self) -> None:
        """Its standard input ends."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def end(self) -> None:
        """However it stands."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@dataclass
class Incast:
    """A network with ``hosts`` senders whose receiver is reached at ``bytes_per_s`` on the wire.

    ``congestion_control``: of the senders' TCP.
    """

    hosts: int
    bytes_per_s: float
    queue_bytes: int
    credit_bytes: int
    congestion_control: str = CONGESTION_CONTROL

    def __post_init__(self) -> None:
        names = [f"sender{i}" for i in range(self.hosts)]
        self.network = Network(["receiver", *names])
        for name in names:
            self.network.set_congestion_control(name, self.congestion_control)
        self.network.shape("receiver", self.bytes_per_s, self.queue_bytes, 256 << 10)

    def close(self) -> None:
        self.network.close()

    def run(self, senders: int, seconds: float, settle_s: float = 1.0) -> Outcome:
        """The first ``senders`` hosts at once."""
        roles: list[Role] = []
        try:
            return self._run(senders, seconds, settle_s, roles)
        finally:
            for role in roles:
                role.end()

    def _run(self, senders: int, seconds: float, settle_s: float, roles: list[Role]) -> Outcome:
        dropped = self.network.dropped("receiver")
        address = f"tcp:{self.network.address['receiver']}:0"
        receiver = Role(self.network, "receiver", "receiver", address, str(senders),
                        str(self.credit_bytes))  # fmt: skip
        roles.append(receiver)
        hello = receiver.read()
        sending = []
        for i in range(senders):
            sending.append(Role(self.network, f"sender{i}", "sender", hello["address"], str(i),
                                hello["grants"][i]))  # fmt: skip
            roles.append(sending[-1])
        for role in sending:
            role.read()
        time.sleep(settle_s)
        for role in sending:
            role.tell("measure")
        seen = receiver.ask(do="window", seconds=seconds)
        for role in sending:
            role.stop()
        ends = [role.read() for role in sending]
        lost = list(seen["lost"])
        lost += [f"sender {i}: {e}" for i, e in enumerate(ends) if e["posted"] != e["acked"]]
        lost += [f"sender {i}: wrong bytes" for i in receiver.ask(do="check")]
        receiver.stop()
        return Outcome(
            [n / seen["seconds"] for n in seen["bytes"]],
            at_once(e["under_way"] for e in ends),
            seen["grown_bytes"],
            lost,
            self.network.dropped("receiver") - dropped,
        )


if __name__ == "__main__":
    {"receiver": receive, "sender": send}[sys.argv[1]](*sys.argv[2:])
