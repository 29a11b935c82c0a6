"""Prefix look-up: find and pin the cached pages of a prompt, among a thousand other prompts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from harness import Context, Result, interleave, seconds, time_result
from kvcore import kernels, pages, prefix

PAGE = 64
NAMESPACE = b"\x07" * 32
OTHERS, OTHER_TOKENS = 1000, 1024
LENGTHS = [3_000, 131_072, 1_048_576]
BUDGET_US = 1000.0


def run(context: Context) -> Iterator[Result]:
    """One result per prompt length; the pins are given back outside the timed part."""
    for length in LENGTHS[: 2 if context.quick else None]:
        yield measure(length, context.rounds(200, 40))


def filled(length: int) -> tuple[pages.Pool, prefix.RadixTree, np.ndarray]:
    """A tree holding the prompt and many others that share its first pages, and the prompt."""
    spec = pages.PageSpec(1, 1, 16, page_size=PAGE, extent_pages=1, format="bf16")
    num_pages = -(-length // PAGE) + OTHERS * OTHER_TOKENS // PAGE
    pool = pages.Pool(spec, num_pages)
    tree = prefix.RadixTree(pool)
    rng = np.random.default_rng(1)
    prompt = rng.integers(0, 49_000, length, np.int32)
    for index in range(OTHERS + 1):
        other = rng.integers(0, 49_000, OTHER_TOKENS, np.int32)
        shared = int(rng.integers(0, OTHER_TOKENS // PAGE)) * PAGE
        other[:shared] = prompt[:shared]
        tokens = prompt if index == OTHERS else other
        held = pool.alloc(tokens.size // PAGE)
        tree.insert(NAMESPACE, tokens, held)
        pool.decref(held)
    return pool, tree, prompt


def measure(length: int, rounds: int) -> Result:
    """Seconds of match(), next to comparing the same tokens once in numpy."""
    pool, tree, prompt = filled(length)
    query = np.concatenate([prompt, np.array([1, 2, 3], np.int32)])
    copy = query.copy()
    usable = pages.usable_prefix(query.size, PAGE) // PAGE
    expected = min(usable, length // PAGE)
    found: list[prefix.Match] = []

    def match() -> float:
        taken = seconds(lambda: found.append(tree.match(NAMESPACE, query)))
        pins = found.pop().pages
        if len(pins) != expected:
            raise RuntimeError(f"found {len(pins)} pages of {expected}")
        pool.decref(pins)
        return taken

    taken = interleave(
        {"ours": match, "limit": lambda: seconds(lambda: np.array_equal(query, copy))}, rounds
    )
    budget = length == LENGTHS[0]
    return time_result(
        "prefix_lookup",
        {"tokens": length, "page": PAGE, "pages_found": expected, "other_prompts": OTHERS},
        taken["ours"],
        "us",
        "budget_1_ms" if budget else "numpy_token_compare",
        [BUDGET_US * 1e-6] if budget else taken["limit"],
        bytes=query.nbytes,
        flops=0,
        isa=kernels.isa(),
        threads=1,
    )
