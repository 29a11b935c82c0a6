"""Arguments made fit for the core, or refused by name; a part of :mod:`kvcore.transport`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

from kvcore import _core, errors
from kvcore.errors import InvalidArgument


def seconds(field: str, value: float | None) -> float | None:
    """A time span as given, None = without end. Raises InvalidArgument unless finite."""
    if value is not None and not (isinstance(value, int | float) and math.isfinite(value)):
        raise InvalidArgument(f"{field}={value!r} must be a finite number of seconds, or None")
    return value


def deadline_of(field: str, span: float | None) -> int:
    """Nanoseconds of CLOCK_MONOTONIC that many seconds from now; 0 for None."""
    span = seconds(field, span)
    return 0 if span is None else _core.transport.now_ns() + int(span * 1e9)


@contextlib.contextmanager
def numbers_in(field: str, shape: str, rows: Any) -> Iterator[None]:
    """What the core cannot read as rows of numbers is InvalidArgument, naming the row."""
    try:
        yield
    except errors.KvcoreError:
        raise
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        columns = shape.count(",") + 1
        for i, row in enumerate(rows):
            numbers = isinstance(row, tuple | list) and all(
                isinstance(value, int) and 0 <= value < 1 << 63 for value in row
            )
            if not numbers or len(row) != columns:
                text = f"{field}[{i}]={row!r} must be {shape}, integers in 0 to 2**63 - 1"
                raise errors.InvalidArgument(text) from error
        raise errors.InvalidArgument(f"{field}: {error}") from error


def rows_of(segments: Any) -> Any:
    """An array as it is, everything else as a list."""
    return segments if hasattr(segments, "__array_interface__") else list(segments)


def check_bytes(**fields: Any) -> None:
    """Raises InvalidArgument that names what is no bytes."""
    for name, value in fields.items():
        if not isinstance(value, bytes):
            raise InvalidArgument(f"{name} is a {type(value).__name__}: bytes are needed")


def address_of(tensor: Any) -> tuple[Any, int, int]:
    """(capsule, address, bytes) of a contiguous DLPack tensor in CPU memory."""
    if not hasattr(tensor, "__dlpack__"):
        raise InvalidArgument(
            f"tensor is a {type(tensor).__name__}: a buffer or a DLPack object is needed"
        )
    try:
        capsule = tensor.__dlpack__()
        if hasattr(tensor, "detach"):  # a tensor of its own: torch's capsule follows `x.data = y`
            capsule = tensor.detach().__dlpack__()
    except (BufferError, RuntimeError) as error:  # a tensor that needs gradients, for one
        raise InvalidArgument(f"tensor cannot be exported: {error}") from error
    address, nbytes = _core.transport.address_of_dlpack(capsule)
    return capsule, address, nbytes
