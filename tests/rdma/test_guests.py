"""RDMA for real, over Soft-RoCE in QEMU guests: `make test-rdma` (never part of a plain pytest).

The programs are those of the C++ build in $KVCORE_BUILD (default build/release); guests see them
where they lie.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import kvcore
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).resolve().parent))

from vm import Death, Guest, run  # noqa: E402

BUILD = (ROOT / os.environ.get("KVCORE_BUILD", "build/release")).resolve()
PROGRAMS = BUILD / "tests/cpp/transport"
CLUSTER = Path(__file__).with_name("cluster.py")
ROUNDS = 4
ROUND_BYTES = 4 << 20
MTU_BYTES = 4096
PACKETS = "cat /sys/class/infiniband/rxe0/ports/1/hw_counters/sent_pkts"

pytestmark = pytest.mark.nightly


def passed(guest: Guest) -> int:
    """How many GoogleTest cases passed; fails with the guest's words when one did not."""
    assert guest.code == 0, guest.output[-6000:]
    assert "SKIPPED" not in guest.output, guest.output[-3000:]
    found = re.search(r"\[  PASSED  \] (\d+) tests?", guest.output)
    assert found, guest.output[-3000:]
    return int(found[1])


def test_device() -> None:
    """Windows, fences, replays and counters of a real device."""
    (guest,) = run([f"{PROGRAMS}/test_rdma_device --gtest_color=no"], timeout_s=200)
    assert passed(guest) == 7


def test_conformance(record_property: Callable[[str, object], None]) -> None:
    """What link.h promises, over rdma with two rails, as over every other link."""
    command = (
        f"{PROGRAMS}/test_transport --gtest_color=no"
        " --gtest_filter='*Conformance*/rdma:*Credited*/rdma'"
    )
    (guest,) = run([command], timeout_s=600)
    record_property("passed", passed(guest))
    assert passed(guest) >= 34


@pytest.fixture
def share(tmp_path: Path) -> Path:
    """A folder both guests see, with the program in it."""
    shutil.copy(PROGRAMS / "test_rdma_two_hosts", tmp_path / "two_hosts")
    return tmp_path


def pair(
    share: Path,
    before: str = "true",
    rounds: int = ROUNDS,
    death: Death | None = None,
    timeout_s: float = 200,
) -> tuple[Guest, Guest]:
    """Owner in guest 0, writer in guest 1; `before` runs in the writer's guest first."""
    owner, writer = run(
        [
            f"./two_hosts owner /share {rounds}; code=$?; sleep 1; exit $code",
            f"{before}; ./two_hosts writer /share; code=$?; {PACKETS} > /share/packets; exit $code",
        ],
        share=share,
        timeout_s=timeout_s,
        death=death,
    )
    return owner, writer


def test_two_hosts_and_the_device_counts_the_bytes(
    share: Path, record_property: Callable[[str, object], None]
) -> None:
    owner, writer = pair(share)
    assert owner.code == 0, owner.output + writer.output
    assert writer.code == 0, owner.output + writer.output
    packets = int((share / "packets").read_text())
    record_property("payload_bytes", ROUNDS * ROUND_BYTES)
    record_property("packets_of_the_device", packets)
    assert packets * MTU_BYTES >= ROUNDS * ROUND_BYTES


def test_one_percent_loss_changes_nothing(share: Path) -> None:
    owner, writer = pair(share, before="guest-net loss 1")
    assert owner.code == 0, owner.output + writer.output
    assert writer.code == 0, owner.output + writer.output


def wait_then(action: str) -> str:
    """A shell line that acts once the first round is over."""
    return f"(until [ -e /share/round ]; do sleep 0.1; done; {action}) &"


def test_a_partition_is_reported_by_both_sides(share: Path) -> None:
    cut = wait_then("guest-net partition")
    owner, writer = pair(share, before=f"{cut} true", rounds=100_000)
    for guest in (owner, writer):
        assert guest.code == 3, owner.output + writer.output
    assert re.search(r"DOWN: (PeerHung|PeerDead|peer)", owner.output, re.I), owner.output


def test_a_dead_host_is_reported(share: Path) -> None:
    owner, writer = pair(share, rounds=100_000, death=Death(guest=1, after_s=25))
    assert owner.code == 3, owner.output + writer.output
    assert "DOWN" in owner.output


def test_router_prefill_and_decode_on_two_hosts(
    share: Path, record_property: Callable[[str, object], None]
) -> None:
    """The real router, wire, stream and pages; a stand-in model whose pages are stamps."""
    python = f"PYTHONPATH={Path(kvcore.__file__).parents[1]} {sys.executable} {CLUSTER}"
    count = f"code=$?; {PACKETS} > /share/packets; exit $code"
    serve, prefill = run(
        [f"{python} serve rdma:10.77.0.1:0 /share 12", f"{python} prefill /share; {count}"],
        share=share,
        timeout_s=400,
        memory_mib=2048,
    )
    assert serve.code == 0 and prefill.code == 0, serve.output + prefill.output
    told = json.loads((share / "result.json").read_text())
    assert told["right"] == told["requests"] == 12 and told["wrong_slices"] == 0, told
    assert told["transports"] == ["rdma"] and told["retries"] == 0, told
    packets = int((share / "packets").read_text())
    for name, value in (told | {"packets_of_the_device": packets}).items():
        record_property(name, value)
    assert packets * MTU_BYTES >= told["kv_bytes"] > 0, told
