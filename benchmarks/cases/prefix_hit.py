"""A prefix hit on SmolLM2: the time to a first token when a document is cached, on one thread.

Another question over the same document is compared with its uncached rest sent alone: the gap is
the look-up and the attention over the cached pages. ``cold_ms`` is the first time of the document.
"""

from __future__ import annotations

from collections.abc import Iterator

from harness import Context, Result, interleave, now, time_result
from kvcore import kernels, model
from kvcore.pages import usable_prefix

from cases.model_step import Ours

DOCUMENT, QUESTION = 3000, 40


def run(context: Context) -> Iterator[Result]:
    """One result; the limit is a prompt of as many tokens as the hit has to compute."""
    ours = Ours(context.model or model.DEFAULT_MODEL)
    page = ours.engine.memory.pool.spec.page_size
    cached = usable_prefix(DOCUMENT, page)
    rest = DOCUMENT + QUESTION - cached
    document = ours.tokens(DOCUMENT)

    def first_token(tokens: list[int]) -> float:
        start = now()
        ours.add(tokens, 1)
        while ours.engine.has_work:
            ours.engine.step()
        return now() - start

    cold = first_token(document)
    taken = interleave(
        {
            "ours": lambda: first_token(document + ours.tokens(QUESTION)),
            "limit": lambda: first_token(ours.tokens(rest)),
        },
        context.rounds(25, 8),
    )
    yield time_result(
        "prefix_hit",
        {
            "model": ours.model.model_id,
            "prompt": DOCUMENT + QUESTION,
            "computed": rest,
            "cold_ms": round(cold * 1e3, 1),
        },
        taken["ours"],
        "ms",
        "suffix_alone",
        taken["limit"],
        bytes=0,
        flops=0,
        isa=kernels.isa(),
        threads=1,
    )
