"""A model whose next token is a hash of all tokens in its pages: wrong pages give other tokens.

HashPlan keeps one number per page slot (the token id, read from K) and answers each query row with
a hash of everything the row's block table shows it; HashModel turns the hash into logits.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
from kvcore.compress import PROFILES, profile_class
from kvcore.model.sampling import sample
from kvcore.pages import PageClass, PageSpec, Pool, page_ids_for
from kvcore.worker.engine import Engine
from kvcore.worker.memory import PageMemory
from kvcore.worker.request import Output, Request

VOCAB = 97
EOS = 96
_PRIME = 1_000_003
_WEIGHTS = np.random.default_rng(7).integers(1, _PRIME, size=8192)
_TABLES = torch.from_numpy(np.random.default_rng(8).normal(size=(2, 1009, VOCAB)).astype("float32"))


def hashes(tokens: np.ndarray) -> np.ndarray:
    """Per position, the hash of the tokens up to and with it."""
    return np.cumsum((tokens + 1) * _WEIGHTS[: tokens.size] % _PRIME) % _PRIME


def logits_of(hashed: np.ndarray) -> torch.Tensor:
    index = torch.from_numpy(hashed.astype(np.int64))
    logits = _TABLES[0][index % 1009] + _TABLES[1][index // 1009 % 1009]
    logits[:, EOS] -= 1.0
    return logits


def _floats(pointer: int, rows: int, stride: int) -> np.ndarray:
    flat = (ctypes.c_float * (rows * stride)).from_address(pointer)
    return np.ctypeslib.as_array(flat).reshape(rows, stride)


class HashPlan:
    def __init__(self, pool: Pool) -> None:
        stats = pool.stats()
        self.page_size = pool.spec.page_size
        self.slots = np.full(stats.num_pages * self.page_size, -1, dtype=np.int64)

    def prepare(self, cu_seqlens_q, context_lens, block_table) -> None:
        self.cu, self.context, self.table = cu_seqlens_q, context_lens, block_table

    def run_ptr(self, layer, q, q_stride, k, k_stride, v, v_stride, out, lse, dtype) -> None:
        assert dtype == 0 and layer == 0
        total = int(self.cu[-1])
        keys = _floats(k, total, k_stride)[:, 0].astype(np.int64)
        answers = _floats(out, total, 2)
        offsets = np.arange(self.page_size)
        for i, context in enumerate(self.context):
            low, high = self.cu[i], self.cu[i + 1]
            slots = (self.table[i][:, None] * self.page_size + offsets).reshape(-1)[:context]
            self.slots[slots[context - (high - low) :]] = keys[low:high]
            answers[low:high, 0] = hashes(self.slots[slots])[context - (high - low) :]


class ClearedPool(Pool):
    """Gives pages of zeros: no kernel writes them here, and what sealed ones leave may be NaN."""

    def alloc(self, *args):
        pages = super().alloc(*args)
        for page in pages:
            for layer in range(self.spec.num_layers):
                ctypes.memset(self.slice_address(page, layer), 0, self.spec.slice_bytes)
        return pages


class HashModel:
    def __init__(self, max_position: int = 512) -> None:
        self.config = SimpleNamespace(
            max_position=max_position, vocab_size=VOCAB, eos_ids=(EOS,), num_q_heads=1
        )
        self.rows_seen: list[int] = []

    def forward(self, tokens, positions, attend, logits_rows):
        self.rows_seen.append(len(tokens))
        k = tokens.to(torch.float32).view(-1, 1, 1).repeat(1, 1, 2)
        out = attend(0, k, k, k)
        return logits_of(out[logits_rows, 0].numpy())


@dataclass
class Rig:
    pool: Pool
    memory: PageMemory
    plan: HashPlan
    model: HashModel


def offered(spec: PageSpec, profile: str) -> dict[str, PageClass]:
    """As ``compress.profile_classes``, with one format everywhere instead of calibrated ones."""
    names = PROFILES[1 : PROFILES.index(profile) + 1]
    return {name: profile_class(spec, name) for name in names}


def rig(
    num_frames: int = 64,
    page_size: int = 16,
    extent: int = 2,
    max_position: int = 512,
    secret: bytes | None = None,
    profile: str = "",
) -> Rig:
    """``profile``: "" takes small float32 pages, a KV profile bf16 pages as models have them."""
    heads, dim, fmt = (8, 128, "bf16") if profile else (1, 32, "f32")
    spec = PageSpec(1, heads, dim, page_size=page_size, extent_pages=extent, format=fmt)
    classes = offered(spec, profile or "exact")
    page_ids = page_ids_for(classes[profile], num_frames) if classes else 0
    pool = ClearedPool(spec, num_frames, huge_pages=False, page_ids=page_ids)
    memory = PageMemory(pool, secret, classes)
    return Rig(pool, memory, HashPlan(pool), HashModel(max_position))


def expected(prompt: list[int], count: int, **options) -> list[int]:
    """What the model generates, without pages: up to ``count`` tokens, ending with EOS."""
    tokens, asked = list(prompt), request(0, prompt, **options)
    while len(tokens) < len(prompt) + count:
        logits = logits_of(hashes(np.array(tokens))[-1:])
        tokens.append(sample(logits, [asked], [len(tokens)])[0].token_ids[0])
        if tokens[-1] == EOS:
            break
    return tokens[len(prompt) :]


def request(name: int, prompt, max_tokens: int = 8, **options) -> Request:
    tokens = np.asarray(prompt, dtype=np.int32)
    options = {"namespace": b"n" * 32} | options
    return Request(name.to_bytes(16, "big"), tokens, max_tokens, **options)


def name_of(output: Output) -> int:
    return int.from_bytes(output.fields["request_id"], "big")


def run(engine, limit: int = 100_000) -> dict[int, list[Output]]:
    """Steps until nothing is left: outputs per request number, in order."""
    outputs: dict[int, list] = {}
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(name_of(output), []).append(output)
        limit -= 1
        assert limit > 0, "the engine makes no progress"
    return outputs


def tokens_of(outputs: list[Output]) -> list[int]:
    """Token ids of one request's outputs, checked to be without gaps."""
    tokens: list[int] = []
    for output in outputs:
        if output.kind == "tokens":
            assert output.fields["first_index"] == len(tokens)
            tokens += output.fields["token_ids"]
    return tokens


def make(parts, **options) -> Engine:
    return Engine(parts.model, parts.memory, parts.plan, **options)


def prompt_of(rng: np.random.Generator, size: int) -> list[int]:
    return rng.integers(0, VOCAB - 1, size).tolist()


def assert_baseline(parts) -> None:
    """Nothing but the tree holds pages, and without it the pool is empty."""
    assert parts.memory.owned_pages == 0
    parts.memory.tree.clear()
    stats = parts.pool.stats()
    assert (stats.held_pages, stats.io_pages, stats.used_bytes) == (0, 0, 0)
    assert stats.free_frames == stats.num_frames
    sealer = parts.memory.sealer
    assert sealer is None or sealer.held == 0
