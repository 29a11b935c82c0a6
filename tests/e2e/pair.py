"""Engines over a model, alone or as a pair joined by a stream, driven by one thread."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from kvcore import kernels
from kvcore.compress import PROFILES, profile_class
from kvcore.pages import PageSpec, Pool, page_ids_for
from kvcore.stream import Endpoint, LoopbackHub
from kvcore.worker.engine import Engine
from kvcore.worker.handoff import DecodeEngine, PrefillEngine
from kvcore.worker.memory import PageMemory
from kvcore.worker.request import Request

VOCAB = 160
EXTENT_PAGES = 2
_ids = itertools.count(1)


def make_tiny_llama(directory: Path) -> Path:
    """A random Llama whose logits are far from flat."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=100,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.1,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def prompt(size: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([size, seed]).integers(3, VOCAB, size).tolist()


def request(tokens: Sequence[int], max_tokens: int = 8, **options: Any) -> Request:
    options = {"namespace": b"n" * 32, "ignore_eos": 1} | options
    name = next(_ids).to_bytes(16, "big")
    return Request(name, np.asarray(tokens, np.int32), max_tokens, **options)


def parts(
    model: Any, page_size: int, frames: int, profile: str = "exact"
) -> tuple[Any, PageMemory, Any]:
    config, own = model.config, model.page_spec(page_size)
    spec = PageSpec(  # small frames, so that a sequence has several
        config.num_layers,
        config.num_kv_heads,
        config.head_dim,
        page_size=page_size,
        extent_pages=EXTENT_PAGES,
        format=own.format,
    )
    names = PROFILES[1 : PROFILES.index(profile) + 1]
    classes = {name: profile_class(spec, name) for name in names}
    page_ids = page_ids_for(classes[profile], frames) if classes else 0
    pool = Pool(spec, frames, huge_pages=False, page_ids=page_ids)
    plan = kernels.AttentionPlan(pool, config.num_q_heads, **config.attention_options)
    return model, PageMemory(pool, classes=classes), plan


def make_mono(
    model: Any, page_size: int = 16, frames: int = 64, profile: str = "exact", **options: Any
) -> Engine:
    return Engine(*parts(model, page_size, frames, profile), **options)


@dataclass
class Answer:
    """What a request came to."""

    tokens: list[int] = field(default_factory=list)
    told: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] = field(default_factory=dict)
    prefilled: dict[str, Any] = field(default_factory=dict)
    failed: dict[str, Any] = field(default_factory=dict)


def take(answers: dict[bytes, Answer], outputs: Sequence[Any]) -> None:
    for kind, fields in outputs:
        answer = answers.setdefault(fields["request_id"], Answer())
        if kind == "tokens":
            assert fields["first_index"] == len(answer.tokens)
            answer.tokens += fields["token_ids"]
            answer.told.append(fields)
        elif kind == "prefilled":
            answer.prefilled = fields
        else:
            assert not answer.end and not answer.failed
            setattr(answer, "end" if kind == "finished" else kind, fields)


def run_mono(engine: Engine, *requests: Request) -> list[Answer]:
    answers: dict[bytes, Answer] = {}
    for each in requests:
        engine.add(each)
    while engine.has_work:
        take(answers, engine.step())
    return [answers[each.request_id] for each in requests]


def assert_baseline(engine: Engine) -> None:
    """Nothing but the prefix cache holds pages, and without it the pool is empty."""
    assert engine.memory.owned_pages == 0
    engine.memory.tree.clear()
    until = time.monotonic() + 5
    while (stats := engine.memory.pool.stats()).free_frames < stats.num_frames:
        assert time.monotonic() < until, stats
        time.sleep(0.002)


class Pair:
    """A prefill and a decode engine on this machine; the test plays the router."""

    def __init__(
        self,
        model: Any,
        link: str = "loopback",
        page_size: int = 16,
        frames: int = 64,
        decode_frames: int = 0,
        directory: Path | None = None,
        decode_endpoint: dict[str, Any] | None = None,
        prefill_endpoint: dict[str, Any] | None = None,
        profile: str = "exact",
        prefill_page_size: int = 0,
        **options: Any,
    ) -> None:
        hub = LoopbackHub() if link == "loopback" else None
        key = b"k" * 32 if link == "tcp" else b""
        listen = {
            "loopback": "loopback:decode",
            "shm": f"shm:{directory}/decode.sock",
            "tcp": "tcp:127.0.0.1:0",
        }[link]
        prefill = parts(model, prefill_page_size or page_size, frames)
        decode = parts(model, page_size, decode_frames or frames, profile)
        self.sender = Endpoint(prefill[1].pool, [], key=key, hub=hub, **(prefill_endpoint or {}))
        self.receiver = Endpoint(
            decode[1].pool, [listen], key=key, hub=hub, **(decode_endpoint or {})
        )
        self.prefill = PrefillEngine(*prefill, endpoint=self.sender, **options)
        self.decode = DecodeEngine(*decode, endpoint=self.receiver, **options)
        self.requests: dict[bytes, Request] = {}
        self.answers: dict[bytes, Answer] = {}
        self.sent: dict[bytes, dict[str, Any]] = {}  # what the prefill side told of them

    def submit(self, each: Request) -> None:
        self.requests[each.request_id] = each
        self.decode.add(each)

    def cancel(self, request_id: bytes) -> None:
        self.prefill.cancel(request_id)
        self.decode.cancel(request_id)

    def turn(self) -> None:
        """One step of both sides, and the messages between them."""
        told, steps = self.decode.step(), self.steps
        for kind, fields in told:
            if kind == "reserved":
                each = self.requests[fields["request_id"]]
                self.prefill.prefill(each, fields["grant"], fields["cached_tokens"])
        take(self.answers, [output for output in told if output.kind != "reserved"])
        for output in self.prefill.step():
            if output.kind == "prefilled":
                self.sent[output.fields["request_id"]] = output.fields
        if self.steps == steps:
            time.sleep(0.0002)

    @property
    def steps(self) -> int:
        return self.prefill.counters["steps"] + self.decode.counters["steps"]

    def run(self, *requests: Request) -> list[Answer]:
        for each in requests:
            self.submit(each)
        while self.prefill.has_work or self.decode.has_work:
            self.turn()
        return [self.answers[each.request_id] for each in requests]

    def close(self) -> None:
        self.receiver.close()
        self.sender.close()

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
        for engine in (self.prefill, self.decode):
            if error[0] is None:
                assert_baseline(engine)
