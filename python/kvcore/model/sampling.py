"""Choosing tokens from logits: greedy, or temperature and top_p with counter-based randomness.

A draw depends on the row's logits and on (seed, absolute position) only, so a request gets the same
tokens in whatever batch, chunking or worker each of them is sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

_TOLD = 20  # most likely tokens that a request may ask for
_NUCLEUS = 1024  # most nuclei lie within so many tokens: sorting the whole vocabulary is rare
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Sampling(Protocol):
    """How a row's token is chosen: the fields of a ``generate`` message."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_p(self) -> float: ...
    @property
    def seed(self) -> int: ...
    @property
    def num_logprobs(self) -> int: ...


@dataclass(frozen=True)
class Sampled:
    """One chosen token; the fields are those of a ``tokens`` message. Logprobs are natural logs."""

    token_ids: list[int]
    logprobs: list[float] = field(default_factory=list)
    top_ids: list[int] = field(default_factory=list)
    top_logprobs: list[float] = field(default_factory=list)


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """Uniform numbers in [0, 1), one per (seed, absolute position): SplitMix64 read by counter."""
    counter = np.asarray(positions, dtype=np.uint64) + np.uint64(1)
    bits = _mix(_mix(np.asarray(seeds, dtype=np.uint64) + _GOLDEN) + counter * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _invert(probs: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """Index per row at which the running sum of ``probs`` [n, k] passes ``points`` [n] times it."""
    sums = probs.cumsum(-1)
    targets = (points * sums[:, -1]).unsqueeze(-1)
    picked = torch.searchsorted(sums, targets, right=True).squeeze(-1)
    last = probs.shape[-1] - 1 - (probs.flip(-1) > 0).to(torch.uint8).argmax(-1)
    return torch.minimum(picked, last)


def _draw_nucleus(
    probs: torch.Tensor, top_p: torch.Tensor, points: torch.Tensor, width: int
) -> torch.Tensor:
    values, ids = torch.topk(probs, width, dim=-1)
    before = values.cumsum(-1) - values
    kept = torch.where(before < top_p.unsqueeze(-1), values, 0.0)
    return ids.gather(-1, _invert(kept, points).unsqueeze(-1)).squeeze(-1)


def _draw(
    logits: torch.Tensor, params: Sequence[Sampling], positions: Sequence[int]
) -> torch.Tensor:
    temperature = torch.tensor([p.temperature for p in params], dtype=torch.float64)
    scaled = logits.double()
    scaled = (scaled - scaled.amax(-1, keepdim=True)) / temperature.unsqueeze(-1)
    probs = torch.softmax(scaled, dim=-1)
    # No token of a real vocabulary is as rare as this: less keeps the likeliest one all the same.
    top_p = torch.tensor([max(p.top_p, 1e-9) for p in params], dtype=torch.float64)
    points = torch.from_numpy(uniforms([p.seed for p in params], positions))
    width = min(_NUCLEUS, probs.shape[-1])
    # The path of a row is chosen by the row alone, never by its neighbours.
    narrow = torch.topk(probs, width, dim=-1).values.sum(-1) >= top_p
    whole = top_p >= 1.0
    tokens = torch.empty(len(params), dtype=torch.int64)
    for rows, draw_width in (
        (~whole & narrow, width),
        (~whole & ~narrow, probs.shape[-1]),
    ):
        if bool(rows.any()):
            tokens[rows] = _draw_nucleus(probs[rows], top_p[rows], points[rows], draw_width)
    if bool(whole.any()):
        tokens[whole] = _invert(probs[whole], points[whole])
    return tokens


def _with_logprobs(logits: torch.Tensor, tokens: list[int], counts: Sequence[int]) -> list[Sampled]:
    logprobs = torch.log_softmax(logits.double(), dim=-1)
    chosen = logprobs[torch.arange(len(tokens)), torch.tensor(tokens)].tolist()
    top = torch.topk(logprobs, min(_TOLD, logits.shape[-1]), dim=-1)
    ids, values = top.indices.tolist(), top.values.tolist()
    return [
        Sampled([token], [chosen[i]], ids[i][:n], values[i][:n])
        for i, (token, n) in enumerate(zip(tokens, counts, strict=True))
    ]


def sample(
    logits: torch.Tensor, params: Sequence[Sampling], positions: Sequence[int]
) -> list[Sampled | None]:
    """Chooses one token per row.

    Args:
        logits: float32 [rows, vocab].
        params: the request of each row; positions: where its chosen token will stand.
    Returns: per row the choice, or None where the logits are not finite.
    """
    peaks, best = logits.max(dim=-1)
    sound: list[bool] = torch.isfinite(peaks).tolist()
    hot = [i for i, p in enumerate(params) if p.temperature > 0.0 and sound[i]]
    if hot:
        best[hot] = _draw(logits[hot], [params[i] for i in hot], [positions[i] for i in hot])
    tokens: list[int] = best.tolist()
    chosen: list[Sampled | None] = [
        Sampled([token]) if ok else None for token, ok in zip(tokens, sound, strict=True)
    ]
    told = [i for i, p in enumerate(params) if p.num_logprobs >= 0 and sound[i]]
    if told:
        counts = [params[i].num_logprobs for i in told]
        rows = _with_logprobs(logits[told], [tokens[i] for i in told], counts)
        for i, row in zip(told, rows, strict=True):
            chosen[i] = row
    return chosen
