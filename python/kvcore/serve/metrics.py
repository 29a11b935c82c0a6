"""Prometheus metrics of the front and of the workers as the router sees them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvcore.router.state import Done, Worker

_TTFT = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 12.0, 30.0, 60.0)
_TPOT = (0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.2, 0.4, 1.0, 2.0)
_SHARE = (0.5, 0.8, 0.9, 0.95, 0.97, 0.99, 0.995, 0.999, 1.0)


class Snapshot:
    """The router's state at one scrape."""

    def __init__(
        self, workers: Iterable[Worker], running: int, waiting: int, counters: dict[str, int]
    ) -> None:
        self.workers = list(workers)
        self.running = running
        self.waiting = waiting
        self.counters = counters


class _RouterCollector(Collector):
    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterable[Metric]:
        snap = self._snapshot()
        yield GaugeMetricFamily("kvcore_requests_running", "requests at workers", snap.running)
        yield GaugeMetricFamily("kvcore_requests_waiting", "requests queued", snap.waiting)
        roles = GaugeMetricFamily("kvcore_workers", "live workers", labels=["role"])
        for role in ("prefill", "decode", "mono"):
            roles.add_metric([role], sum(w.role == role for w in snap.workers))
        yield roles
        events = GaugeMetricFamily("kvcore_router_events", "router counters", labels=["event"])
        for name, count in sorted(snap.counters.items()):
            events.add_metric([name], count)
        yield events
        stats = GaugeMetricFamily(
            "kvcore_worker_stat", "as reported by heartbeats", labels=["worker", "role", "stat"]
        )
        profiles = GaugeMetricFamily(
            "kvcore_kv_profile",
            "bytes of a sealed page over those of an open one, and the table in use",
            labels=["worker", "role", "profile", "table"],
        )
        for worker in snap.workers:
            labels = [worker.name, worker.role, worker.kv_profile, worker.kv_table]
            profiles.add_metric(labels, worker.stats.get("kv_page_share", 1.0))
            base = {"free_frames": worker.free_frames, "num_frames": worker.num_frames}
            base |= {"running": worker.running, "waiting": worker.waiting}
            for name, value in {**base, **worker.stats}.items():
                stats.add_metric([worker.name, worker.role, name], value)
        yield profiles
        yield stats


class Metrics:
    """All instruments, in a registry of their own. Called from the event loop only."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_RouterCollector(snapshot))

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(name, text, labels, registry=self._registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, buckets=buckets, registry=self._registry)

        self.ttft = histogram("kvcore_ttft_seconds", "request to first token", _TTFT)
        self.tpot = histogram("kvcore_tpot_seconds", "time per following token", _TPOT)
        self.latency = histogram("kvcore_request_seconds", "request to last token", _TTFT)
        self.arrived = histogram("kvcore_arrived_fraction", "KV there at prefill end", _SHARE)
        self.exposed = histogram("kvcore_exposed_transfer_seconds", "wait for KV", _TPOT)
        self.prompt = counter("kvcore_prompt_tokens", "prompt tokens")
        self.cached = counter("kvcore_cached_prompt_tokens", "prompt tokens not computed")
        self.generated = counter("kvcore_generated_tokens", "answer tokens")
        self.kv_bytes = counter("kvcore_kv_bytes", "KV moved between workers", ("transport",))
        self.requests = counter("kvcore_requests", "HTTP requests", ("path", "status"))
        self.errors = counter("kvcore_errors", "refused or failed requests", ("code",))
        self.finished = counter("kvcore_finished", "answers by finish reason", ("reason",))
        self.disconnects = counter("kvcore_client_disconnects", "clients gone before the end")

    def render(self) -> bytes:
        """The text exposition."""
        return generate_latest(self._registry)


class RequestClock:
    """Times one answer: TTFT, then the mean gap of each batch of tokens."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._start = self._last = time.monotonic()
        self._first = True

    def tokens(self, count: int) -> None:
        """``count`` tokens came just now."""
        now = time.monotonic()
        self._metrics.generated.inc(count)
        if self._first and count:
            self._metrics.ttft.observe(now - self._start)
            self._first = False
            count -= 1
        for _ in range(count):
            self._metrics.tpot.observe((now - self._last) / count)
        self._last = now

    def done(self, done: Done) -> None:
        """The answer is complete."""
        metrics = self._metrics
        metrics.latency.observe(time.monotonic() - self._start)
        metrics.finished.labels(done.reason).inc()
        metrics.prompt.inc(done.prompt_tokens)
        metrics.cached.inc(done.cached_tokens)
        if done.transport:
            metrics.kv_bytes.labels(done.transport).inc(done.kv_bytes)
            metrics.exposed.observe(done.exposed_s)
        if done.arrived_fraction is not None:
            metrics.arrived.observe(done.arrived_fraction)
