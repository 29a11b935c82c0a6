"""vLLM's CPU build as a peer: answers timing requests on standard input, one JSON object a line.

Run by the interpreter of vLLM's own virtual environment, started by ``run.py --peer vllm=PYTHON``:
    -> {"op": "decode", "batch": 8, "prompt": 128, "steps": 32}   <- {"seconds": per step}
    -> {"op": "ttft", "prompt": 1024, "shared": 0}                <- {"seconds": to the first token}
    -> {"op": "info"}                                             <- {"name", "version", "threads"}
``"clock": "cpu"`` in a request asks for CPU seconds of this process instead of wall seconds.
``shared`` leading tokens are the same in every request, so that the prefix cache holds them.
Needs nothing of kvcore.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from typing import Any

VOCABULARY = range(100, 49_000)


def serve(model: str, threads: int, eager: bool) -> None:
    """Load the model and answer until standard input ends."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    cores = sorted(os.sched_getaffinity(0))[-threads:]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    os.environ["OMP_NUM_THREADS"] = str(threads)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the engine prints must not mix with replies
    import torch
    import vllm

    engine = vllm.LLM(
        model,
        dtype="bfloat16",
        max_model_len=8192,
        enforce_eager=eager,
        enable_prefix_caching=True,
        disable_log_stats=True,
    )
    peer = Peer(engine, vllm)
    info = {"name": "vllm", "version": vllm.__version__, "threads": torch.get_num_threads()}
    for line in sys.stdin:
        request = json.loads(line)
        reply = info if request["op"] == "info" else {"seconds": peer.measure(request)}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


class Peer:
    """Timings of one engine."""

    def __init__(self, engine: Any, vllm: Any) -> None:
        self.engine, self.vllm, self.rng = engine, vllm, random.Random(1)
        self.clock = time.perf_counter
        self.shared = [self.rng.choice(VOCABULARY) for _ in range(8192)]

    def measure(self, request: dict[str, Any]) -> float:
        """Seconds of one request (see the module's text)."""
        self.clock = time.process_time if request.get("clock") == "cpu" else time.perf_counter
        if request["op"] == "ttft":
            return self.generate([self.prompt(request["prompt"], request["shared"])], 1)
        prompts = [self.prompt(request["prompt"], 0) for _ in range(request["batch"])]
        steps = request["steps"]
        self.generate(prompts, 1)  # both timed runs find the prompt in the prefix cache
        short, long = self.generate(prompts, 1), self.generate(prompts, 1 + steps)
        return (long - short) / steps

    def prompt(self, length: int, shared: int) -> list[int]:
        """Token ids: ``shared`` that are always the same, then new ones."""
        new = [self.rng.choice(VOCABULARY) for _ in range(length - shared)]
        return self.shared[:shared] + new

    def generate(self, prompts: list[list[int]], tokens: int) -> float:
        """Seconds to generate exactly ``tokens`` for every prompt, greedy."""
        inputs = [{"prompt_token_ids": p} for p in prompts]
        sampling = self.vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        start = self.clock()
        self.engine.generate(inputs, sampling, use_tqdm=False)
        return self.clock() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="Hugging Face directory")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--eager", action="store_true", help="without compilation")
    args = parser.parse_args()
    serve(args.model, args.threads, args.eager)


if __name__ == "__main__":
    main()
