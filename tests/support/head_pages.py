"""Pruned sequences with known contents, and what attention over them must give."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from kvcore import reference as ref
from kvcore.head_pages import HeadPages, compact
from kvcore.pages import PageSpec, Pool
from numpy.typing import NDArray

from support.batches import to_torch

Rows = NDArray[np.generic]  # stored elements


def stored(rng: np.random.Generator, fmt: str, *shape: int) -> Rows:
    """Normally distributed numbers as a format stores them."""
    return ref.encode(rng.standard_normal(shape).astype(np.float32), fmt)


class Source:
    """An unpruned sequence in a pool of its own; ``k[layer]`` is [tokens, heads, head_dim]."""

    def __init__(self, spec: PageSpec, tokens: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        page, count = spec.page_size, -(-tokens // spec.page_size)
        self.spec, self.num_tokens = spec, tokens
        self.pool = Pool(spec, -(-count // spec.extent_pages) + 1, huge_pages=False)
        self.pages = self.pool.alloc(count)[:count]
        self.k, self.v = (
            [stored(rng, spec.format, tokens, spec.num_kv_heads, d) for _ in range(spec.num_layers)]
            for d in (spec.head_dim_k, spec.head_dim_v)
        )
        for layer, (k, v) in enumerate(zip(self.k, self.v, strict=True)):
            for i, at in enumerate(self.pages):
                part = slice(i * page, (i + 1) * page)
                fill = ((0, max(0, (i + 1) * page - tokens)), (0, 0), (0, 0))
                self.pool.write_slice(at, layer, np.pad(k[part], fill), np.pad(v[part], fill))


def ragged(rng: np.random.Generator, heads: int, tokens: int, mean: float) -> list[list[int]]:
    """Positions that each of ``heads`` heads keeps: random ones, ``mean`` of them on average."""
    shares = np.clip(rng.uniform(0.2, 1.8, heads) * mean, 0, 1)
    counts = np.round(shares * (mean / shares.mean()) * tokens).astype(int)
    return [sorted(rng.choice(tokens, min(n, tokens), replace=False).tolist()) for n in counts]


@dataclass
class Pruned:
    """Head pages, and per (layer, KV head) the rows that they must stand for, in order."""

    heads: HeadPages
    k: list[list[Rows]]
    v: list[list[Rows]]

    @staticmethod
    def of(source: Source, kept: list[list[list[int]]], head_pool: Pool) -> Pruned:
        """What ``kept`` leaves of a source."""

        def rows(parts: list[Rows]) -> list[list[Rows]]:
            return [
                [parts[layer][p, h] for h, p in enumerate(row)] for layer, row in enumerate(kept)
            ]

        heads = compact(source.pool, source.pages, source.num_tokens, kept, head_pool)
        return Pruned(heads, rows(source.k), rows(source.v))

    def add(self, layer: int, k: Rows, v: Rows) -> None:
        """New tokens [n, heads, head_dim]."""
        for rows, new in ((self.k, k), (self.v, v)):
            rows[layer] = [np.concatenate([r, new[:, h]]) for h, r in enumerate(rows[layer])]

    def expected(
        self, layer: int, q: Rows, fmt: str, dtype: str, classes: tuple[str, str] | None = None
    ) -> ref.Attention:
        """The oracle's attention of new tokens' rows q [n, q heads, head_dim].

        Args:
            classes: K and V format of each head's full pages but the first.
        """
        group = q.shape[1] // len(self.k[layer])
        parts = []
        for h, (k, v) in enumerate(zip(self.k[layer], self.v[layer], strict=True)):
            k, v = ref.decode(k, fmt), ref.decode(v, fmt)
            if classes is not None:
                k, v = _coded(classes[0], "k", k), _coded(classes[1], "v", v)
            rows = ref.decode(q[:, h * group : (h + 1) * group], dtype)
            positions = np.arange(len(k) - len(q), len(k))
            scale = float(np.float32(q.shape[2] ** -0.5))
            parts.append(ref.attention(rows, k[:, None], v[:, None], positions, scale))
        fields = ("out", "lse", "score_abs", "weight_abs", "weight_square")
        return ref.Attention(
            **{f: np.concatenate([getattr(p, f) for p in parts], 1) for f in fields}
        )


def _coded(fmt: str, part: str, rows: NDArray[np.floating], page: int = 64) -> NDArray[np.floating]:
    rows = rows.astype(np.float32)
    for at in range(page, len(rows) // page * page, page):
        block = ref.encode_block(fmt, part, rows[at : at + page])
        rows[at : at + page] = ref.decode_block(fmt, part, block, page, rows.shape[1])
    return rows


def tensors(dtype: str, *arrays: Rows) -> list[torch.Tensor]:
    """Stored elements as torch tensors."""
    return [to_torch(a, dtype) for a in arrays]
