from typing import Any

from . import kernels, stream

class MovedPages:
    def __init__(self, view_address: int, arena_address: int) -> None: ...
    @property
    def view_address(self) -> int: ...

class LayerCall:
    """Append and attend of one layer by a plan or step, on tensors of ``exchange``'s framework.

    The output, ``out`` if given; None for tensors that need a copy or are of another shape.
    """

    def __init__(
        self, exchange: Any, plan: kernels.AttentionPlan | stream.LayerStep, arena_address: int
    ) -> None: ...
    def __call__(self, q: Any, k: Any, v: Any, arena: Any, layer: int, out: Any = None) -> Any: ...

def plan_like(plan: kernels.AttentionPlan, pages: MovedPages) -> kernels.AttentionPlan: ...
