"""Reading addresses, strides and element types off any CPU tensor, for :mod:`kvcore.kernels`."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvcore import _core
from kvcore.errors import InvalidArgument

#: The ``dtype`` argument of the ``*_ptr`` functions, by element type name.
DTYPE_CODES = {"float32": 0, "float16": 1, "bfloat16": 2}


class Tensor(NamedTuple):
    ptr: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # elements
    dtype: str
    owner: Any  # keeps the memory alive


def describe(field: str, x: Any, *, write: bool = False) -> Tensor:
    """Address, shape, strides and element type of any CPU tensor."""
    if isinstance(x, np.ndarray):
        if write and not x.flags.writeable:
            raise InvalidArgument(f"{field} is a read-only array")
        name = "bfloat16" if x.dtype == np.uint16 else x.dtype.name
        size = x.itemsize
        strides = tuple(s // size for s in x.strides)
        return Tensor(x.__array_interface__["data"][0], x.shape, strides, name, x)
    if hasattr(x, "data_ptr"):
        if x.device.type != "cpu":
            raise InvalidArgument(f"{field} is on device {x.device}: expected cpu")
        name = str(x.dtype).rpartition(".")[2]
        return Tensor(x.data_ptr(), tuple(x.shape), tuple(x.stride()), name, x)
    if hasattr(x, "__dlpack__"):
        capsule = x.__dlpack__()
        ptr, shape, strides, name = _core.kernels.describe_dlpack(capsule)
        return Tensor(ptr, shape, strides, name, capsule)
    raise InvalidArgument(
        f"{field} is a {type(x).__name__}: expected a numpy array, torch tensor or DLPack object"
    )


def rows(field: str, x: Any, shape: tuple[int, ...], *, write: bool = False) -> Tensor:
    """A tensor of the given shape whose dimensions after the first are contiguous."""
    t = describe(field, x, write=write)
    if t.dtype not in DTYPE_CODES:
        raise InvalidArgument(
            f"{field} has dtype {t.dtype}: expected one of {', '.join(DTYPE_CODES)}"
        )
    if len(t.shape) == 2 and len(shape) == 3:  # [tokens, heads * dim]: the same bytes
        t = t._replace(
            shape=(t.shape[0], *_split(field, t.shape[1], shape)),
            strides=(t.strides[0], t.strides[1] * shape[2], t.strides[1]),
        )
    if t.shape != shape:
        raise InvalidArgument(f"{field} has shape {list(t.shape)}: expected {list(shape)}")
    if 0 in t.shape:  # whatever strides an empty tensor names
        return t._replace(strides=(shape[1] * shape[2], shape[2], 1))
    dense = 1
    for size, stride in zip(reversed(t.shape[1:]), reversed(t.strides[1:]), strict=True):
        if size > 1 and stride != dense:
            raise InvalidArgument(
                f"{field} has strides {list(t.strides)}: expected all but the first dimension "
                "to be contiguous"
            )
        dense *= size
    return t


def _split(field: str, width: int, shape: tuple[int, ...]) -> tuple[int, int]:
    if width != shape[1] * shape[2]:
        raise InvalidArgument(
            f"{field} has {width} values a token: expected heads * head_dim = "
            f"{shape[1]} * {shape[2]}"
        )
    return shape[1], shape[2]


def same_dtype(a: str, x: Tensor, b: str, y: Tensor) -> int:
    if x.dtype != y.dtype:
        raise InvalidArgument(f"{a} is {x.dtype} and {b} is {y.dtype}: expected the same dtype")
    return DTYPE_CODES[x.dtype]


def int32(x: npt.ArrayLike) -> npt.NDArray[Any]:
    """Lists as int32; arrays as they are, for the core to look at."""
    return np.asarray(x, dtype=np.int32) if isinstance(x, list | tuple) else np.asarray(x)


def dense_float32(field: str, x: Any, shape: tuple[int, ...], *, write: bool = False) -> Tensor:
    t = describe(field, x, write=write)
    dense = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    contiguous = 0 in shape or all(
        n <= 1 or s == d for n, s, d in zip(shape, t.strides, dense, strict=False)
    )
    if t.dtype != "float32" or t.shape != shape or not contiguous:
        raise InvalidArgument(
            f"{field} is {t.dtype} {list(t.shape)} with strides {list(t.strides)}: "
            f"expected contiguous float32 {list(shape)}"
        )
    return t
