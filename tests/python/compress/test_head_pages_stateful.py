"""Pruned sequences against a dict: made, grown, sealed, attended to and released in any order."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kvcore._core.base import FaultPlan
from kvcore.errors import OutOfPages
from kvcore.head_pages import HeadAttention, head_classes, head_pool
from kvcore.pages import PageClass, PageSpec
from support.bounds import excess
from support.head_pages import Pruned, Source, ragged, stored, tensors

LAYERS, HEADS, TOKENS, NUM_PAGES = 2, 2, 150, 60
PAIRS = [[("k4", "v4"), ("bf16", "bf16")], [("int8", "v3"), ("k4", "v4")]]


class HeadPagesMachine(RuleBasedStateMachine):
    @initialize(page=st.sampled_from([16, 64]))
    def start(self, page: int) -> None:
        self.page, self.spec = page, PageSpec(LAYERS, HEADS, 64)
        self.source = Source(self.spec, TOKENS)
        self.pool = head_pool(self.spec, NUM_PAGES, page, page_ids=300, huge_pages=False)
        self.classes = head_classes(self.pool, PageClass(self.spec, PAIRS))
        self.attention = HeadAttention(self.pool, LAYERS, HEADS, 2 * HEADS)
        self.plan = FaultPlan(1)
        self.pool.set_faults(self.plan)
        self.rng = np.random.default_rng(0)
        self.live: list[Pruned] = []
        self.open = set[int]()  # id() of sequences that were never sealed: the oracle knows them

    def single_pages(self) -> int:
        counts = [len(rows) for p in self.live for layer in p.k for rows in layer]
        return sum(-(-n // self.page) for n in counts)

    @rule(seed=st.integers(0, 9), mean=st.sampled_from([0.0, 0.1, 0.5]), fault=st.booleans())
    def compact(self, seed: int, mean: float, fault: bool) -> None:
        flat = [[]] * 4 if mean == 0 else ragged(np.random.default_rng(seed), 4, TOKENS, mean)
        if fault:
            self.plan.fail_nth("pool.alloc", 1)
        try:
            pruned = Pruned.of(self.source, [flat[:2], flat[2:]], self.pool)
        except OutOfPages:
            self.plan.clear()
            return
        assert not fault
        self.live.append(pruned)
        self.open.add(id(pruned))

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 9), more=st.integers(0, 40), fault=st.booleans())
    def decode(self, which: int, more: int, fault: bool) -> None:
        """One sequence gets ``more`` tokens, another one, in one batch."""
        batch = [self.live[which % len(self.live)]]
        if len(self.live) > 1:
            batch.append(self.live[(which + 1) % len(self.live)])
        lengths, grown = [more, 1][: len(batch)], []
        for pruned, n in zip(batch, lengths, strict=True):
            if fault:
                self.plan.fail_nth("pool.alloc", 1)
            try:
                pruned.heads.grow(n)
                grown.append((pruned, n))
            except OutOfPages:
                pass
            self.plan.clear()
        total = sum(n for _, n in grown)
        self.attention.prepare(
            [p.heads for p, _ in grown], np.cumsum([0, *(n for _, n in grown)]).tolist()
        )
        for layer in range(LAYERS):
            q, k, v = (stored(self.rng, "bf16", total, n, 64) for n in (2 * HEADS, HEADS, HEADS))
            q_t, k_t, v_t = tensors("bf16", q, k, v)
            out, lse = torch.empty_like(q_t), torch.empty(total, 2 * HEADS)
            self.attention.run(layer, q_t, k_t, v_t, out, lse)
            first = 0
            for pruned, n in grown:
                rows = slice(first, first := first + n)
                pruned.add(layer, k[rows], v[rows])
                if n and id(pruned) in self.open:
                    self.compare(pruned, layer, q[rows], out[rows], lse[rows])

    def compare(
        self, pruned: Pruned, layer: int, q: np.ndarray, out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        want = pruned.expected(layer, q, "bf16", "bf16")
        used = excess(out, lse, want, fmt="bf16", dtype="bf16", head_dim=64, tokens=999)
        assert max(used.values()) <= 1, used

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 9), fault=st.integers(0, 3))
    def seal(self, which: int, fault: int) -> None:
        pruned = self.live[which % len(self.live)]
        if fault:
            self.plan.fail_nth("pool.seal", fault)
        if pruned.heads.seal(self.classes):
            self.open.discard(id(pruned))
        self.plan.clear()

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 9), by_name=st.booleans())
    def release(self, which: int, by_name: bool) -> None:
        pruned = self.live.pop(which % len(self.live))
        self.open.discard(id(pruned))
        if by_name:
            pruned.heads.release()

    @invariant()
    def pages_and_bytes_agree(self) -> None:
        stats = self.pool.stats()
        held = [
            page
            for p in self.live
            for layer in range(LAYERS)
            for head in range(HEADS)
            for page in p.heads.pages(layer, head)
        ]
        assert len(set(held)) == len(held) == stats.held_pages == self.single_pages()
        sizes = [self.pool.page_class(self.pool.class_of(p)).page_bytes for p in held]
        assert stats.used_bytes == sum(sizes)
        assert stats.used_bytes + stats.free_bytes == NUM_PAGES * self.pool.spec.page_bytes

    @invariant()
    def lengths_agree_and_first_pages_are_open(self) -> None:
        for pruned in self.live:
            counts = [[len(rows) for rows in layer] for layer in pruned.k]
            assert pruned.heads.num_tokens.tolist() == counts
            for i in range(LAYERS * HEADS):
                pages = pruned.heads.pages(*divmod(i, HEADS))
                full = counts[i // HEADS][i % HEADS] // self.page
                classes = [self.pool.class_of(p) for p in pages]
                assert set(classes[:1] + classes[full:]) <= {0}
                assert set(classes) <= {0, self.classes[i]}

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.live.clear()
        assert self.pool.stats().used_bytes == 0
        with pytest.raises(OutOfPages):
            self.pool.alloc(NUM_PAGES + 1)
        assert len(self.pool.alloc(NUM_PAGES)) == NUM_PAGES


HeadPagesMachine.TestCase.settings = settings(
    max_examples=max(40, settings.default.max_examples), stateful_step_count=25, deadline=None
)
TestHeadPages = HeadPagesMachine.TestCase
