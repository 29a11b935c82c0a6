"""What compressed pages cost in the model's own words: divergence of the next token on real text.

Contexts are computed exactly, their full pages but the first are compressed, and a continuation
is read over them, teacher-forced. KL and the paired difference of NLL are against the same
continuation over uncompressed pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import contexts
import numpy as np
import torch
from compressed_run import PAGE, Context, Difference, difference, int4_per_token, summary
from harness import Context as Asked
from harness import Result, median, now, percentile
from kvcore import compress, kernels, model
from kvcore.pages import PageClass

GATES = {
    "small": {"kl": 0.012, "dnll_upper": 0.025},
    "balanced": {"kl": 0.009, "dnll_upper": 0.015},
}
PAIRS = (("int8", "int8"), ("int8", "v4"), ("k4", "int8"), ("k4", "v4"), ("k4", "v3"))
COUNTS = {contexts.SHORT: (16, 4), contexts.LONG: (8, 1)}


@dataclass(frozen=True)
class Method:
    """How the pages of a context are changed, and the part of bf16 that a page keeps."""

    name: str
    over: Callable[[Context], torch.Tensor]
    page_share: float
    gates: dict[str, float]


def run(asked: Asked) -> Iterator[Result]:
    """Two results per profile and length (KL, bound of dNLL), one per other method."""
    torch.set_num_threads(1)
    lm = model.load(asked.model or model.DEFAULT_MODEL)
    for length, counts in COUNTS.items():
        if asked.quick and length == contexts.LONG:
            continue
        yield from measure(lm, length, counts[asked.quick], asked.path)


def methods(lm: model.Model) -> list[Method]:
    """Profiles, format pairs, and the controls: nothing changed, and two that must fail."""
    spec = lm.page_spec(PAGE)

    def table(name: str, page_class: PageClass, gates: dict[str, float]) -> Method:
        formats, share = page_class.formats, page_class.page_bytes / spec.page_bytes
        return Method(name, lambda c: c.over(formats), share, gates)

    out = [Method("bf16", lambda c: c.over_values(c.k, c.v), 1.0, {})]
    for name, gates in GATES.items():
        chosen = compress.profile_class(lm, name)
        assert chosen is not None
        out.append(table(name, chosen, gates))
    for pair in PAIRS:
        uniform = PageClass(spec, [[pair] * spec.num_kv_heads] * spec.num_layers)
        out.append(table("/".join(pair), uniform, {}))
    must_fail = {"kl": GATES["small"]["kl"]}
    int4 = (4 + 32 / spec.head_dim_k) / 16
    out.append(Method("control_int4_per_token", _int4, int4, must_fail))
    out.append(Method("control_random_pages", _half_of_the_pages, 0.5, must_fail))
    return out


def _int4(context: Context) -> torch.Tensor:
    return context.over_values(int4_per_token(context.k), int4_per_token(context.v))


def _half_of_the_pages(context: Context) -> torch.Tensor:
    count = len(context.pages)
    kept = np.random.default_rng(1).permutation(count)[: count // 2]
    return context.over_pages(sorted(kept.tolist()))


def measure(lm: model.Model, length: int, count: int, path: str) -> Iterator[Result]:
    """All methods over ``count`` contexts of one length."""

    def encode(text: str) -> list[int]:
        return list(lm.tokenizer(text, add_special_tokens=False)["input_ids"])

    chosen = contexts.texts(encode, length, count)
    tried = methods(lm)
    found: dict[str, list[Difference]] = {m.name: [] for m in tried}
    taken: dict[str, list[float]] = {m.name: [] for m in tried}
    for text in chosen:
        context = Context(lm, text.tokens[:-1], length, path)
        exact = context.logits()
        for method in tried:
            start = now()
            found[method.name].append(difference(exact, method.over(context), text.labels))
            taken[method.name].append(now() - start)
    all_of_them = len(chosen) == len(contexts.SOURCES[length])
    about = {
        "model": lm.model_id, "context": length, "continued": contexts.CONTINUED, "path": path,
        "page": PAGE, "texts": contexts.digest(chosen),
        "texts_as_recorded": contexts.digest(chosen) == contexts.DIGESTS[length]
        if all_of_them else None,
    }  # fmt: skip
    for method in tried:
        yield from lines(method, summary(found[method.name]), taken[method.name], about)


def lines(
    method: Method, figures: dict[str, Any], taken: list[float], about: dict[str, Any]
) -> Iterator[Result]:
    """One line per gate, or one without."""
    pages = about["context"] // PAGE
    params = {
        **about,
        "table": method.name,
        **{name: round(value, 6) for name, value in figures.items()},
        "page_percent": round(100 * method.page_share, 2),
        "sequence_percent": round(100 * (1 + (pages - 1) * method.page_share) / pages, 2),
    }
    for what in method.gates or ("kl",):
        value, limit = figures[what], method.gates.get(what, float("nan"))
        # A bound below 0 is as good as none: the ratio stays a number that compares.
        ratio = limit / max(value, limit / 100) if method.gates else float("nan")
        yield Result(
            "accuracy",
            {"what": what, **params},
            median=median(taken), p99=percentile(taken, 99), best=min(taken),
            bytes=0, flops=0, value=value, unit="nat",
            limit_name="gate" if method.gates else "none", limit=limit, ratio=ratio,
            best_ratio=ratio, isa=kernels.isa(), threads=1, repetitions=len(taken),
        )  # fmt: skip
