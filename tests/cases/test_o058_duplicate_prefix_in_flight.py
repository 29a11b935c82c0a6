"""O58: pages of a duplicate prefix were freed under a running request (mini-sglang PR#142)."""

from __future__ import annotations

from case_tools import NS, make_pool, shows_stamp, tokens, write_stamp
from kvcore.pages import Pool, SequencePages
from kvcore.prefix import RadixTree


def compute(pool: Pool, row: object, n: int) -> SequencePages:
    sequence = SequencePages(pool)
    sequence.grow(n)
    for i in range(n // 16):
        write_stamp(pool, sequence.pages[i], row[: (i + 1) * 16])  # type: ignore[index]
    return sequence


def test_the_second_insert_leaves_the_running_request_its_pages() -> None:
    pool = make_pool(16)
    tree = RadixTree(pool)
    row = tokens(40)
    a, b = compute(pool, row, 40), compute(pool, row, 40)
    assert tree.insert(NS, row, a.pages) == 2
    assert tree.insert(NS, row, b.pages) == 0  # there already: the tree keeps A's pages
    a.release()
    assert all(shows_stamp(pool, b.pages[i], row[: (i + 1) * 16]) for i in range(2))

    # B gives its duplicates up only after its table points at the tree's pages.
    duplicates = b.pages[:2]
    match = tree.match(NS, row)
    b.replace_prefix(match.pages)
    pool.decref(match.pages)
    assert b.pages[:2] == match.pages != duplicates
    assert all(pool.refs(page) == (0, 0) for page in duplicates)
    for page in pool.alloc(2):  # reuse them at once
        write_stamp(pool, page, tokens(16, seed=9))
    assert all(shows_stamp(pool, b.pages[i], row[: (i + 1) * 16]) for i in range(2))
    assert tree.evict(2) == []  # B still decodes on them
    b.release()
    assert len(tree.evict(2)) == 2
