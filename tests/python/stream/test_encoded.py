"""Pages that arrive compressed, over every link: the bytes that sealing them would have made."""

from __future__ import annotations

import ctypes
import os
import select
import time
from pathlib import Path

import numpy as np
import pytest
from kvcore import stream
from kvcore.compress import seal_pages
from kvcore.errors import InvalidArgument, Unsupported
from kvcore.pages import PageClass, PageSpec, Pool

KEY = b"encoded hand-overs, 32 bytes in!"
SPEC = PageSpec(4, 2, 64, page_size=64, extent_pages=2)
CLASS = PageClass(SPEC, [[("k4", "v4"), ("int8", "v3")]] * 4)
TOKENS = 300  # five pages, the last partly filled


def filled(pool: Pool, pages: list[int]) -> None:
    rng = np.random.default_rng(5)
    for page in pages:
        for layer in range(SPEC.num_layers):
            k, v = rng.standard_normal((2, 64, 2, 64), dtype=np.float32).view(np.uint32) >> 16
            pool.write_slice(page, layer, k.astype(np.uint16), v.astype(np.uint16))


def bytes_of(pool: Pool, page: int, layer: int) -> bytes:
    return ctypes.string_at(pool.slice_address(page, layer), CLASS.slice_bytes(layer))


def receiving(pool: Pool) -> tuple[list[int], int]:
    number = pool.add_class(CLASS)
    first, last = pool.alloc(2, run_pages=1)
    return [first, *pool.alloc_in_class(3, number), last], number


@pytest.mark.parametrize("link", ["loopback", "shm", "tcp"])
def test_full_pages_arrive_as_sealing_makes_them(link: str, tmp_path: Path) -> None:
    hub = stream.LoopbackHub() if link == "loopback" else None
    address = {"loopback": "loopback:d", "shm": f"shm:{tmp_path}/d", "tcp": "tcp:127.0.0.1:0"}[link]
    ours, theirs = Pool(SPEC, 8, huge_pages=False), Pool(SPEC, 16, huge_pages=False)
    pages = ours.alloc(5, run_pages=1)
    filled(ours, pages)
    with (
        stream.Endpoint(theirs, [address], key=KEY, hub=hub, checksums="all") as receiver,
        stream.Endpoint(
            ours,
            key=KEY,
            hub=hub,
            checksums="all",
            max_inflight_bytes=1 << 16,
            staging_bytes=1 << 21,
        ) as sender,
    ):
        for _ in range(3):
            to, number = receiving(theirs)
            assert theirs.class_pages()[number] == 3
            grant = receiver.grant(os.urandom(16), to, TOKENS)
            assert stream.describe_grant(grant)["sealed_pages"] == 3
            port = sender.open(grant, pages)
            port.push_cached_upto(TOKENS)
            port.commit(b"token")
            assert select.select([receiver.event_fd], [], [], 10)[0]
            ((kind, *_, stats),) = receiver.poll()
            assert kind == "complete" and stats.transport == link
            whole = 2 * SPEC.page_bytes + 3 * CLASS.page_bytes
            assert stats.bytes == stats.kv_bytes == port.kv_bytes == whole
            twins = theirs.alloc(5, run_pages=1)
            filled(theirs, twins)
            seal_pages(theirs, twins[1:4], number)
            for page, twin in zip(to[1:4], twins[1:4], strict=True):
                for layer in range(SPEC.num_layers):
                    assert bytes_of(theirs, page, layer) == bytes_of(theirs, twin, layer)
            for i in (0, 4):
                for mine, his in zip(
                    ours.read_slice(pages[i], 2), theirs.read_slice(to[i], 2), strict=True
                ):
                    assert np.array_equal(mine, his)
            theirs.decref(to + twins)
        until = time.monotonic() + 5
        while sender.stats().sending and time.monotonic() < until:
            time.sleep(0.001)
        assert sender.stats().staged_bytes == sender.stats().refs_lost == 0
    assert ours.stats().io_pages == theirs.stats().held_pages == 0


def test_only_full_pages_without_content_can_arrive_compressed() -> None:
    pool = Pool(SPEC, 8, huge_pages=False)
    with stream.Endpoint(pool, ["loopback:x"], hub=stream.LoopbackHub()) as endpoint:
        to, number = receiving(pool)
        with pytest.raises(InvalidArgument, match="sealed but not full"):
            endpoint.grant(os.urandom(16), to[:4], 250)
        twin = pool.alloc(1, run_pages=1)
        seal_pages(pool, twin, number)
        with pytest.raises(InvalidArgument, match="sealed pages are immutable"):
            endpoint.grant(os.urandom(16), [to[0], *twin, to[4]], 130)
        assert pool.stats().io_pages == 0


def ended(endpoint: stream.Endpoint) -> tuple[object, ...]:
    """The one event of a hand-over."""
    assert select.select([endpoint.event_fd], [], [], 10)[0]
    (event,) = endpoint.poll()
    return event


