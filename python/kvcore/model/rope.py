"""Rotary position embedding: parameters, frequencies and a table of cosines and sines.

Types ``default``, ``linear`` and ``llama3`` (Llama 3.1). The angle of a position depends on the
position alone, never on the length of the batch, which is what pages that are shared need.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvcore.errors import InvalidArgument, Unsupported

KINDS = ("default", "linear", "llama3")
BLOCK = 1024


@dataclass(frozen=True)
class RopeConfig:
    """Parameters of one rotary embedding; lengths in tokens."""

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position: int = 0

    def describe(self) -> str:
        """A canonical text that identifies the embedding (part of a page's namespace)."""
        text = f"{self.kind}:theta={self.theta!r}"
        if self.kind != "default":
            text += f":factor={self.factor!r}"
        if self.kind == "llama3":
            text += f":low={self.low_freq_factor!r}:high={self.high_freq_factor!r}"
            text += f":original={self.original_max_position}"
        return text


def rope_parameters(hf_config: Any) -> dict[str, Any]:
    """The rope parameters of a transformers configuration, old and new spelling, as one dict."""
    params = dict(getattr(hf_config, "rope_parameters", None) or {})
    params.update(getattr(hf_config, "rope_scaling", None) or {})
    params.setdefault("rope_type", params.pop("type", "default"))
    if "rope_theta" not in params:
        params["rope_theta"] = getattr(hf_config, "rope_theta", None) or 10000.0
    return params


def rope_config(hf_config: Any) -> RopeConfig:
    """The embedding of a flat-family model.

    Raises:
        Unsupported: a rope type outside ``KINDS``, or one that rotates part of a head only.
    """
    params = rope_parameters(hf_config)
    kind = str(params["rope_type"])
    if kind not in KINDS:
        raise Unsupported(f"rope type {kind!r} (allowed: {', '.join(KINDS)})")
    partial = params.get("partial_rotary_factor", getattr(hf_config, "partial_rotary_factor", None))
    if partial not in (None, 1.0):
        raise Unsupported(f"rope over part of a head (partial_rotary_factor {partial})")
    return RopeConfig(
        kind=kind,
        theta=float(params["rope_theta"]),
        factor=float(params.get("factor", 1.0)),
        low_freq_factor=float(params.get("low_freq_factor", 1.0)),
        high_freq_factor=float(params.get("high_freq_factor", 1.0)),
        original_max_position=int(params.get("original_max_position_embeddings", 0)),
    )


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Any:
    """Radians per token of each rotated pair: numpy float32 ``[head_dim / 2]``.

    llama3: "The Llama 3 Herd of Models" section 3 and its reference code: long wavelengths are
    stretched by ``factor``, short ones kept, and those between interpolated.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    freq = (1.0 / np.power(np.float32(rope.theta), exponent)).astype(np.float32)
    if rope.kind == "linear":
        return (freq / np.float32(rope.factor)).astype(np.float32)
    if rope.kind == "llama3":
        wavelength = 2 * math.pi / freq
        low, high = rope.low_freq_factor, rope.high_freq_factor
        smooth = np.clip((rope.original_max_position / wavelength - low) / (high - low), 0, 1)
        return ((1 - smooth) * freq / rope.factor + smooth * freq).astype(np.float32)
    return freq


class RopeTable:
    """cos and sin by position, float32, grown in fixed blocks so that a row never changes."""

    def __init__(self, rope: RopeConfig, head_dim: int, max_position: int) -> None:
        self._freq = inverse_frequencies(rope, head_dim)
        self._max_position = max_position
        self._table = torch.empty(0, 2, head_dim // 2)

    def rows(self, positions: torch.Tensor) -> torch.Tensor:
        """cos and sin of ``positions`` ``[T]``: float32 ``[T, 2, head_dim / 2]``.

        Raises:
            InvalidArgument: a position outside ``[0, max_position)``.
        """
        low, high = torch.aminmax(positions)
        if low < 0 or high >= self._max_position:
            raise InvalidArgument(
                f"positions: {int(low)}..{int(high)} outside 0..{self._max_position - 1}"
            )
        if high >= self._table.shape[0]:
            self._grow(int(high) + 1)
        return self._table.index_select(0, positions)

    def _grow(self, length: int) -> None:
        have = self._table.shape[0] // BLOCK
        want = max(-(-length // BLOCK), min(2 * have, -(-self._max_position // BLOCK)))
        blocks = [self._table]
        for block in range(have, want):
            position = np.arange(block * BLOCK, (block + 1) * BLOCK, dtype=np.float32)
            angle = (position[:, None] * self._freq[None, :]).astype(np.float64)
            pair = np.stack([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)
            blocks.append(torch.from_numpy(pair))
        self._table = torch.cat(blocks)
