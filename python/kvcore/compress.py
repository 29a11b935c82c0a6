"""Compressing pages: what a KV profile means, and sealing full pages into compressed classes.

A sealed page keeps its id and holds rounded K and V of its tokens in fewer bytes; its open bytes
come free. See ``csrc/compress`` and ``docs/formats.md``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from kvcore import _core
from kvcore.errors import InvalidArgument, OutOfPages, Unsupported
from kvcore.pages import PageClass, PageSpec, Pool

__all__ = ["PROFILES", "Sealer", "profile_class", "seal_pages"]

seal_pages = _core.compress.seal_pages

_UNIFORM = {"balanced": ("k4", "v4"), "small": ("k4", "v3")}
PROFILES = ("exact", *_UNIFORM)


def profile_class(spec: PageSpec, profile: str) -> PageClass | None:
    """The class that ``profile`` seals pages of ``spec`` into; None for "exact": they stay open.

    Raises InvalidArgument for an unknown profile and Unsupported where ``spec`` cannot have one.
    """
    if profile not in PROFILES:
        raise InvalidArgument(f"kv_profile is {profile!r}; allowed: {', '.join(PROFILES)}")
    if profile == "exact":
        return None
    if spec.format != "bf16":
        raise Unsupported(f"kv_profile {profile!r} compresses bf16 pages; these are {spec.format}")
    table = [[_UNIFORM[profile]] * spec.num_kv_heads] * spec.num_layers
    try:
        return PageClass(spec, table)
    except InvalidArgument as error:
        raise Unsupported(f"kv_profile {profile!r} does not fit this model: {error}") from error


class Sealer:
    """Full pages that wait to be sealed into ``page_class``, first come, first sealed.

    A page freed or sealed meanwhile is passed over; one that holds a number which cannot be encoded
    stays open for good (``refused`` counts it). ``step_pages`` is what :meth:`run` should be asked
    for between two steps: about two milliseconds' worth. Not thread-safe; no kernel may read the
    pages while :meth:`run` does.
    """

    STEP_BYTES = 6 << 20  # of open pages: a core seals 3 bytes per nanosecond

    def __init__(self, pool: Pool, page_class: PageClass) -> None:
        self.pool = pool
        self.class_number = pool.add_class(page_class)
        self.page_bytes = page_class.run_bytes(1)
        self.step_pages = max(1, self.STEP_BYTES // pool.spec.page_bytes)
        self.sealed = self.refused = 0
        self._queue: deque[tuple[int, int]] = deque()

    @property
    def waiting(self) -> int:
        """Pages queued, those that :meth:`run` will pass over among them."""
        return len(self._queue)

    def add(self, pages: Iterable[int]) -> None:
        """Queues pages, all tokens of which are in place."""
        self._queue.extend((page, self.pool.generation(page)) for page in pages)

    def run(self, max_pages: int) -> int:
        """Seals up to ``max_pages``; fewer when none are left or no bytes are free for one."""
        done = 0
        while self._queue and done < max_pages:
            page, generation = self._queue[0]
            if self._is_open(page, generation):
                try:
                    seal_pages(self.pool, [page], self.class_number)
                    done += 1
                except InvalidArgument:
                    self.refused += 1
                except OutOfPages:
                    break
            self._queue.popleft()
        self.sealed += done
        return done

    def _is_open(self, page: int, generation: int) -> bool:
        pool = self.pool
        held = pool.refs(page)[0] > 0 and pool.generation(page) == generation
        return held and pool.class_of(page) == 0
