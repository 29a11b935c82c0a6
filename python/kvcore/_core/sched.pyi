from collections.abc import Iterable
from typing import Any

def choose(
    prompt_tokens: int,
    max_new_tokens: int,
    kv_bytes_per_token: float,
    workers: Iterable[Any],
    model: Any,
) -> Any: ...

class LoadBook:
    """What was dispatched to each worker and is not done, counted from the moment of dispatch.

    Unknown requests and workers change nothing and return False.
    """

    def __init__(self) -> None: ...
    def dispatch(
        self, worker_id: bytes, request_id: bytes, uncached_tokens: int, frames: int
    ) -> bool: ...
    def prefilled(self, worker_id: bytes, request_id: bytes) -> bool: ...
    def finished(self, worker_id: bytes, request_id: bytes) -> bool: ...
    def forget_worker(self, worker_id: bytes) -> None: ...
    def load(self, worker_id: bytes) -> tuple[int, int, int]: ...
