"""Write KV bytes from one host into another's memory, over tcp.

    host A:  python examples/two_hosts.py serve tcp:0.0.0.0:7000 --key-file key     # 32 bytes
    host B:  python examples/two_hosts.py push  tcp:A:7000       --key-file key

`dd if=/dev/urandom of=key bs=32 count=1` makes a key; without one only loopback addresses work.
"""

import argparse
import asyncio
import pathlib
import time

from kvcore.transport import Transport

MB = 64 << 20


async def serve(address: str, key: bytes) -> None:
    with Transport(key=key) as t:
        print("listening on", t.listen(address), flush=True)
        link = await t.accept_async()
        region = t.allocate(MB)
        with region.grant() as grant:
            link.send(grant.token)
            arrival = await link.arrival_async()
        print(f"{arrival.bytes} bytes arrived, tag {arrival.tag}, last byte {region.data[-1]}")


async def push(address: str, key: bytes) -> None:
    with Transport(key=key) as t:
        link = t.connect(address)
        region = t.allocate(MB)
        region.data[:] = bytes(range(256)) * (MB // 256)
        token = await link.recv_async(timeout_s=10)
        start = time.perf_counter()
        moved = await link.write(region, [(0, 0, MB)], token, tag=42, deadline_s=30)
        print(
            f"{moved / (time.perf_counter() - start) / 1e9:.2f} GB/s over {link.info()['scheme']}"
        )


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("what", choices=["serve", "push"])
parser.add_argument("address")
parser.add_argument("--key-file", type=pathlib.Path)
args = parser.parse_args()
secret = args.key_file.read_bytes() if args.key_file else b""
asyncio.run({"serve": serve, "push": push}[args.what](args.address, secret))
