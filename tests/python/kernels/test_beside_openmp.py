"""The thread pool beside torch's OpenMP team: equal bits, and no collapse when both take turns.

OpenMP threads spin for a while after each of their regions. A team that waits for its own threads
by spinning as well then waits for whole scheduler slices: calls of a millisecond take thirty.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

SCRIPT = """
import json, sys, time
import numpy as np, torch
from kvcore import kernels, pages
torch.set_num_threads(2)
spec = pages.PageSpec(1, 8, 64, page_size=64)
pool = pages.Pool(spec, 64, huge_pages=False)
rng = np.random.default_rng(1)
held = pool.alloc(64)[:64]
for page in held:
    k, v = rng.standard_normal((2, 64, 8, 64)).astype(np.float32)
    kernels.pack_slice(pool, page, 0, k, v)
q = rng.standard_normal((1, 32, 64)).astype(np.float32)
a = torch.randn(256, 256)

def plan(threads):
    made = kernels.AttentionPlan(pool, 32, threads=kernels.ThreadPool(threads))
    made.prepare([0, 1], [4000], [held])
    out = np.empty((1, 32, 64), np.float32)
    return lambda: (made.attend(0, q, out), out)[1]

def fastest(call, before=lambda: None):
    taken = []
    for _ in range(60):
        before()
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return min(taken)

one, two = plan(1), plan(2)
want = one().copy()
equal = True
for _ in range(200):
    a @ a
    equal &= bool((two() == want).all())
print(json.dumps({"equal": equal, "alone": fastest(two),
                  "beside": fastest(two, lambda: a @ a)}))
"""


def test_turns_with_openmp_do_not_collapse() -> None:
    best = float("inf")
    for _ in range(3):  # a busy machine may spoil one
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout)
        assert said["equal"]
        best = min(best, said["beside"] / said["alone"])
        if best < 3:
            return
        time.sleep(1)
    pytest.fail(f"beside OpenMP a call takes {best:.1f} times as long as alone")
