from collections.abc import Sequence

from kvcore._core.pages import Pool

def seal_pages(pool: Pool, pages: Sequence[int], class_number: int) -> None:
    """Encodes full open pages into a class of the pool, in order; their ids stay, their open bytes
    come free.

    No kernel may read the pages meanwhile. Raises InvalidArgument for a page that is not open or
    not owned and for numbers that cannot be encoded, OutOfPages where no run of bytes is free: that
    page and those behind it stay open.
    """
