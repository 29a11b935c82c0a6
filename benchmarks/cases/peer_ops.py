"""Attention operators of other systems, asked in turn with ours (``--peer vllm=PYTHON``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness import Context, clock_name
from peers import Peer
from workloads import Heads

SYSTEMS = {  # by peer: its operators' names
    "vllm": {"vllm": "vLLM cpu_attention_with_kv_cache", "sgl": "SGLang CPU attention"},
}


class PeerOps:
    """The peers of one number of threads; ended with the ``with`` block."""

    def __init__(self, context: Context, threads: int) -> None:
        python = context.peers.get("vllm") if context.dtype == "bf16" else None
        self.peer = Peer("vllm_ops.py", python, "--threads", str(threads)) if python else None

    def __enter__(self) -> PeerOps:
        return self

    def __exit__(self, *_: object) -> None:
        if self.peer:
            self.peer.close()

    def timed(self, heads: Heads, request: dict[str, Any]) -> dict[str, Callable[[], float]]:
        """Seconds of one pass by operator name; empty without a peer."""
        if self.peer is None:
            return {}
        known = {**request, "heads": [heads.q, heads.kv, heads.dim], "clock": clock_name()}
        return {
            f"{name} ({self.peer.info['version']})": lambda system=system: self._ask(system, known)
            for system, name in SYSTEMS["vllm"].items()
        }

    def _ask(self, system: str, request: dict[str, Any]) -> float:
        assert self.peer is not None
        return float(self.peer.ask({**request, "system": system})["seconds"])
