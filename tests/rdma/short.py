"""The short part, in CI after the C++ build: link conformance over Soft-RoCE in one guest.

    python tests/rdma/short.py BUILD        BUILD: the CMake build folder with test_transport

Standard library only. Fails where it cannot run: without QEMU, a kernel, or the rdma link. What is
slow in an emulated guest runs there nightly (test_guests.py) and over fake NICs in every run.
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from vm import GuestError, run

LIMIT_S = 300  # of a busy machine; about 60 s on a quiet one
AT_LEAST = 28  # tests; fewer means that the guest had no device or the filter has gone stale
SLOW = (
    "*WritesThatFailGiveTheirCreditsBack*",
    "*ThousandRandomOperationsWithRandomCancelsEndClean*",
    "*EveryClassMovesWithoutAnyTimer*",
    "*ManySegmentsInOneOperation*",
    "*ASlowApplicationNeitherHidesItsPeerNorHoldsUpItsOwnOperations*",
)
FILTER = "*Conformance*/rdma:*Credited*/rdma:-" + ":".join(SLOW)


def main(build: str) -> int:
    """The exit code; what went wrong goes to stderr."""
    program = Path(build).resolve() / "tests/cpp/transport/test_transport"
    if not program.exists():
        print(f"{program} is not there: build with -DKVCORE_TESTS=ON", file=sys.stderr)
        return 2
    began = time.monotonic()
    try:
        (guest,) = run([f"{program} --gtest_color=no --gtest_filter='{FILTER}'"], timeout_s=LIMIT_S)
    except (GuestError, OSError, RuntimeError) as error:
        print(f"no guest: {error}", file=sys.stderr)
        return 1
    found = re.search(r"\[  PASSED  \] (\d+) tests?", guest.output)
    passed = int(found[1]) if found else 0
    if guest.code != 0 or "SKIPPED" in guest.output or passed < AT_LEAST:
        print(guest.output[-8000:], file=sys.stderr)
        print(f"{passed} tests passed, exit code {guest.code}", file=sys.stderr)
        return 1
    print(
        f"{passed} tests passed over Soft-RoCE in {time.monotonic() - began:.0f} s, boot included"
    )
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
