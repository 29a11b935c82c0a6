"""O24 (Mooncake PR#2570): slice sizes were summed in 32 bits, and an object of 4 GiB overran.

The hand-over of a prompt is told its size before a byte moves; here 4 GiB and more of pages that
are never touched.
"""

from __future__ import annotations

import os

import pytest
from kvcore import stream
from kvcore.pages import PageSpec, Pool


@pytest.mark.parametrize("extra", [0, 1, 3])
def test_a_hand_over_of_4_gib_and_more_has_its_true_size(extra: int) -> None:
    spec = PageSpec(64, 8, 128, page_size=64, extent_pages=1)  # 16 MiB and headers a page
    pages = (1 << 32) // spec.page_bytes + 1 + extra
    pool = Pool(spec, pages, huge_pages=False)
    with stream.Endpoint(pool, ["loopback:big"], hub=stream.LoopbackHub()) as endpoint:
        held = pool.alloc(pages)
        grant = endpoint.grant(os.urandom(16), held, 64 * pages - 5)
        about = stream.describe_grant(grant)
    assert about["kv_bytes"] == pages * spec.page_bytes > 1 << 32
    assert about["num_pages"] == pages and about["num_tokens"] == 64 * pages - 5
