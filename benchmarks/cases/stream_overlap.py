"""How much of the KV has arrived when prefill ends, and what the hand-over adds after it.

A prompt in SmolLM2's geometry is prefilled in chunks: per layer the real append, publish and
attend, then a pause up to the layer's fixed time. A second process receives the pages over shm or
tcp, the link paced at 2x, 1.1x, 1x and 0.5x the mean rate at which the prefill produces KV; then
over tcp between two network namespaces whose veth pair the kernel shapes (tc tbf) to carry payload
at those rates, the link unpaced. Two lines each: the fraction that had arrived when the last
attention ended, and the time from the end of prefill until the sequence was complete, in layer
times. What is wanted holds from 1.1x on; a slower link cannot carry more than its share, so less is
wanted there.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from harness import ROOT, Context, Result, median, percentile
from kvcore import kernels, stream
from kvcore.pages import PageClass, PageSpec, Pool

sys.path.insert(0, str(ROOT / "tests"))

from support import netns

SPEC = dict(num_layers=30, num_kv_heads=3, head_dim_k=64, page_size=64)
Q_HEADS = 9
FRAMES = 20  # 3,000 tokens and room to spare
CHUNK = 512
LAYER_S = 0.02  # of one chunk, most of it projections and MLP: idle here
LEAST_ARRIVED = 0.97  # where the link carries LEAST_PACING of what is produced
LEAST_PACING = 1.1
MOST_LAYER_TIMES = 2.0
KEEPALIVE_S = 30.0  # a busy machine may stop a process for seconds
WIRE_SHARE = 1448 / 1514  # payload of a full packet on a veth, where tbf counts the whole of it
# A packet that the kernel cuts only later (GSO) has up to 64 KiB; the queue holds what may be under
# way, so that nothing is dropped.
BURST, QUEUE = 128 << 10, 24 << 20
KEY = b"benchmark key, 32 bytes in all.."


class Receiver:
    """The decode side, in its own process."""

    def __init__(self, address: str, network: netns.Network | None = None) -> None:
        command = [sys.executable, __file__, address]
        options: dict[str, Any] = dict(
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        if network is None:
            self.process = subprocess.Popen(command, text=True, **options)
        else:
            self.process = network.popen("decode", command, **options)

    def ask(self, **command: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(10)


def alloc(pool: Pool, num_pages: int, encode: bool) -> list[int]:
    """Open pages, or all but the first and the last of k4 + v4."""
    if not encode:
        return pool.alloc(num_pages)
    spec = pool.spec
    formats = [[("k4", "v4")] * spec.num_kv_heads] * spec.num_layers
    number = pool.add_class(PageClass(spec, formats))
    first, last = pool.alloc(2, run_pages=1)
    return [first, *pool.alloc_in_class(num_pages - 2, number), last]


def serve(address: str) -> None:
    """Grants and waits, one hand-over at a time."""
    pool = Pool(PageSpec(**SPEC), FRAMES)
    endpoint = stream.Endpoint(pool, [address], key=KEY, keepalive_s=KEEPALIVE_S)
    for line in sys.stdin:
        command = json.loads(line)
        if "tokens" in command:
            n = -(-command["tokens"] // pool.spec.page_size)
            pages = alloc(pool, n, command.get("encode", False))
            grant = endpoint.grant(os.urandom(16), pages[:n], command["tokens"])
            answer: dict[str, Any] = {"grant": grant.hex()}
        else:
            select.select([endpoint.event_fd], [], [], 30)
            ((kind, _, *rest),) = endpoint.poll()
            if kind != "complete":
                raise SystemExit(f"{kind}: {rest}")
            answer = vars(rest[1])
            pool.decref(pages)
        print(json.dumps(answer), flush=True)
    endpoint.close()


class Prefill:
    """The sending side: chunks of one prompt through an attention plan."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.pool = Pool(PageSpec(**SPEC), FRAMES)
        self.pages = list(self.pool.alloc(-(-tokens // self.pool.spec.page_size)))
        self.plan = kernels.AttentionPlan(self.pool, Q_HEADS)
        rng = np.random.default_rng(1)
        self.q = rng.standard_normal((CHUNK, Q_HEADS, 64), dtype=np.float32)
        self.k, self.v = rng.standard_normal((2, CHUNK, 3, 64), dtype=np.float32)
        self.out = np.empty_like(self.q)

    def rest_of_layer(self, due: float) -> None:
        """Projections and MLP: idle here."""
        time.sleep(max(0.0, due - time.perf_counter()))

    def run(self, sender: stream.Sender | None) -> float:
        """Prefills the prompt; seconds until its last layer's attention ended."""
        due = start = time.perf_counter()
        done = 0
        while done < self.tokens:
            n = min(CHUNK, self.tokens - done)
            done += n
            self.plan.prepare([0, n], [done], np.array([self.pages], np.int32))
            step = stream.LayerStep(self.plan, [(sender, 0)] if sender else [])
            for layer in range(SPEC["num_layers"]):
                step.run_ptr(
                    layer, self.q.ctypes.data, Q_HEADS * 64, self.k.ctypes.data, 192,
                    self.v.ctypes.data, 192, self.out.ctypes.data, 0, 0,
                )  # fmt: skip
                ended = time.perf_counter()
                due += LAYER_S
                self.rest_of_layer(due)
        return ended - start


def hand_over(
    receiver: Receiver, endpoint: stream.Endpoint, prefill: Prefill, encode: bool = False,
    cached: bool = False,
) -> Any:  # fmt: skip
    """One prompt; the receiver's accounting of it, and the seconds of its prefill (0: cached)."""
    grant = bytes.fromhex(receiver.ask(tokens=prefill.tokens, encode=encode)["grant"])
    n = -(-prefill.tokens // SPEC["page_size"])
    sender = endpoint.open(grant, prefill.pages[:n])
    seconds = 0.0
    if cached:
        sender.push_cached_upto(prefill.tokens)
    else:
        seconds = prefill.run(sender)
    sender.commit(b"token")
    stats = receiver.ask()
    endpoint.poll()
    return {**stats, "prefill_s": seconds}


@contextlib.contextmanager
def paced(prefill: Prefill, receiver: Receiver, rate: int) -> Iterator[stream.Endpoint]:
    """An endpoint whose links are paced by their own token bucket; 0 = not at all."""
    options: dict[str, Any] = dict(key=KEY, pacing_bytes_per_s=rate, keepalive_s=KEEPALIVE_S)
    with stream.Endpoint(prefill.pool, **options) as endpoint:
        hand_over(receiver, endpoint, prefill, cached=True)  # connects
        yield endpoint


class Shaped:
    """The same behind a veth pair whose rate the kernel shapes."""

    def __init__(self, network: netns.Network) -> None:
        self.network = network

    @contextlib.contextmanager
    def __call__(
        self, prefill: Prefill, receiver: Receiver, rate: int
    ) -> Iterator[stream.Endpoint]:
        with self.network.inside("prefill"):
            endpoint = stream.Endpoint(prefill.pool, key=KEY, keepalive_s=KEEPALIVE_S)
        with endpoint:
            wire = rate / WIRE_SHARE
            for _ in range(2):  # the first tells what our own frames cost, and connects
                self.network.shape("decode", wire, QUEUE, BURST)
                stats = hand_over(receiver, endpoint, prefill, cached=True)
                carried = stats["bytes"] / (stats["last_ns"] - stats["commit_ns"]) * 1e9
                wire *= rate / carried
            yield endpoint


def measure(
    receiver: Receiver, prefill: Prefill, rounds: int, pacings: tuple[float, ...], shaped_by: str,
    way: Callable[[Prefill, Receiver, int], contextlib.AbstractContextManager[stream.Endpoint]],
) -> Iterator[Result]:  # fmt: skip
    """Both lines of every pacing over one link."""
    steps = -(-prefill.tokens // CHUNK) * SPEC["num_layers"]
    pages = -(-prefill.tokens // SPEC["page_size"])
    kv_bytes = pages * SPEC["num_layers"] * prefill.pool.spec.slice_bytes
    prefill.run(None)
    for pacing in pacings:
        rate = int(pacing * kv_bytes / (steps * LAYER_S))
        with way(prefill, receiver, rate) as endpoint:
            stats = [hand_over(receiver, endpoint, prefill) for _ in range(rounds)]
        arrived = [s["arrived_fraction"] for s in stats]
        exposed = [s["exposed_s"] for s in stats]
        seconds = median([s["prefill_s"] for s in stats])
        layer_s = seconds / steps
        params = {
            "transport": stats[0]["transport"],
            "shaped_by": shaped_by,
            "pacing": pacing or "none",
            "pacing_met": round(rate * seconds / kv_bytes, 2) or "none",
            "tokens": prefill.tokens,
            "layer_ms": round(layer_s * 1e3, 2),
            "production_mb_s": round(kv_bytes / seconds / 1e6, 1),
            "least_arrived": round(min(arrived), 4),
        }
        wanted = LEAST_ARRIVED * min(1.0, (pacing or LEAST_PACING) / LEAST_PACING)
        common: dict[str, Any] = dict(
            case="stream_overlap", median=median(exposed), p99=percentile(exposed, 99),
            best=min(exposed), bytes=kv_bytes, flops=0, isa=kernels.isa(), threads=1,
            repetitions=rounds,
        )  # fmt: skip
        yield Result(
            params=params, value=median(arrived), unit="fraction arrived",
            limit_name="wanted at least", limit=wanted,
            ratio=median(arrived) / wanted, best_ratio=max(arrived) / wanted,
            **common,
        )  # fmt: skip
        times = [e / layer_s for e in exposed]
        yield Result(
            params=params, value=median(times), unit="layer times exposed",
            limit_name="allowed at most", limit=MOST_LAYER_TIMES,
            ratio=MOST_LAYER_TIMES / median(times), best_ratio=MOST_LAYER_TIMES / min(times),
            **common,
        )  # fmt: skip
    receiver.close()


def run(context: Context) -> Iterator[Result]:
    """Lines of every link and pacing."""
    # Two chunks at least: of one, the last layer alone is 1/30 and cannot have arrived in time.
    prefill = Prefill(2 * CHUNK)
    pacings = (0.0, 1.1) if context.quick else (0.0, 2.0, 1.1, 1.0, 0.5)
    rounds = context.rounds(5, 1)
    with tempfile.TemporaryDirectory() as directory:
        for address in (f"shm:{Path(directory)}/s.sock", "tcp:127.0.0.1:0"):
            yield from measure(Receiver(address), prefill, rounds, pacings, "link", paced)
    if why := netns.missing():
        print(f"stream_overlap: no lines shaped by tbf: {why}", file=sys.stderr)
        return
    with netns.Network(["prefill", "decode"]) as network:
        receiver = Receiver(f"tcp:{network.address['decode']}:0", network)
        yield from measure(receiver, prefill, rounds, pacings[1:], "tbf", Shaped(network))


if __name__ == "__main__":
    serve(sys.argv[1])
