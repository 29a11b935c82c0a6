"""O32 (TensorRT-LLM#2699): with fp8 KV and block reuse 200 equal queries got differing answers.

One engine whose full pages are compressed answers one prompt again and again: from nothing, with
all of its prefix cached, with half of it, alone and beside others. A page's bytes are a function of
the numbers in it (no scale is kept from elsewhere), and the numbers one of the pages they were
computed over; so equal paths give equal bytes and answers, every path has the same first layer,
cached pages never change, and an exact engine gives the same bytes and answer whatever the path.

What a lossy engine computes over a half that is sealed already is not what it computes over bf16,
so that path has its own bytes in later layers (of the same fidelity: the worst of a page's own and
its parents').
"""

from __future__ import annotations

import ctypes
import hashlib
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from kvcore import kernels, model
from kvcore.compress import PROFILES, profile_class
from kvcore.pages import Pool, page_ids_for
from kvcore.worker.engine import Engine
from kvcore.worker.memory import PageMemory
from kvcore.worker.request import Request

VOCAB, PAGE, PAGES, HALF = 160, 16, 8, 4
NAMESPACE = b"n" * 32
QUERIES = 200
RNG = np.random.default_rng(32)
PROMPT = RNG.integers(3, VOCAB, PAGE * PAGES + 5).astype(np.int32)
COUSIN = np.concatenate([PROMPT[: PAGE * HALF], RNG.integers(3, VOCAB, 21).astype(np.int32)])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("o032")
    torch.set_num_threads(1)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=100, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=512,
        bos_token_id=1, eos_token_id=2, initializer_range=0.1,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(directory / "model")
    return model.load(directory / "model", "bfloat16", cache_dir=directory / "cache")


class Asked:
    """An engine, and what it stores and answers."""

    def __init__(self, tiny: Any, profile: str) -> None:
        spec, frames = tiny.page_spec(PAGE), 64
        names = PROFILES[1 : PROFILES.index(profile) + 1]
        classes = {name: profile_class(spec, name) for name in names}
        ids = page_ids_for(classes[profile], frames) if classes else 0
        self.pool = Pool(spec, frames, huge_pages=False, page_ids=ids)
        plan = kernels.AttentionPlan(
            self.pool, tiny.config.num_q_heads, **tiny.config.attention_options
        )
        memory = PageMemory(self.pool, classes=classes)
        self.engine, self.memory = Engine(tiny, memory, plan, token_budget=48), memory
        self.count = 0

    def query(self, tokens: np.ndarray, beside: bool = False) -> tuple[Any, int]:
        """(tokens and log probabilities of the answer, prompt tokens that were cached)."""
        names = []
        for namespace in (NAMESPACE, b"") if beside else (NAMESPACE,):  # the other shares nothing
            self.count += 1
            names.append(self.count.to_bytes(16, "big"))
            self.engine.add(
                Request(names[-1], tokens, 6, namespace=namespace, ignore_eos=1, num_logprobs=0)
            )
        answer: list[tuple[int, float]] = []
        cached = -1
        while self.engine.has_work or (self.memory.sealer and self.memory.sealer.waiting):
            for kind, fields in self.engine.step():
                assert kind in ("prefilled", "tokens", "finished")
                if fields["request_id"] != names[0]:
                    continue
                if kind == "tokens":
                    answer += zip(fields["token_ids"], fields["logprobs"], strict=True)
                elif kind == "finished":
                    cached = fields["cached_tokens"]
        return tuple(answer), cached

    def stored(self) -> tuple[list[str], list[str]]:
        """Digests of the prompt's cached pages: of their first layers, and of the others."""
        found = self.memory.tree.match(NAMESPACE, PROMPT)
        self.pool.decref(found.pages)
        digests: tuple[list[str], list[str]] = ([], [])
        for page in found.pages:
            page_class = self.pool.page_class(self.pool.class_of(page))
            for layer in range(self.pool.spec.num_layers):
                at, size = self.pool.slice_address(page, layer), page_class.slice_bytes(layer)
                data = ctypes.string_at(at, size)
                digests[layer > 0].append(hashlib.blake2b(data).hexdigest())
        return digests


@pytest.mark.parametrize("profile", PROFILES)
def test_equal_queries_get_equal_bytes_and_answers(tiny: Any, profile: str) -> None:
    asked = Asked(tiny, profile)
    rng = np.random.default_rng(1)
    answers: dict[str, set[Any]] = {}
    bytes_of: dict[str, set[str]] = {}
    first_layers, parts = set(), set()
    origin = ""
    for i in range(QUERIES):
        path = str(rng.choice(["miss", "full", "full", "half"])) if i else "miss"
        if path != "full":
            asked.memory.tree.clear()
            origin = path
        if path == "half":
            asked.query(COUSIN)
        answer, cached = asked.query(PROMPT, beside=bool(rng.integers(2)))
        assert cached == PAGE * {"miss": 0, "half": HALF, "full": PAGES}[path]
        first, rest = asked.stored()
        assert len(first) == PAGES
        first_layers.add(str(first))
        parts.add(str(rest[: 2 * HALF]))  # never computed over anything but bf16 pages
        bytes_of.setdefault(origin, set()).add(str(rest))
        answers.setdefault(path if path == origin else f"full after {origin}", set()).add(answer)
    assert len(answers) == 4
    assert {path: len(found) for path, found in answers.items()} == dict.fromkeys(answers, 1)
    assert {path: len(found) for path, found in bytes_of.items()} == {"miss": 1, "half": 1}
    assert len(first_layers) == len(parts) == 1
    exact = Asked(tiny, "exact")
    (((right, _), *_), _), foreign = exact.query(PROMPT), PROMPT.copy()
    assert {answer[0][0] for answer in set.union(*answers.values())} == {right}  # lossy, not wrong
    foreign[3 * PAGE : 4 * PAGE] = np.random.default_rng(4).integers(3, VOCAB, PAGE)
    assert exact.query(foreign)[0][0][0] != right  # as one wrong page would show
    if profile == "exact":
        assert len(set.union(*answers.values())) == len(set.union(*bytes_of.values())) == 1
