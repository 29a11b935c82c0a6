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
    ) -> bool:
        """Books a request: its tokens are queued, it runs, and it takes ``frames``.

        False if it is booked at this worker already.
        """
    def prefilled(self, worker_id: bytes, request_id: bytes) -> bool:
        """Its prompt is computed: no longer queued, still running."""
    def finished(self, worker_id: bytes, request_id: bytes) -> bool:
        """Ends a booking; its frames are free."""
    def forget_worker(self, worker_id: bytes) -> None:
        """Drops all that is booked at a worker."""
    def load(self, worker_id: bytes) -> tuple[int, int, int]:
        """(queued tokens, running requests, frames) booked at a worker; 0 for an unknown one."""