@pytest.mark.parametrize("same_number", [True, False])
@pytest.mark.parametrize("link", ["shm", "tcp"])
def test_equal_classes_exchange_their_codes(link: str, same_number: bool, tmp_path: Path) -> None:
    """Compressed at the sender already: the codes arrive bit for bit, whatever the class's number.

    Under the same number nothing is staged: the slices leave as they lie.
    """
    address = f"shm:{tmp_path}/d" if link == "shm" else "tcp:127.0.0.1:0"
    ours, theirs = Pool(SPEC, 8, huge_pages=False), Pool(SPEC, 16, huge_pages=False)
    if not same_number:
        theirs.add_class(PageClass(SPEC, [[("k4", "v3"), ("int8", "v4")]] * 4))
    pages = ours.alloc(5, run_pages=1)
    filled(ours, pages)
    seal_pages(ours, pages[1:4], ours.add_class(CLASS))
    with (
        stream.Endpoint(theirs, [address], key=KEY, checksums="all") as receiver,
        # Room for no slice: what had to be staged would be refused.
        stream.Endpoint(
            ours, key=KEY, checksums="all", staging_bytes=1 if same_number else 1 << 20
        ) as sender,
    ):
        to, _ = receiving(theirs)
        port = sender.open(receiver.grant(os.urandom(16), to, TOKENS), pages)
        port.push_cached_upto(TOKENS)
        port.commit(b"token")
        assert ended(receiver)[0] == "complete"
        for mine, his in zip(pages[1:4], to[1:4], strict=True):
            for layer in range(SPEC.num_layers):
                body = slice(64, None)  # after the header, which names the class
                assert bytes_of(ours, mine, layer)[body] == bytes_of(theirs, his, layer)[body]
            assert theirs.class_of(his) == (1 if same_number else 2)
        theirs.decref(to)
    assert ours.stats().io_pages == theirs.stats().held_pages == 0


def test_compressed_pages_go_only_where_they_are_alike() -> None:
    hub = stream.LoopbackHub()
    ours, theirs = Pool(SPEC, 8, huge_pages=False), Pool(SPEC, 16, huge_pages=False)
    pages = ours.alloc(5, run_pages=1)
    filled(ours, pages)
    other = ours.add_class(PageClass(SPEC, [[("k4", "v3"), ("int8", "v4")]] * 4))
    seal_pages(ours, pages[1:4], other)
    with (
        stream.Endpoint(theirs, ["loopback:d"], hub=hub) as receiver,
        stream.Endpoint(ours, hub=hub) as sender,
    ):
        to, _ = receiving(theirs)
        grant = receiver.grant(os.urandom(16), to, TOKENS)
        with pytest.raises(Unsupported, match="allowed: equal page size, layout"):
            sender.open(grant, pages)
        open_ones = theirs.alloc(5, run_pages=1)
        grant = receiver.grant(os.urandom(16), open_ones, TOKENS)
        with pytest.raises(Unsupported, match="page 1 of the list is compressed"):
            sender.open(grant, pages)
        assert ours.stats().io_pages == 0


def test_what_cannot_be_encoded_fails_typed_and_goes_through_open_pages(tmp_path: Path) -> None:
    """One value is not finite: both sides are told Unsupported, and where; open pages take it."""
    ours, theirs = Pool(SPEC, 8, huge_pages=False), Pool(SPEC, 24, huge_pages=False)
    pages = ours.alloc(5, run_pages=1)
    filled(ours, pages)
    k, v = ours.read_slice(pages[2], 1)
    k[7, 0, 3] = 0x7F80  # infinity in bf16
    ours.write_slice(pages[2], 1, k, v)
    with (
        stream.Endpoint(theirs, ["tcp:127.0.0.1:0"], key=KEY, checksums="all") as receiver,
        stream.Endpoint(ours, key=KEY, checksums="all") as sender,
    ):
        to, _ = receiving(theirs)
        port = sender.open(receiver.grant(os.urandom(16), to, TOKENS), pages)
        port.push_cached_upto(TOKENS)
        port.commit(b"token")
        for endpoint in (receiver, sender):
            kind, _, code, message = ended(endpoint)
            assert (kind, code) == ("failed", "Unsupported")
            assert "page 2, layer=1 head=0 K" in str(message) and "open pages" in str(message)
        again = theirs.alloc(5, run_pages=1)
        port = sender.open(receiver.grant(os.urandom(16), again, TOKENS), pages)
        port.push_cached_upto(TOKENS)
        port.commit(b"token")
        assert ended(receiver)[0] == "complete"
        assert theirs.read_slice(again[2], 1)[0][7, 0, 3] == 0x7F80
        until = time.monotonic() + 5
        while ours.stats().io_pages and time.monotonic() < until:
            time.sleep(0.001)
        assert sender.stats().staged_bytes == 0
    assert ours.stats().io_pages == theirs.stats().io_pages == 0
