"""What a call through ``torch.ops.kvcore`` costs beside the work itself.

One decode row over one token, so that the work is next to nothing: the operator's time less that of
the same plan called with addresses, next to an operator of the same schema that does nothing (or
makes its result's tensor). The second is torch's own part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from harness import Context, Result, interleave, seconds, time_result
from kvcore import kernels, ops
from kvcore.pages import PageSpec, Pool

CALLS = 2000
HEADS, DIM = 8, 128
SCHEMA_OUT = (
    "(Tensor q, Tensor k, Tensor v, Tensor(a!) arena, Tensor(b!) out, int step, int layer) -> ()"
)
SCHEMA = "(Tensor q, Tensor k, Tensor v, Tensor(a!) arena, int step, int layer) -> Tensor"


def run(context: Context) -> Iterator[Result]:
    """A result per operator: microseconds per call."""
    pool = Pool(PageSpec(1, HEADS, DIM), 1)
    plan = kernels.AttentionPlan(pool, HEADS)
    plan.prepare([0, 1], [1], [pool.alloc(1)[:1]])
    arena, step = ops.arena(pool), ops.register(plan)
    rows = torch.ones(1, HEADS, DIM, dtype=torch.bfloat16)
    out = torch.empty_like(rows)
    library = torch.library.Library("kvcore_bench", "FRAGMENT")
    library.define("nothing" + SCHEMA)
    library.define("nothing_out" + SCHEMA_OUT)
    library.impl("nothing", lambda q, *_: torch.empty_like(q), "CPU")
    library.impl("nothing_out", lambda *_: None, "CPU")
    nothing, ours = torch.ops.kvcore_bench, torch.ops.kvcore
    p, o, stride = rows.data_ptr(), out.data_ptr(), HEADS * DIM
    inputs = (rows, rows, rows, arena)
    calls: dict[str, Callable[[], object]] = {
        "direct": lambda: plan.run_ptr(0, p, stride, p, stride, p, stride, o, 0, 2),
        "attend_layer": lambda: ours.attend_layer(*inputs, step.id, 0),
        "attend_layer_out": lambda: ours.attend_layer_out(*inputs, out, step.id, 0),
        "nothing": lambda: nothing.nothing(*inputs, step.id, 0),
        "nothing_out": lambda: nothing.nothing_out(*inputs, out, step.id, 0),
    }

    def many(call: Callable[[], object]) -> Callable[[], float]:
        return lambda: seconds(lambda: [call() for _ in range(CALLS)]) / CALLS

    with torch.inference_mode():
        taken = interleave({n: many(c) for n, c in calls.items()}, context.rounds(40, 10))
    for op in ("attend_layer", "attend_layer_out"):
        yield time_result(
            "op_overhead",
            {"op": op, "heads": f"{HEADS}/{HEADS}x{DIM}"},
            [a - b for a, b in zip(taken[op], taken["direct"], strict=True)],
            "us",
            "an operator that does nothing",
            taken[op.replace("attend_layer", "nothing")],
            bytes=0,
            flops=0,
            isa=kernels.isa(),
            threads=1,
        )
