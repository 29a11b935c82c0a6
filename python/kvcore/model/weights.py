"""Weight files mapped read-only, and linear layers whose rows do not depend on the batch."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kvcore.errors import Corrupt, IoError

log = logging.getLogger(__name__)
# Batch sizes around the places where matrix kernels change their blocking.
_TRIAL_ROWS = (1, 2, 3, 5, 8, 16, 17, 31, 64)


class WeightFiles:
    """The tensors of all ``*.safetensors`` of a directory, by name.

    The files are mapped, so several workers on one machine share their pages; a tensor that is
    used as it lies (the embedding table) costs no private memory. Layers that are packed for the
    matrix kernels are private copies, one per process.
    """

    def __init__(self, path: Path) -> None:
        from safetensors import safe_open

        self.path = path
        self._stack = ExitStack()
        self._where: dict[str, Any] = {}
        index = path / "model.safetensors.index.json"
        names = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else ()
        files = [path / name for name in sorted(names)] or sorted(path.glob("*.safetensors"))
        for file in files:
            try:
                handle = self._stack.enter_context(safe_open(str(file), framework="pt"))
            except OSError as error:
                raise IoError(f"model: cannot open {file}: {error}") from error
            except Exception as error:  # safetensors' own error class is not public
                raise Corrupt(f"model: {file} is not a safetensors file: {error}") from error
            self._where.update(dict.fromkeys(handle.keys(), handle))

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def get(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Tensor ``name`` as ``dtype``; raises Corrupt when it is missing or has another shape."""
        if name not in self._where:
            raise Corrupt(f"model: {self.path} has no tensor {name}")
        tensor: Tensor = self._where[name].get_tensor(name)
        if tuple(tensor.shape) != tuple(shape):
            raise Corrupt(f"model: {name} is {tuple(tensor.shape)}, expected {tuple(shape)}")
        return tensor.to(dtype)

    def maybe(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        return self.get(name, shape, dtype) if name in self._where else None


class Linear:
    """``x [T, in] -> [T, out]``: oneDNN over a weight packed once, or plain torch without it.

    Whether a row's bits depend on how many rows are computed together is tried once per shape.
    oneDNN computes a single row of a long product in another order than several: where that is so,
    a second row is computed along and dropped. ``row_invariant`` tells whether the trial passed.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.packed = _can_pack(weight.dtype)
        self._product = _product(weight, bias, self.packed)
        self._min_rows, self.row_invariant = _trial(
            *weight.shape, weight.dtype, self.packed, torch.get_num_threads()
        )

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] >= self._min_rows:
            return self._product(x)
        return self._product(x.expand(self._min_rows, -1).contiguous())[: x.shape[0]]


def _product(weight: Tensor, bias: Tensor | None, packed: bool) -> Callable[[Tensor], Tensor]:
    if not packed:
        plain = weight.contiguous()
        return lambda x: functional.linear(x, plain, bias)
    op = torch.ops.mkldnn._linear_pointwise.default
    held = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 8)

    def run(x: Tensor) -> Tensor:
        out: Tensor = op(x, held, bias, "none", [], "")
        return out

    return run


@cache
def _trial(
    out_features: int, in_features: int, dtype: torch.dtype, packed: bool, threads: int
) -> tuple[int, bool]:
    """(least number of rows to compute at once, whether rows then have the same bits always).

    The true result of the trial's products is zero, each row and weight being one half and the
    negative of the same half in another order. What remains is the rounding error of the sums,
    which shows any other order of adding; ordinary values in bf16 would round most of it away.
    """
    generator = torch.Generator().manual_seed(in_features)
    half = in_features // 2
    order = torch.randperm(half, generator=generator)
    tile = torch.zeros(_TRIAL_ROWS[-1], in_features)
    tile[:, :half] = torch.randn(len(tile), half, generator=generator)
    tile[:, half : 2 * half] = tile[:, order]
    x = torch.zeros_like(tile)
    x[:, :half] = torch.randn(len(x), half, generator=generator)
    x[:, half : 2 * half] = -x[:, order]
    weight = tile.to(dtype).repeat(-(-out_features // len(tile)), 1)[:out_features]
    product, x = _product(weight, None, packed), x.to(dtype)
    whole = product(x)
    differ = {
        rows
        for rows in _TRIAL_ROWS
        for start in {0, len(x) // 2, len(x) - rows}
        if not torch.equal(product(x[start : start + rows]), whole[start : start + rows])
    }
    return (2 if differ == {1} else 1), differ <= {1}


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32
