"""O44 (vllm#46014): a preempted request came back while its transfers still ran.

The hand-over of a request is given up in the middle by either side and the request is admitted
again at once, with the same pages on the prefill side and, freed and had again, on the decode side.
Over 1,000 seeds of when and by whom: nothing stops, the second run is whole and right, and what is
late of the first one lands nowhere.
"""

from __future__ import annotations

import os
import pathlib
import random

import pytest
from support.stream_pages import alloc, stamp_pages, wrong_slices
from support.stream_pair import push, stream_pair

TOKENS = 96
SEEDS = 1000


@pytest.mark.parametrize("link", ["shm", "tcp"])
def test_resumed_at_once_it_is_whole(tmp_path: pathlib.Path, link: str) -> None:
    with stream_pair(tmp_path, link, checksums="all") as pair:
        prefill, decode = pair.prefill, pair.decode
        layers = prefill.pool.spec.num_layers
        for seed in range(SEEDS // 2):
            rng = random.Random(seed)
            pages, _ = alloc(prefill.pool, TOKENS)
            stamp_pages(prefill.pool, pages, seed)
            to, _ = alloc(decode.pool, TOKENS)
            request = os.urandom(16)
            sender = prefill.endpoint.open(decode.endpoint.grant(request, to, TOKENS), pages)
            for layer in range(rng.randrange(layers + 1)):
                sender.publish_upto(layer, rng.choice([32, 64, TOKENS]))
            if rng.random() < 0.5:
                decode.endpoint.release(request)
            else:
                sender.abort("preempted")
                if rng.random() < 0.5:
                    assert decode.event(request)[0] == "failed"
                else:
                    decode.endpoint.release(request)
            decode.pool.decref(to)
            again, _ = alloc(decode.pool, TOKENS)  # the same ones, if nobody holds them any more
            second = os.urandom(16)
            resumed = prefill.endpoint.open(decode.endpoint.grant(second, again, TOKENS), pages)
            push(resumed, TOKENS, layers)
            assert decode.event(second)[0] == "complete", seed
            assert wrong_slices(decode.pool, again, seed) == 0, seed
            prefill.pool.decref(pages)
            decode.pool.decref(again)
        assert prefill.idle() and decode.idle()
        for side in (prefill, decode):
            assert side.pool.stats().held_pages == 0
            assert side.endpoint.stats().refs_lost == 0
