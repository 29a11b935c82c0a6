"""O40 (TensorRT-LLM#12540), O42 (sglang#30233): a prefill side that gives up while it sends.

A sequence was removed while its pages were read by the sender; a decode side went on with the
part that had come. An abort at any moment ends the hand-over on both sides, nothing is ever
complete without all layers, and the sender's pages are its own again at once.
"""

from __future__ import annotations

import pathlib
import time

import pytest
from support.stream_pages import stamp_pages
from support.stream_pair import push, stream_pair

TOKENS = 192


@pytest.mark.parametrize("link", ["shm", "tcp"])
@pytest.mark.parametrize("layers", [0, 1, 3, 5, 6])
def test_an_abort_ends_both_sides(tmp_path: pathlib.Path, link: str, layers: int) -> None:
    with stream_pair(tmp_path, link, pacing_bytes_per_s=2_000_000) as pair:
        sender, request, to, pages = pair.start(TOKENS, stamp=1)
        for layer in range(layers):
            sender.publish_upto(layer, TOKENS)
        time.sleep(0.02 * layers)
        sender.abort("the input is too long")
        assert pair.prefill.idle()
        stamp_pages(pair.prefill.pool, pages, 9)  # freed and used again
        kind, _, code, message = pair.decode.event(request)
        assert kind == "failed" and code == "Cancelled", message
        if layers:
            assert "the input is too long" in message
        assert pair.decode.idle()
        assert pair.decode.endpoint.stats().completed == 0
        pair.decode.pool.decref(to)
        # Both serve on.
        other, second, _, _ = pair.start(TOKENS, stamp=3)
        push(other, TOKENS, pair.prefill.pool.spec.num_layers)
        assert pair.decode.event(second)[0] == "complete"
