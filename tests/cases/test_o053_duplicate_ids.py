"""O53 (sglang#40125): a request id that is used twice.

Two requests with one client-chosen id crashed both schedulers. Our ids are 16 random bytes; one
that is in use is refused, the first is unaffected, and it may be used again once the first has
ended.
"""

from __future__ import annotations

import pathlib

import pytest
from kvcore.errors import InvalidArgument
from support.stream_pages import alloc
from support.stream_pair import push, stream_pair

TOKENS = 40


def test_the_second_is_refused_the_first_unaffected(tmp_path: pathlib.Path) -> None:
    with stream_pair(tmp_path, "tcp") as pair:
        sender, request, _, _ = pair.start(TOKENS, stamp=1)
        more, _ = alloc(pair.decode.pool, TOKENS)
        with pytest.raises(InvalidArgument, match="request"):
            pair.decode.endpoint.grant(request, more, TOKENS)
        push(sender, TOKENS, pair.prefill.pool.spec.num_layers)
        assert pair.decode.event(request)[0] == "complete"
        pair.decode.endpoint.grant(request, more, TOKENS)
        assert pair.decode.endpoint.release(request)


@pytest.mark.parametrize("request_id", [b"", b"0", bytes(15), bytes(17), b"x" * (1 << 20)])
def test_no_other_form_of_an_id_is_taken(tmp_path: pathlib.Path, request_id: bytes) -> None:
    with stream_pair(tmp_path, "tcp") as pair:
        pages, _ = alloc(pair.decode.pool, TOKENS)
        with pytest.raises(InvalidArgument, match="16"):
            pair.decode.endpoint.grant(request_id, pages, TOKENS)
        assert pair.decode.pool.stats().io_pages == 0
