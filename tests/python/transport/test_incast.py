"""Eight senders at once: what is under way stays within the receiver's credits, all get a share.

Each on a host of its own (a network namespace); the receiver's port is shaped by tbf.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support import netns
from support.incast import SLACK, SWITCH_QUEUE, Incast

SENDERS = 8
RATE = 25e6
CREDITS = 2 << 20


@pytest.fixture(scope="module")
def incast() -> Iterator[Incast]:
    if why := netns.missing():
        pytest.skip(f"no shaped network namespaces: {why}")
    made = Incast(SENDERS, RATE, SWITCH_QUEUE, CREDITS)
    yield made
    made.close()


def test_eight_senders_share_one_port_and_the_credits(incast: Incast) -> None:
    alone = incast.run(1, seconds=1.0)
    together = incast.run(SENDERS, seconds=2.5)
    assert together.lost == alone.lost == []
    assert len(together.rates) == SENDERS and min(together.rates) > 0
    assert together.under_way_bytes <= CREDITS + SENDERS * SLACK
    assert together.grown_bytes <= CREDITS
    assert together.dropped == 0
    assert together.fairness >= 0.95
    assert together.goodput >= 0.9 * alone.goodput


def test_the_measure_sees_what_credits_hold_back(incast: Incast) -> None:
    """With credits for all that is posted, far more is under way: the bound above is theirs."""
    incast.credit_bytes = 64 << 20
    try:
        assert incast.run(4, seconds=0.5).under_way_bytes > CREDITS + SENDERS * SLACK
    finally:
        incast.credit_bytes = CREDITS
