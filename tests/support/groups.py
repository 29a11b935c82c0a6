"""Groups of stream endpoints that hold parts of one model, and pages whose values say where in the
model they belong."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from kvcore import stream
from kvcore.pages import PageSpec, Pool
from kvcore.stream import Share, Side, plan_shares


def values(side: Side, layer: int, first_token: int, num_tokens: int) -> list[np.ndarray]:
    """K and V bits of one layer, as the side with these layers and heads holds them."""
    spec = side.spec
    out = []
    for dim, salt in ((spec.head_dim_k, 0), (spec.head_dim_v, 0 if spec.latent else 7)):
        token = np.arange(first_token, first_token + num_tokens)[:, None, None]
        head = side.head_begin + np.arange(spec.num_kv_heads)[None, :, None]
        mix = (side.layer_begin + layer) * 7919 + token * 31 + head * 104729 + np.arange(dim) * 17
        out.append(((mix + salt) % 16384).astype(np.uint16))
    return out


class Rank:
    """One worker: what it holds of the model, its pool and its endpoint."""

    def __init__(self, side: Side, hub: stream.LoopbackHub, name: str, frames: int = 8) -> None:
        self.side = side
        self.pool = Pool(side.spec, frames, huge_pages=False)
        self.endpoint = stream.Endpoint(
            self.pool, [f"loopback:{name}"], hub=hub, checksums="all",
            layer_begin=side.layer_begin, head_begin=side.head_begin,
        )  # fmt: skip
        self.events: list[tuple[Any, ...]] = []

    def alloc(self, num_tokens: int) -> list[int]:
        return self.pool.alloc(-(-num_tokens // self.side.spec.page_size), run_pages=1)

    def fill(self, pages: Sequence[int]) -> None:
        size = self.side.spec.page_size
        for i, page in enumerate(pages):
            for layer in range(self.side.spec.num_layers):
                self.pool.write_slice(page, layer, *values(self.side, layer, i * size, size))

    def wrong_layers(self, pages: Sequence[int], num_tokens: int) -> int:
        wrong = 0
        for layer in range(self.side.spec.num_layers):
            slices = [self.pool.read_slice(page, layer) for page in pages]
            for part, want in enumerate(values(self.side, layer, 0, num_tokens)):
                have = np.concatenate([s[part] for s in slices])[:num_tokens]
                wrong += not np.array_equal(have, want)
        return wrong

    def wait(self, count: int, seconds: float = 20.0) -> None:
        """Until so many events have come in all."""
        until = time.monotonic() + seconds
        while len(self.events) < count and time.monotonic() < until:
            self.events += self.endpoint.poll()
            time.sleep(0.0005)
        assert len(self.events) == count, self.events


def make_group(
    sides: Sequence[Side], hub: stream.LoopbackHub, name: str, frames: int = 8
) -> list[Rank]:
    return [Rank(side, hub, f"{name}{i}", frames) for i, side in enumerate(sides)]


def send(
    senders: Sequence[Rank], receiver: Rank, num_tokens: int, spread: int = 0
) -> tuple[list[int], list[int]]:
    """One whole hand-over by the plan; the receiver's pages, and which senders gave something."""
    plan = plan_shares([s.side for s in senders], receiver.side, spread)
    to = receiver.alloc(num_tokens)
    grant = receiver.endpoint.grant(
        os.urandom(16), to, num_tokens, shares=[share for _, share in plan]
    )
    for i, (index, _) in enumerate(plan):
        rank = senders[index]
        pages = rank.alloc(num_tokens)
        rank.fill(pages)
        port = rank.endpoint.open(grant, pages, share=i)
        port.push_cached_upto(num_tokens)
        port.commit(b"token")
        rank.pool.decref(pages)  # the hand-over holds them
    return to, [index for index, _ in plan]


def side(
    heads: tuple[int, int], layers: tuple[int, int] = (0, 2), page_size: int = 16, **fields: Any
) -> Side:
    spec = PageSpec(layers[1], heads[1], 32, 16, page_size=page_size, extent_pages=2, **fields)
    return Side(spec, layers[0], heads[0])


def close(ranks: Sequence[Rank]) -> None:
    """Closes the endpoints; every page must be back."""
    for rank in ranks:
        rank.endpoint.close()
        assert rank.pool.stats().io_pages == 0


__all__ = ["Rank", "Share", "Side", "close", "make_group", "send", "side", "values"]
