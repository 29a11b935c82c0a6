from typing import Any

import numpy as np
import numpy.typing as npt
from kvcore._core.pages import PageClass, PageSpec

def choose(
    spec: PageSpec, statistics: Any, budget_bytes: int, max_key_error: float = 0.05
) -> PageClass: ...
def predicted_error(table: PageClass, statistics: Any) -> npt.NDArray[np.float64]: ...
def budget_bytes(spec: PageSpec, profile: str) -> int: ...
