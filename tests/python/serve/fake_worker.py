"""A worker process without a model: speaks the wire protocol, makes tokens from the prompt.

The next token depends on all tokens before it, so an answer that goes on at another worker is
right only if that one got exactly what was delivered. Prefill hands the first token to decode over
a unix socket named by the grant. Every message received is appended to the log file.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

from kvcore import wire
from kvcore.errors import PeerDead


def next_token(tokens: list[int]) -> int:
    """Printable, from everything before."""
    return 97 + (sum(tokens) * 7 + len(tokens) * 3) % 26


def answer(prompt: list[int], count: int) -> list[int]:
    """What any fake worker says to ``prompt``."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class FakeWorker:
    def __init__(self, options: argparse.Namespace) -> None:
        self.o = options
        self.jobs: dict[bytes, asyncio.Task[None]] = {}
        self.reserved: dict[bytes, dict[str, Any]] = {}
        self.seq = 0
        self.incarnation = time.time_ns()
        self.made = 0

    async def run(self) -> None:
        key = Path(self.o.key_file).read_bytes()
        self.grant = f"{self.o.dir}/{os.getpid()}.sock"
        await asyncio.start_unix_server(self.arrival, self.grant)
        self.conn = await wire.connect(self.o.router, key, self.o.role)
        hello = {"worker_id": os.urandom(16), "incarnation": self.incarnation, "role": self.o.role}
        hello |= {"model": "tiny", "model_epoch": "e", "page_spec": self.o.page_spec}
        hello |= {"max_context": 4096, "num_frames": 100, "pid": os.getpid()}
        await self.conn.send("hello", hello)
        kind, fields = await self.conn.recv()
        assert kind == "hello_ack", kind
        self.log("joined", {})
        beat = asyncio.create_task(self.heartbeats(fields["heartbeat_ms"] / 1000))
        try:
            while True:
                kind, fields = await self.conn.recv()
                self.log(kind, fields)
                self.handle(kind, fields)
        except PeerDead:
            beat.cancel()

    def log(self, kind: str, fields: dict[str, Any]) -> None:
        entry = {"pid": os.getpid(), "role": self.o.role, "kind": kind}
        entry["prompt"] = len(fields.get("tokens", []))
        if "request_id" in fields:
            entry["id"] = fields["request_id"].hex()
        with open(f"{self.o.dir}/log", "a") as file:
            file.write(json.dumps(entry) + "\n")

    async def heartbeats(self, period: float) -> None:
        while True:
            if self.o.mute_s:
                await asyncio.sleep(self.o.mute_s)
            fields = {"running": len(self.jobs), "free_frames": 90, "num_frames": 100}
            fields |= {"stats_names": ["made"], "stats_values": [float(self.made)]}
            await self.conn.send("heartbeat", fields)
            await asyncio.sleep(period)

    def handle(self, kind: str, fields: dict[str, Any]) -> None:
        request_id = fields.get("request_id", b"")
        if kind == "cancel":
            self.reserved.pop(request_id, None)
            job = self.jobs.pop(request_id, None)
            if job is not None:
                job.cancel()
        elif self.o.fail:
            more = {"code": self.o.fail, "message": "asked to", "retryable": self.o.retryable}
            self.conn.send_nowait("failed", {"request_id": request_id, **more})
        elif kind == "generate":
            self.jobs[request_id] = asyncio.create_task(self.generate(fields, []))
        elif kind == "reserve":
            self.reserved[request_id] = fields
            grant = {"request_id": request_id, "grant": self.grant.encode(), "cached_tokens": 0}
            self.conn.send_nowait("reserved", grant)
        elif kind == "prefill":
            self.jobs[request_id] = asyncio.create_task(self.prefill(fields))

    async def prefill(self, fields: dict[str, Any]) -> None:
        await asyncio.sleep(self.o.prefill_s)
        _, writer = await asyncio.open_unix_connection(fields["grant"].decode())
        known = {"request_id": fields["request_id"], "computed_tokens": len(fields["tokens"])}
        known |= {"kv_bytes": 100 * len(fields["tokens"]), "transport": "shm", "prefill_s": 0.01}
        first = bytes([next_token(fields["tokens"])])
        writer.write(fields["request_id"] + first + wire.encode("prefilled", known))
        await writer.drain()
        writer.close()
        await asyncio.sleep(self.o.told_s)
        self.conn.send_nowait("prefilled", known)
        self.jobs.pop(fields["request_id"])
        if fields["keys"]:
            self.seq += 1
            event = {"incarnation": self.incarnation, "seq": self.seq, "snapshot": self.seq == 1}
            self.conn.send_nowait("prefix_events", {**event, "stored": fields["keys"]})

    async def arrival(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = await reader.read()
        fields = self.reserved.pop(data[:16], None)
        if fields is not None:
            self.conn.send_nowait(*wire.decode(data[17:]))
            job = asyncio.create_task(self.generate(fields, [data[16]]))
            self.jobs[data[:16]] = job

    async def generate(self, fields: dict[str, Any], given: list[int]) -> None:
        tokens, request_id = list(fields["tokens"]), fields["request_id"]
        for index in range(fields["max_tokens"]):
            token = given[0] if given and index == 0 else next_token(tokens)
            tokens.append(token)
            part = {"request_id": request_id, "first_index": index, "token_ids": [token]}
            if fields["num_logprobs"] >= 0:
                count = fields["num_logprobs"]
                part |= {"logprobs": [-1.0], "top_ids": list(range(40, 40 + count))}
                part |= {"top_logprobs": [-1.0] * count}
            await self.conn.send("tokens", part)
            self.made += 1
            if self.made == self.o.die_after and self.once():
                os._exit(9)
            await asyncio.sleep(self.o.delay_s)
        known = {"request_id": request_id, "reason": "length", "kv_bytes": 5}
        await self.conn.send("finished", {**known, "arrived_fraction": 0.97})
        self.jobs.pop(request_id, None)

    def once(self) -> bool:
        try:
            os.close(os.open(f"{self.o.dir}/died", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("role")
    parser.add_argument("--router", required=True)
    parser.add_argument("--key-file", required=True)
    parser.add_argument("--dir", required=True)
    parser.add_argument("--page-spec", default="page_size=64 format=bf16")
    parser.add_argument("--delay-s", type=float, default=0.0)
    parser.add_argument("--prefill-s", type=float, default=0.0)
    parser.add_argument("--told-s", type=float, default=0.0)
    parser.add_argument("--mute-s", type=float, default=0.0)
    parser.add_argument("--die-after", type=int, default=0)
    parser.add_argument("--fail", default="")
    parser.add_argument("--retryable", type=int, default=1)
    parser.add_argument("--exit", type=int, default=-1)
    parser.add_argument("--restart-s", type=float, default=0.0)
    options = parser.parse_args()
    started = Path(options.dir, f"{options.role}.started")
    if started.exists():  # a real one loads its model first
        time.sleep(options.restart_s)
    started.touch()
    if options.exit >= 0:
        raise SystemExit(options.exit)
    asyncio.run(FakeWorker(options).run())


if __name__ == "__main__":
    main()
