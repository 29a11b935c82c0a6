"""What a call through ``torch.ops.kvcore`` costs beside the work itself.

One decode row over one token, so that the work is next to nothing: the operator's time less that of
the same plan called with addresses, next to an operator of the same schema whose body is one
allocation. The second is torch's own part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from harness import Context, Result, interleave, seconds, time_result
from kvcore import kernels, ops
from kvcore.pages import PageSpec, Pool

CALLS = 2000
HEADS, DIM = 8, 128
SCHEMA = "(Tensor q, Tensor k, Tensor v, Tensor(a!) arena, int step, int layer) -> Tensor"


def run(context: Context) -> Iterator[Result]:
    """One result: microseconds per call."""
    pool = Pool(PageSpec(1, HEADS, DIM), 1)
    plan = kernels.AttentionPlan(pool, HEADS)
    plan.prepare([0, 1], [1], [pool.alloc(1)[:1]])
    arena, step = ops.arena(pool), ops.register(plan)
    rows = torch.ones(1, HEADS, DIM, dtype=torch.bfloat16)
    out = torch.empty_like(rows)
    library = torch.library.Library("kvcore_bench", "FRAGMENT")
    library.define("nothing" + SCHEMA)
    library.impl("nothing", lambda q, *_: torch.empty_like(q), "CPU")
    nothing, attend = torch.ops.kvcore_bench.nothing, torch.ops.kvcore.attend_layer
    p, o, stride = rows.data_ptr(), out.data_ptr(), HEADS * DIM
    calls: dict[str, Callable[[], object]] = {
        "direct": lambda: plan.run_ptr(0, p, stride, p, stride, p, stride, o, 0, 2),
        "nothing": lambda: nothing(rows, rows, rows, arena, step.id, 0),
        "through": lambda: attend(rows, rows, rows, arena, step.id, 0),
    }

    def many(call: Callable[[], object]) -> Callable[[], float]:
        return lambda: seconds(lambda: [call() for _ in range(CALLS)]) / CALLS

    with torch.inference_mode():
        taken = interleave({n: many(c) for n, c in calls.items()}, context.rounds(40, 10))
    yield time_result(
        "op_overhead",
        {"op": "attend_layer", "heads": f"{HEADS}/{HEADS}x{DIM}"},
        [a - b for a, b in zip(taken["through"], taken["direct"], strict=True)],
        "us",
        "an operator that does nothing",
        taken["nothing"],
        bytes=0,
        flops=0,
        isa=kernels.isa(),
        threads=1,
    )
