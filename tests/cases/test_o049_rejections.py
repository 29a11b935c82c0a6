"""O49 (vllm PR#41269): requests that are rejected before they are admitted.

The prefill side's pages of each rejected request were stranded for 480 s. A thousand hand-overs
that the decode side takes back leave both pools as they were, within a second.
"""

from __future__ import annotations

import pathlib

from support.stream_pair import stream_pair

TOKENS = 32


def test_a_thousand_rejections_strand_nothing(tmp_path: pathlib.Path) -> None:
    with stream_pair(tmp_path, "tcp") as pair:
        ours, theirs = pair.prefill.pool.stats(), pair.decode.pool.stats()
        for batch in range(40):
            open_now = [pair.start(TOKENS, stamp=batch) for _ in range(25)]
            for _, request, to, _ in open_now:
                assert pair.decode.endpoint.release(request)
                pair.decode.pool.decref(to)
            for sender, _, _, pages in open_now:
                assert pair.prefill.event(sender.request_id, 1.0)[0] == "failed"
                pair.prefill.pool.decref(pages)
        assert pair.prefill.idle(1.0) and pair.decode.idle(1.0)
        assert pair.prefill.pool.stats().free_frames == ours.free_frames
        assert pair.decode.pool.stats().free_frames == theirs.free_frames
        assert pair.prefill.endpoint.stats().refs_lost == 0
