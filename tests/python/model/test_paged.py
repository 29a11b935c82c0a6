"""A model over real pages: the same rows whatever the chunks, and near plain attention."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch
from kvcore.kernels import DTYPE_CODES, AttentionPlan
from kvcore.model import load
from kvcore.pages import Pool

PAGE = 16


WINDOWED = {
    "MistralConfig": {"sliding_window": 24},
    "Qwen2Config": {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    "Gemma2Config": {"sliding_window": 5, "attn_logit_softcapping": 2.0},
    "Gemma3TextConfig": {"sliding_window": 33, "sliding_window_pattern": 2},
}
MODELS = ["LlamaConfig", "Qwen3Config", "GPTNeoXConfig", *WINDOWED]


@pytest.fixture(scope="module", params=MODELS)
def path(request, tmp_path_factory):
    fields = {"head_dim": 64, "hidden_size": 128, "num_attention_heads": 2}
    fields |= WINDOWED.get(request.param, {})
    if request.param != "GPTNeoXConfig":
        fields["num_key_value_heads"] = 1
    return tiny.make(tmp_path_factory.mktemp("paged") / "model", request.param, **fields)


class PagedRunner:
    """Steps of a model whose sequences own fixed pages of a pool."""

    def __init__(self, model, num_seqs, length):
        self.model = model
        self.pool = Pool(model.page_spec(PAGE), num_frames=64, huge_pages=False)
        pages = -(-length // PAGE)
        self.tables = np.array([self.pool.alloc(pages)[:pages] for _ in range(num_seqs)], np.int32)
        options = model.config.attention_options
        self.plan = AttentionPlan(self.pool, model.config.num_q_heads, **options)
        self.lengths = np.zeros(num_seqs, np.int32)

    def attend(self, layer, q, k, v):
        out = q.new_empty(q.shape[0], q.shape[1] * q.shape[2])
        self.plan.run_ptr(
            layer,
            q.data_ptr(),
            q.stride(0),
            k.data_ptr(),
            k.stride(0),
            v.data_ptr(),
            v.stride(0),
            out.data_ptr(),
            0,
            DTYPE_CODES[self.model.dtype],
        )
        return out

    def step(self, pieces):
        sequences, counts = list(pieces), [len(piece) for piece in pieces.values()]
        starts = self.lengths[sequences]
        self.lengths[sequences] += np.array(counts, np.int32)
        bounds = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        self.plan.prepare(bounds, self.lengths[sequences], self.tables[sequences])
        positions = torch.cat(
            [torch.arange(s, s + n) for s, n in zip(starts.tolist(), counts, strict=True)]
        )
        tokens = torch.tensor([t for piece in pieces.values() for t in piece])
        rows = torch.arange(len(tokens))
        logits = self.model.forward(tokens, positions, self.attend, rows)
        return dict(zip(pieces, logits.split(counts), strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pages_change_nothing_but_rounding(path, dtype, cache_dir):
    model = load(path, dtype, cache_dir=cache_dir)
    texts = {0: tiny.random_tokens(100, seed=1), 1: tiny.random_tokens(17, seed=2)}
    paged = PagedRunner(model, 2, 100).step(texts)
    for s, text in texts.items():
        exact = tiny.eager(path, torch.float32, text)
        if dtype == "float32":
            assert (paged[s] - exact).abs().max() <= 1e-4
            assert tiny.kl(exact, paged[s]) <= 1e-6
        else:
            theirs = tiny.kl(exact, tiny.eager(path, torch.bfloat16, text))
            assert 0 < tiny.kl(exact, paged[s]) <= 1.5 * theirs  # few rows: a wide margin


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chunks_decode_and_batches_give_equal_bits(path, dtype, cache_dir):
    model = load(path, dtype, cache_dir=cache_dir)
    if not model.row_invariant:
        pytest.skip("promised for the flat loop only")
    texts = {0: tiny.random_tokens(100, seed=1), 1: tiny.random_tokens(60, seed=2)}
    whole = {s: PagedRunner(model, 2, 100).step({s: text})[s] for s, text in texts.items()}
    for size in (1, 15, 16, 33, 100):
        runner = PagedRunner(model, 2, 100)
        for start in range(0, 100, size):
            step = {s: text[start : start + size] for s, text in texts.items()}
            for s, logits in runner.step({s: p for s, p in step.items() if p}).items():
                assert torch.equal(logits, whole[s][start : start + size]), (size, start, s)
