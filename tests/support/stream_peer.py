"""The other process of the two-process stream tests: commands as JSON lines on stdin.

{"do": "grant", "tokens": n, "deadline_s": s}             -> grant, request (hex), pages
{"do": "open", "grant": hex, "tokens": n, "stamp": i}     -> request, or error and message
{"do": "publish", "request": hex, "layers": [...], "upto": n}
{"do": "commit" | "abort" | "release", "request": hex}
{"do": "wait", "seconds": s}                              -> events (possibly none)
{"do": "check", "pages": [...], "stamp": i}               -> wrong: number of slices that differ
{"do": "stats"}                                           -> io_pages, acked, links, refs_lost
"""

from __future__ import annotations

import json
import os
import select
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from kvcore import stream
from kvcore.errors import KvcoreError

from support.stream_pages import alloc, make_pool, stamp_pages, wrong_slices


class Peer:
    def __init__(self, options: dict[str, Any]) -> None:
        self.pool = make_pool(**options.pop("spec", {}))
        key = bytes.fromhex(options.pop("key", ""))
        self.endpoint = stream.Endpoint(self.pool, options.pop("listen", []), key=key, **options)
        self.senders: dict[str, stream.Sender] = {}
        self.owned: dict[str, list[int]] = {}

    def grant(self, tokens: int, deadline_s: float = 30.0) -> dict[str, Any]:
        request = os.urandom(16)
        pages, self.owned[request.hex()] = alloc(self.pool, tokens)
        grant = self.endpoint.grant(request, pages, tokens, deadline_s=deadline_s)
        return {"grant": grant.hex(), "request": request.hex(), "pages": pages}

    def open(self, grant: str, tokens: int, stamp: int) -> dict[str, Any]:
        pages, owned = alloc(self.pool, tokens)
        stamp_pages(self.pool, pages, stamp)
        try:
            sender = self.endpoint.open(bytes.fromhex(grant), pages)
        except KvcoreError as error:
            return {"error": type(error).__name__, "message": str(error)}
        self.senders[sender.request_id.hex()] = sender
        self.owned[sender.request_id.hex()] = owned
        return {"request": sender.request_id.hex(), "pages": pages}

    def publish(self, request: str, layers: list[int], upto: int) -> dict[str, Any]:
        for layer in layers:
            self.senders[request].publish_upto(layer, upto)
        return {}

    def commit(self, request: str) -> dict[str, Any]:
        self.senders[request].mark()
        self.senders[request].commit(b"payload " + request.encode())
        return {}

    def abort(self, request: str) -> dict[str, Any]:
        self.senders[request].abort("stopped by the test")
        return {}

    def release(self, request: str, reuse: int = 0) -> dict[str, Any]:
        """Fences; with ``reuse`` the pages are freed and belong to somebody else at once."""
        done = self.endpoint.release(bytes.fromhex(request))
        if reuse:
            pages = self.owned.pop(request)
            self.pool.decref(pages)
            assert set(self.pool.alloc(len(pages))) == set(pages)  # the warmest frames come first
            stamp_pages(self.pool, pages, reuse)
        return {"done": done, "io_pages": self.pool.stats().io_pages}

    def wait(self, seconds: float = 10.0) -> dict[str, Any]:
        select.select([self.endpoint.event_fd], [], [], seconds)
        return {"events": [_plain(e) for e in self.endpoint.poll()]}

    def check(self, pages: list[int], stamp: int) -> dict[str, Any]:
        return {"wrong": wrong_slices(self.pool, pages, stamp)}

    def stats(self) -> dict[str, Any]:
        return {
            "io_pages": self.pool.stats().io_pages,
            "acked": sum(s.bytes_sent for s in self.senders.values()),
            "links": list(self.endpoint.stats().links),
            "refs_lost": self.endpoint.stats().refs_lost,
        }


def _plain(event: tuple[Any, ...]) -> dict[str, Any]:
    kind, request, *rest = event
    out = {"kind": kind, "request": request.hex()}
    if kind == "failed":
        return {**out, "code": rest[0], "message": rest[1]}
    if kind == "complete":
        out["payload"] = rest.pop(0).decode()
    return {**out, **vars(rest[0])}


def main() -> None:
    peer = Peer(json.loads(sys.argv[1]))
    print(json.dumps({"addresses": list(peer.endpoint.addresses)}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "quit":
            break
        answer = getattr(peer, command.pop("do"))(**command)
        print(json.dumps(answer), flush=True)
    peer.endpoint.close()
    print(json.dumps({"io_pages": peer.pool.stats().io_pages}), flush=True)


if __name__ == "__main__":
    main()
