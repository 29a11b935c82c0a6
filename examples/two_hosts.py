"""Write KV bytes from one host into another's memory.

host A:  python examples/two_hosts.py serve tcp:0.0.0.0:7000 --key-file key     # 32 bytes
host B:  python examples/two_hosts.py push  tcp:A:7000       --key-file key
"""

import argparse
import pathlib

import numpy as np
from kvcore.transport import Transport

parser = argparse.ArgumentParser()
parser.add_argument("side", choices=["serve", "push"])
parser.add_argument("address")
parser.add_argument("--key-file", type=pathlib.Path, help="without one, loopback and shm only")
args = parser.parse_args()
with Transport(key=args.key_file.read_bytes() if args.key_file else b"") as t:
    pages = t.allocate(1024 << 16)  # 1,024 pages of 64 KiB
    if args.side == "serve":
        print("listening on", t.listen(args.address), flush=True)
        link = t.accept()
        with pages.grant() as grant:
            link.send(grant.token)
            arrival = link.arrival()
        print(f"{arrival.bytes} bytes arrived, tag {arrival.tag}, last byte {pages.data[-1]}")
    else:
        pages.data[:] = bytes(range(256)) * (pages.nbytes // 256)
        link, at = t.connect(args.address), np.arange(1024) << 16
        blocks = np.stack([at, at[::-1], np.full(1024, 1 << 16)], axis=1)  # in reverse order
        moved = link.write(pages, blocks, link.recv(10), tag=42, deadline_s=30).wait()
        print(f"{moved} bytes written over {link.info()['scheme']}")
