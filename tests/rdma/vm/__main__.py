"""Run a command in one guest, or one command in each of two.

python tests/rdma/vm -- ibv_devinfo
python tests/rdma/vm --share build/guest -- ./my_test            # /share, the working directory
python tests/rdma/vm --second 'ib_write_bw -d rxe0' -- 'sleep 3; ib_write_bw -d rxe0 10.77.0.2'

The exit code is that of the first command; 124 when the time ran out, 125 when no guest came up.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vm import Death, GuestError, run
from vm.machine import FAILED


def main() -> int:
    """Parse the command line, run, print what the guests wrote."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--share", type=Path, help="folder mounted read-write at /share")
    parser.add_argument("--second", help="command of a second guest (10.77.0.2)")
    parser.add_argument("--kill-second-after", type=float, metavar="SECONDS")
    parser.add_argument("--timeout", type=float, default=300, metavar="SECONDS")
    parser.add_argument("--memory", type=int, default=1536, metavar="MIB")
    parser.add_argument("--cpus", type=int, default=2)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    words = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not words:
        parser.error("no command given")
    first = words[0] if len(words) == 1 else shlex.join(words)
    death = None if args.kill_second_after is None else Death(1, args.kill_second_after)
    try:
        guests = run(
            [first] if args.second is None else [first, args.second],
            share=args.share,
            timeout_s=args.timeout,
            memory_mib=args.memory,
            cpus=args.cpus,
            death=death,
        )
    except GuestError as error:
        print(error, file=sys.stderr)
        return FAILED
    for guest in guests:
        if len(guests) > 1:
            print(f"== guest {guest.number}: exit code {guest.code}, {guest.seconds:.1f} s")
        print(guest.output, end="")
    return guests[0].code


if __name__ == "__main__":
    sys.exit(main())
