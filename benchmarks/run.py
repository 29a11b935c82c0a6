"""Benchmarks: ``python benchmarks/run.py [--list] [--case NAME] [--quick] [--peer NAME=PYTHON]``.

One JSON object a line on standard output (fields: harness.Result). Peers are other systems in
virtual environments of their own; ``--peer vllm=/path/to/python`` runs vLLM in model_step, and the
attention operators of vLLM and SGLang in decode_attention and prefill_attention; ``--peer
mooncake=...`` its Transfer Engine, and ``nixl=...`` NIXL, in link_tcp and link_tcp_small.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from harness import ROOT, Context, Result, commit, use_clock

CASES = {
    "accuracy": "divergence of the next token on real text over compressed pages, against its gate",
    "capacity": "long sequences held at once and tokens/s under each KV profile, against exact",
    "decode_attention": "one query row over a long context, against the linear read limit",
    "decode_format": "decoding over compressed pages, against linear read and bf16 pages",
    "prefill_attention": "causal chunks over a long context, against the multiply-add peak",
    "encode": "pages into int8, fp8, k4, v4, v3 and back, against copying the same bytes",
    "op_overhead": "a call through torch.ops.kvcore, against an operator that does nothing",
    "head_pages": "decoding over a ragged quarter of a sequence's tokens, and over the whole of it",
    "seal": "open pages of whole models into the compressed ones of each KV profile",
    "prefix_hit": "time to a first token over a cached document, against its rest alone",
    "prefix_lookup": "match and pin a cached prefix, microseconds",
    "shared_prefix": "decoding 32 sequences over one cached prompt, together and one by one",
    "page_bounds": "bounds of pages for query-aware selection, against attention over the page",
    "page_scores": "decoding with the attention mass of each page, against without",
    "link_tcp": "1024 scattered blocks of 64 KiB over tcp, against raw TCP",
    "link_tcp_small": "256 scattered blocks of 4 KiB over tcp, against raw TCP",
    "link_priority": "p99 of a class 0 write under saturating background traffic, against idle",
    "handover": "3,000 tokens lent over shm: microseconds from request to usable pages",
    "link_shm": "scattered blocks of 64 and 256 KiB over shm, against copying them",
    "stream_overlap": "KV arrived when prefill ends, and time exposed after, over shm and tcp",
    "wire_encode": "pages encoded on their way to k4 + v4: bytes sent, and prefill slowed by it",
    "incast": "eight senders to one shaped port: goodput, fairness, bytes under way",
    "peer_death": "SIGKILL at each step of a hand-over: time until told, pages back, no stamp",
    "model_step": "a decode step and a cold first token of SmolLM2, against peers on one thread",
}
PEERS = ("vllm", "mooncake", "nixl")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--list", action="store_true", help="name the cases and stop")
    parser.add_argument("--case", action="append", choices=sorted(CASES), help="may be repeated")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller repetitions")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--model", help="model of model_step: directory, GGUF file or name")
    parser.add_argument("--dtype", choices=("bf16", "f16", "f32"), default="bf16", help="of pages")
    parser.add_argument(
        "--shape", action="append", default=[], metavar="Q/KVxDIM:AxB",
        help="heads, then batch x context (decode) or chunk x context (prefill); may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--page", action="append", type=int, default=[], choices=(16, 32, 64, 128),
        help="decode_format: tokens of a page; may be repeated",
    )  # fmt: skip
    parser.add_argument("--threads", action="append", type=int, default=[], help="may be repeated")
    parser.add_argument(
        "--path", choices=("kernel", "simulate"), default="kernel",
        help="accuracy: attention over sealed pages, or their numbers written back into bf16 pages",
    )  # fmt: skip
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu: without the time others took"
    )
    parser.add_argument(
        "--save", type=Path, metavar="DIR", help="also add the lines to a file there"
    )
    return parser.parse_args()


def peers_of(arguments: list[str]) -> dict[str, str]:
    """``NAME=PYTHON`` pairs, checked."""
    peers = {}
    for argument in arguments:
        name, _, python = argument.partition("=")
        if name not in PEERS or not Path(python).exists():
            raise SystemExit(f"--peer {argument}: wanted NAME=PYTHON with NAME one of {PEERS}")
        peers[name] = python
    return peers


def results(args: argparse.Namespace) -> Iterator[Result]:
    """Every result of the chosen cases, as it comes."""
    context = Context(
        args.quick,
        peers_of(args.peer),
        args.model,
        args.dtype,
        tuple(args.shape),
        tuple(args.threads),
        args.path,
        tuple(args.page),
    )
    for name in args.case or CASES:
        run: Callable[[Context], Iterator[Result]] = importlib.import_module(f"cases.{name}").run
        yield from run(context)


def main() -> None:
    args = parse()
    if args.list:
        for name, text in CASES.items():
            print(f"{name:20} {text}")
        return
    use_clock(args.clock)
    lines = []
    for result in results(args):
        lines.append(json.dumps(result.as_dict()))
        print(lines[-1], flush=True)
    if args.save:
        day = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
        args.save.mkdir(parents=True, exist_ok=True)
        target = args.save / f"{day}-{commit()}.jsonl"
        with target.open("a") as file:  # cases run one by one share it
            file.write("\n".join(lines) + "\n")
        print(f"written: {target.relative_to(ROOT) if target.is_relative_to(ROOT) else target}",
              file=sys.stderr)  # fmt: skip


if __name__ == "__main__":
    main()
