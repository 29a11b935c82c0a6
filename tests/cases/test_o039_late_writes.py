"""O39 (sglang#24527), O45 (vllm#21570): writes that come after their pages belong to somebody else.

A decode side aborted a request, gave its pages to another, and the late write of the first landed
in them; a prefill side's timeout freed pages that were then read as if they were still the old
ones. Fence first, then free: what is late is refused, and the new owner's contents stay.
"""

from __future__ import annotations

import pathlib
import time

import pytest
from support.stream_pages import stamp_pages, wrong_slices
from support.stream_pair import push, stream_pair

TOKENS = 192  # whole extents: what is allocated is what is sent
SLOW = 500_000  # bytes/s: the whole hand-over takes most of a second


@pytest.mark.parametrize("link", ["shm", "tcp"])
@pytest.mark.parametrize("how", ["released", "expired"])
def test_pages_that_were_given_away_keep_their_new_contents(
    tmp_path: pathlib.Path, link: str, how: str
) -> None:
    with stream_pair(tmp_path, link, pacing_bytes_per_s=SLOW) as pair:
        deadline = 0.3 if how == "expired" else 30.0
        sender, request, to, pages = pair.start(TOKENS, stamp=1, deadline_s=deadline)
        push(sender, TOKENS, pair.prefill.pool.spec.num_layers)
        if how == "released":
            time.sleep(0.2)  # some have landed, most are still to come
            assert pair.decode.endpoint.release(request)
        else:
            assert pair.decode.event(request)[2] == "Timeout"
        pair.decode.pool.decref(to)
        again = pair.decode.pool.alloc(len(to))  # a pool's warmest pages come first
        assert set(again) <= set(to)
        stamp_pages(pair.decode.pool, again, 2)
        event = pair.prefill.event(sender.request_id)
        assert event[0] == "failed" and event[2] in ("Cancelled", "Stale", "Timeout")
        time.sleep(0.3)
        assert wrong_slices(pair.decode.pool, again, 2) == 0
        assert pair.prefill.idle() and pair.decode.idle()
        pair.prefill.pool.decref(pages)
