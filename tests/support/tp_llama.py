"""A rank of a random Llama under tensor parallelism, and a process around it that prefills or
decodes over real pages: `python tp_llama.py '{"role": ...}'`, one JSON line in and out per step.

The simplest split: query, key and value heads by rank, columns of the output and down projections
with a sum over ranks (gloo), the rest replicated. Pages are f32, so that sums in another order move
no token.
"""

from __future__ import annotations

import json
import os
import select
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from kvcore import kernels, stream
from kvcore.pages import PageSpec, Pool
from kvcore.stream import Share, Side, heads_of_rank, plan_shares
from torch import Tensor

KEY = b"tensor parallel tests, 32 bytes!"
LAYERS, VOCAB, CHUNK, PAGE = 2, 320, 64, 16


class Llama:
    """The layers of one rank; ``heads`` = (query heads, KV heads, head_dim) of the whole model."""

    def __init__(self, heads: Sequence[int], rank: int, degree: int) -> None:
        q_heads, kv_heads, self.dim = heads
        self.degree = degree
        begin, self.kv = heads_of_rank(kv_heads, degree, rank)
        self.side = Side(
            PageSpec(LAYERS, self.kv, self.dim, page_size=PAGE, format="f32"), 0, begin
        )
        group = q_heads // kv_heads
        self.q = self.kv * group
        hidden, inner = q_heads * self.dim, 12 * 32
        generator = torch.Generator().manual_seed(7)
        # Small embeddings, sharp attention, large outputs: what the pages hold decides the token.

        def weight(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, generator=generator) / columns**0.5

        self.embed = 0.3 * torch.randn(VOCAB, hidden, generator=generator)
        q = slice(begin * group * self.dim, (begin * group + self.q) * self.dim)
        kv = slice(begin * self.dim, (begin + self.kv) * self.dim)
        mlp = slice(rank * inner // degree, (rank + 1) * inner // degree)
        self.head = weight(VOCAB, hidden)
        self.layers = []
        for _ in range(LAYERS):
            wq, wk = 5 * weight(hidden, hidden)[q], weight(kv_heads * self.dim, hidden)[kv]
            wv = weight(kv_heads * self.dim, hidden)[kv]
            wo = 4 * weight(hidden, hidden)[:, q]
            up, down = weight(inner, hidden)[mlp], weight(hidden, inner)[:, mlp]
            self.layers.append((wq, wk, wv, wo, up, down))

    def _sum(self, x: Tensor) -> Tensor:
        if self.degree > 1:
            dist.all_reduce(x)
        return x

    def _rope(self, x: Tensor, positions: Tensor) -> Tensor:
        half = self.dim // 2
        angle = positions[:, None, None] * 10000.0 ** (-torch.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def forward(self, tokens: Sequence[int], first: int, step: stream.LayerStep) -> int:
        """The likeliest next token; K and V go to the step's pages."""
        x = self.embed[list(tokens)]
        positions = torch.arange(first, first + len(tokens))
        for layer, (wq, wk, wv, wo, up, down) in enumerate(self.layers):
            h = torch.nn.functional.rms_norm(x, x.shape[-1:])
            q = self._rope((h @ wq.T).view(-1, self.q, self.dim), positions).contiguous()
            k = self._rope((h @ wk.T).view(-1, self.kv, self.dim), positions).contiguous()
            v, out = (h @ wv.T).contiguous(), torch.empty_like(q)
            step.run_ptr(
                layer, q.data_ptr(), self.q * self.dim, k.data_ptr(), self.kv * self.dim,
                v.data_ptr(), self.kv * self.dim, out.data_ptr(), 0, 0,
            )  # fmt: skip
            x = x + self._sum(out.flatten(1) @ wo.T)
            h = torch.nn.functional.rms_norm(x, x.shape[-1:])
            x = x + self._sum(torch.nn.functional.silu(h @ up.T) @ down.T)
        return int((torch.nn.functional.rms_norm(x[-1], x.shape[-1:]) @ self.head.T).argmax())


class Worker:
    """A rank with its pages; sends what it computes to ``senders``."""

    def __init__(self, heads: Sequence[int], rank: int, degree: int) -> None:
        self.model = Llama(heads, rank, degree)
        self.pool = Pool(self.model.side.spec, 16, huge_pages=False)
        self.plan = kernels.AttentionPlan(self.pool, self.model.q)
        self.pages = self.pool.alloc(16, run_pages=1)
        self.length = 0

    def run(self, tokens: Sequence[int], senders: Sequence[stream.Sender] = ()) -> int:
        """Appends tokens in chunks; the next one."""
        token = -1
        for begin in range(0, len(tokens), CHUNK):
            part = tokens[begin : begin + CHUNK]
            first, self.length = self.length, self.length + len(part)
            self.plan.prepare([0, len(part)], [self.length], [self.pages])
            step = stream.LayerStep(self.plan, [(sender, 0) for sender in senders])
            token = self.model.forward(part, first, step)
        return token

    def decode(self, token: int, count: int) -> list[int]:
        out = [token]
        while len(out) < count:
            out.append(self.run(out[-1:]))
        return out


def prefill(worker: Worker, setup: dict[str, Any]) -> None:
    """Sends every share that is this rank's, to each decode rank that has one."""
    with stream.Endpoint(worker.pool, key=KEY, head_begin=worker.model.side.head_begin) as endpoint:
        print(json.dumps({}), flush=True)
        work = json.loads(sys.stdin.readline())
        pages = worker.pages[: -(-len(work["tokens"]) // PAGE)]
        senders = [endpoint.open(bytes.fromhex(g), pages, share=i) for g, i in work["shares"]]
        token = worker.run(work["tokens"], senders)
        for sender in senders:
            sender.commit(str(token).encode())
        events: list[Any] = []
        while len(events) < len(senders) and select.select([endpoint.event_fd], [], [], 20)[0]:
            events += endpoint.poll()
        print(json.dumps({"events": [e[0] for e in events], "token": token}), flush=True)


def decode(worker: Worker, setup: dict[str, Any]) -> None:
    """Grants the prompt's pages, waits for all shares, decodes."""
    side = worker.model.side
    with stream.Endpoint(
        worker.pool, [setup["address"]], key=KEY, head_begin=side.head_begin
    ) as endpoint:
        senders = [
            Llama(setup["heads"], rank, setup["senders"]).side for rank in range(setup["senders"])
        ]
        plan = plan_shares(senders, side, setup["rank"])
        n = -(-setup["num_tokens"] // PAGE)
        grant = endpoint.grant(
            os.urandom(16), worker.pages[:n], setup["num_tokens"],
            shares=[Share(*share) for _, share in plan],
        )  # fmt: skip
        print(json.dumps({"grant": grant.hex(), "givers": [i for i, _ in plan]}), flush=True)
        select.select([endpoint.event_fd], [], [], 20)
        ((kind, _, payload, *_),) = endpoint.poll()
        worker.length = setup["num_tokens"]
        tokens = worker.decode(int(payload), setup["count"]) if kind == "complete" else []
        print(json.dumps({"event": kind, "tokens": tokens}), flush=True)


def main(setup: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    if setup["degree"] > 1:
        dist.init_process_group(
            "gloo", f"file://{setup['group']}", rank=setup["rank"], world_size=setup["degree"]
        )
    worker = Worker(setup["heads"], setup["rank"], setup["degree"])
    (prefill if setup["role"] == "prefill" else decode)(worker, setup)
    if setup["degree"] > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
