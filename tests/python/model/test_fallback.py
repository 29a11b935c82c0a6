"""Architectures outside the flat loop, through transformers' AttentionInterface."""

from __future__ import annotations

import pytest
import tiny
import torch
from kvcore.errors import InvalidArgument, Unsupported
from kvcore.model import fallback, load

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
OTHERS = {
    "gpt-neox": ("GPTNeoXConfig", {}),
    "phi": ("PhiConfig", {}),
    "olmo2": ("Olmo2Config", {}),
    "gemma": ("GemmaConfig", {"head_dim": 32}),
    "stablelm": ("StableLmConfig", {}),
    "gpt2": ("GPT2Config", {"n_positions": 256}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "sliding_window": None}),
    "llama with yarn": ("LlamaConfig", {"rope_scaling": YARN}),
}


@pytest.fixture(scope="module", params=sorted(OTHERS))
def other(request, tmp_path_factory):
    config_class, fields = OTHERS[request.param]
    return tiny.make(tmp_path_factory.mktemp("other") / "model", config_class, **fields)


def test_float32_equals_transformers_in_mixed_batches(other, cache_dir):
    model = load(other, "float32", cache_dir=cache_dir)
    assert model.implementation == "transformers" and not model.row_invariant
    texts = {0: tiny.random_tokens(60, seed=1), 1: tiny.random_tokens(33, seed=2)}
    runner = tiny.Runner(model)
    parts = [runner.step({s: text[:31] for s, text in texts.items()})]
    parts.append(runner.step({0: texts[0][31:59], 1: texts[1][31:32]}))
    parts.append(runner.step({1: texts[1][32:], 0: texts[0][59:]}))
    for s, text in texts.items():
        ours = torch.cat([part[s] for part in parts])
        theirs = tiny.eager(other, torch.float32, text)
        assert (ours - theirs).abs().max() <= 1e-4
        assert tiny.kl(theirs, ours) <= 1e-6


def test_bfloat16_is_as_near_to_float32_as_transformers_is(other, cache_dir):
    if "Mixtral" in (other / "config.json").read_text():
        pytest.skip("a router's choice of experts is not continuous in the rounding")
    model = load(other, "bfloat16", cache_dir=cache_dir)
    ours = theirs = 0.0
    for seed in range(4):
        tokens = tiny.random_tokens(120, seed)
        exact = tiny.eager(other, torch.float32, tokens)
        ours += tiny.kl(exact, tiny.Runner(model).whole(tokens))
        theirs += tiny.kl(exact, tiny.eager(other, torch.bfloat16, tokens))
    assert 0 < ours <= 1.1 * theirs


def test_only_the_rows_asked_for_get_logits(other, cache_dir):
    model = load(other, "float32", cache_dir=cache_dir)
    tokens = tiny.random_tokens(20, seed=4)
    whole = tiny.Runner(model).whole(tokens)
    for rows in ([19], [3, 7, 7], []):
        attention = tiny.PlainAttention(model.config.attention_scale)
        attention.sequences, attention.counts = [0], [20]
        wanted = torch.tensor(rows, dtype=torch.int64)
        logits = model.forward(torch.tensor(tokens), torch.arange(20), attention, wanted)
        assert logits.shape == (len(rows), tiny.VOCAB)
        torch.testing.assert_close(logits, whole[wanted], rtol=0, atol=1e-5)


def test_positions_out_of_range_are_refused(other, cache_dir):
    model = load(other, "float32", cache_dir=cache_dir)
    with pytest.raises(InvalidArgument, match=r"0\.\.255"):
        model.forward(
            torch.tensor([5]), torch.tensor([256]), tiny.PlainAttention(1.0), torch.tensor([0])
        )


def test_the_trial_refuses_a_model_whose_own_attention_differs(tmp_path, cache_dir, monkeypatch):
    """A stand-in for what no rule foresaw: attention that looks one token less far."""
    path = tiny.make(tmp_path / "odd", "GPTNeoXConfig")
    plain = fallback._TrialMemory.attend

    def shortsighted(self, layer, q, k, v):
        return plain(self, layer, q, torch.zeros_like(k), v)

    monkeypatch.setattr(fallback._TrialMemory, "attend", shortsighted)
    for dtype in ("float32", "bfloat16"):
        with pytest.raises(Unsupported, match="differs from its own attention"):
            load(path, dtype, cache_dir=cache_dir)
