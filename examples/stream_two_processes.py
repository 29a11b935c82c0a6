"""Hand KV pages from a prefill process to a decode process while they are computed.

decode:   python examples/stream_two_processes.py decode          # prints a grant and waits
prefill:  python examples/stream_two_processes.py prefill GRANT   # a router would carry it
"""

import argparse
import asyncio
import secrets

import numpy as np
from kvcore.kernels import AttentionPlan
from kvcore.pages import PageSpec, Pool
from kvcore.stream import Endpoint

TOKENS, CHUNK, LAYERS, HEADS, DIM = 200, 64, 4, 2, 64


async def end_of(endpoint):
    async for event in endpoint.events():
        if event[0] == "failed":
            raise SystemExit(f"{event[2]}: {event[3]}")
        if event[0] != "layer":
            return event
        print(f"layer {event[2]} is in place", flush=True)


def decode(pool, pages, address):
    with Endpoint(pool, [address]) as endpoint:
        grant = endpoint.grant(secrets.token_bytes(16), pages, TOKENS, tell_layers=True)
        print(grant.hex(), flush=True)
        _, _, payload, stats = asyncio.run(end_of(endpoint))
        print(f"complete: {payload.decode()}, {stats.bytes} bytes over {stats.transport}")


def prefill(pool, pages, grant):
    with Endpoint(pool) as endpoint:
        sender, plan = endpoint.open(grant, pages), AttentionPlan(pool, num_q_heads=HEADS)
        for begin in range(0, TOKENS, CHUNK):
            n = min(CHUNK, TOKENS - begin)
            plan.prepare([0, n], [begin + n], [pages])
            for layer in range(LAYERS):
                q, k, v = np.random.default_rng(layer).random((3, n, HEADS, DIM), np.float32)
                plan.append(layer, k, v)
                sender.publish_upto(layer, begin + n)  # on its way while the layer attends
                plan.attend(layer, q, np.empty_like(q))
        sender.commit(b"first token: 42")
        print(f"sent: {asyncio.run(end_of(endpoint))[2].bytes} bytes")


parser = argparse.ArgumentParser()
parser.add_argument("side", choices=["decode", "prefill"])
parser.add_argument("grant", nargs="?", type=bytes.fromhex)
parser.add_argument("--listen", default="tcp:127.0.0.1:0", help="or shm:/path.sock")
args = parser.parse_args()
spec = PageSpec(LAYERS, HEADS, DIM, page_size=16, format="f32")
pool = Pool(spec, num_frames=16)
pages = pool.alloc(-(-TOKENS // spec.page_size))[: -(-TOKENS // spec.page_size)]
decode(pool, pages, args.listen) if args.side == "decode" else prefill(pool, pages, args.grant)
print("K of the last token:", pool.read_slice(pages[-1], LAYERS - 1)[0][(TOKENS - 1) % 16, 0, :3])
