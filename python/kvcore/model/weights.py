"""Weight files mapped read-only, and linear layers whose rows do not depend on the batch."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from contextlib import ExitStack
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
    Some matrix kernels take another path for a single row: then a second one is computed along
    and dropped. ``row_invariant`` tells whether the trial passed.
    """

    _trials: dict[tuple[int, int, torch.dtype, bool, int], tuple[int, bool]] = {}  # noqa: RUF012

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.packed = _can_pack(weight.dtype)
        self._bias = bias
        if self.packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 8)
        else:
            self._weight = weight.contiguous()
        self._op = torch.ops.mkldnn._linear_pointwise.default if self.packed else None
        key = (*weight.shape, weight.dtype, self.packed, torch.get_num_threads())
        if key not in self._trials:
            self._trials[key] = self._try(weight.dtype)
        self._min_rows, self.row_invariant = self._trials[key]

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] >= self._min_rows:
            return self._run(x)
        return self._run(x.expand(self._min_rows, -1).contiguous())[: x.shape[0]]

    def _run(self, x: Tensor) -> Tensor:
        if self._op is not None:
            out: Tensor = self._op(x, self._weight, self._bias, "none", [], "")
            return out
        return functional.linear(x, self._weight, self._bias)

    def _try(self, dtype: torch.dtype) -> tuple[int, bool]:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(_TRIAL_ROWS[-1], self.in_features, generator=generator).to(dtype)
        whole = self._run(x)
        differ = [n for n in _TRIAL_ROWS if not torch.equal(self._run(x[-n:]), whole[-n:])]
        return (2 if differ == [1] else 1), differ in ([], [1])


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32
