from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from kvcore._core.pages import PageClass, PageSpec, Pool

def choose(
    spec: PageSpec, statistics: Any, budget_bytes: int, max_key_error: float = 0.05
) -> PageClass: ...
def predicted_error(table: PageClass, statistics: Any) -> npt.NDArray[np.float64]: ...
def budget_bytes(spec: PageSpec, profile: str) -> int: ...
def seal_pages(pool: Pool, pages: Sequence[int], class_number: int) -> None:
    """Encodes full open pages into a class of the pool, in order; their ids stay, their open bytes
    come free.

    No kernel may read the pages meanwhile. Raises InvalidArgument for a page that is not open or
    not owned and for numbers that cannot be encoded, OutOfPages where no run of bytes is free: that
    page and those behind it stay open.
    """
