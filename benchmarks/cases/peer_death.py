"""How long a survivor takes to know that its peer was killed, at each step of a hand-over.

SIGKILL of either side at eleven named steps over shm and tcp (tests/support/peer_death.py): a round
fails the run if the pages do not come back or show a foreign stamp. The line of each pair is over
all steps; where the receiver does not know its sender yet, the deadline of the grant (0.5 s here)
is what ends it, and those steps have a line of their own.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from harness import ROOT, Context, Result, median, percentile
from kvcore import kernels

sys.path.insert(0, str(ROOT / "tests"))

from support.peer_death import LIMIT_S, LINKS, STEPS, UNBOUND, VICTIMS, Rounds


def run(context: Context) -> Iterator[Result]:
    """Lines of every victim and link."""
    rounds = context.rounds(100, 2)
    for victim in VICTIMS:
        for link in LINKS:
            with tempfile.TemporaryDirectory() as folder:
                yield from measure(victim, link, folder, rounds)


def measure(victim: str, link: str, folder: str, rounds: int) -> Iterator[Result]:
    survivor = Rounds(victim, link, Path(folder))
    unbound = UNBOUND if victim == "sender" else set()
    groups = {
        "the link": [step for step in STEPS if step not in unbound],
        "the grant's deadline": [step for step in STEPS if step in unbound],
    }
    for told_by, steps in groups.items():
        if not steps:
            continue
        took = [survivor.round(step) for step in steps for _ in range(rounds)]
        worst = max(took)
        yield Result(
            case="peer_death",
            params={"victim": victim, "link": link, "told_by": told_by, "steps": len(steps)},
            median=median(took), p99=percentile(took, 99), best=min(took), bytes=0, flops=0,
            value=worst, unit="s until told, worst", limit_name="allowed at most", limit=LIMIT_S,
            ratio=LIMIT_S / worst if worst else float("inf"),
            best_ratio=LIMIT_S / worst if worst else float("inf"),
            isa=kernels.isa(), threads=1, repetitions=len(took),
        )  # fmt: skip
    survivor.close()
