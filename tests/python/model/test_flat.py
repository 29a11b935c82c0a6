"""The flat decoder loop against transformers, and its rows against themselves."""

from __future__ import annotations

import pytest
import tiny
import torch
from kvcore.errors import Corrupt, InvalidArgument
from kvcore.model import load

TOKENS = tiny.random_tokens(90, seed=3)


@pytest.fixture(params=sorted(tiny.FLAT))
def family(request):
    return request.param


def test_float32_equals_transformers(family, tiny_dir, cache_dir):
    path = tiny_dir(family)
    model = load(path, "float32", cache_dir=cache_dir)
    assert model.implementation == "flat"
    ours = tiny.Runner(model).whole(TOKENS)
    theirs = tiny.eager(path, torch.float32, TOKENS)
    assert ours.dtype == torch.float32
    assert (ours - theirs).abs().max() <= 1e-4
    assert tiny.kl(theirs, ours) <= 1e-6


def test_bfloat16_is_as_near_to_float32_as_transformers_is(family, tiny_dir, cache_dir):
    path = tiny_dir(family)
    model = load(path, "bfloat16", cache_dir=cache_dir)
    ours = theirs = 0.0
    for seed in range(4):
        tokens = tiny.random_tokens(120, seed)
        exact = tiny.eager(path, torch.float32, tokens)
        ours += tiny.kl(exact, tiny.Runner(model).whole(tokens))
        theirs += tiny.kl(exact, tiny.eager(path, torch.bfloat16, tokens))
    assert 0 < ours <= 1.1 * theirs


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_row_has_the_same_bits_in_any_batch_and_chunk(family, dtype, tiny_dir, cache_dir):
    model = load(tiny_dir(family), dtype, cache_dir=cache_dir)
    assert model.row_invariant
    texts = {0: TOKENS[:70], 1: tiny.random_tokens(33, seed=5), 2: tiny.random_tokens(1, seed=6)}
    alone = {s: tiny.Runner(model).whole(text) for s, text in texts.items()}
    together = tiny.Runner(model).step(texts)
    for s, logits in alone.items():
        assert torch.equal(together[s], logits)
    for size in (1, 2, 7, 31):
        runner = tiny.Runner(model)
        for start in range(0, 70, size):
            step = {s: text[start : start + size] for s, text in texts.items()}
            got = runner.step({s: piece for s, piece in step.items() if piece})
            for s, logits in got.items():
                assert torch.equal(logits, alone[s][start : start + size]), (size, start, s)


def test_only_the_rows_asked_for_get_logits(tiny_dir, cache_dir):
    model = load(tiny_dir("llama"), "bfloat16", cache_dir=cache_dir)
    whole = tiny.Runner(model).whole(TOKENS)
    for rows in ([89], [0, 5, 5, 88], []):
        attention = tiny.PlainAttention(model.config.attention_scale)
        attention.sequences, attention.counts = [0], [90]
        wanted = torch.tensor(rows, dtype=torch.int32)
        positions = torch.arange(90, dtype=torch.int32)
        tokens = torch.tensor(TOKENS, dtype=torch.int32)
        logits = model.forward(tokens, positions, attention, wanted)
        assert logits.shape == (len(rows), tiny.VOCAB)
        assert torch.equal(logits, whole[wanted.long()])


def test_rows_and_positions_out_of_range_are_refused(tiny_dir, cache_dir):
    model = load(tiny_dir("llama"), "float32", cache_dir=cache_dir)
    attention = tiny.PlainAttention(1.0)
    empty = torch.empty(0, dtype=torch.int64)
    with pytest.raises(InvalidArgument, match="tokens"):
        model.forward(empty, empty, attention, empty)
    for position in (-1, 256):
        with pytest.raises(InvalidArgument, match=r"0\.\.255"):
            model.forward(torch.tensor([5]), torch.tensor([position]), attention, empty)


def test_a_late_position_equals_transformers(tiny_dir, cache_dir):
    """The table of rotations grows in blocks; the last position of the model is in range."""
    path = tiny_dir("qwen2")
    tokens = tiny.random_tokens(256, seed=9)
    ours = tiny.Runner(load(path, "float32", cache_dir=cache_dir)).whole(tokens)
    assert (ours - tiny.eager(path, torch.float32, tokens)).abs().max() <= 1e-4


def test_weights_that_do_not_fit_the_configuration_are_named(tmp_path, cache_dir):
    from safetensors.torch import load_file, save_file

    path = tiny.make(tmp_path / "broken", "LlamaConfig")
    weights = load_file(path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    narrow = {**weights, name: weights[name][:50].contiguous()}
    missing = {k: v for k, v in weights.items() if k != name}
    for broken in (narrow, missing):
        save_file(broken, path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(Corrupt, match=r"layers\.1\.mlp\.up_proj"):
            load(path, "float32", cache_dir=cache_dir)


def test_what_a_model_says_of_itself(tiny_dir, cache_dir):
    model = load(tiny_dir("qwen3"), cache_dir=cache_dir)
    c = model.config
    assert (c.num_layers, c.num_q_heads, c.num_kv_heads, c.head_dim) == (3, 4, 2, 32)
    assert (c.vocab_size, c.max_position, c.eos_ids, c.bos_id) == (160, 256, (2,), 1)
    assert c.attention_scale == pytest.approx(32**-0.5)
    assert model.model_id == "qwen3" and len(model.epoch) == 64 and model.dtype == "bfloat16"
    assert load(tiny_dir("qwen3"), "float32", cache_dir=cache_dir).epoch == model.epoch
    assert load(tiny_dir("qwen2"), cache_dir=cache_dir).epoch != model.epoch
    assert load(tiny_dir("qwen3"), cache_dir=cache_dir, max_context=50).config.max_position == 50
    with pytest.raises(InvalidArgument, match="dtype"):
        load(tiny_dir("qwen3"), "int3", cache_dir=cache_dir)
    with pytest.raises(InvalidArgument, match="max_context"):
        load(tiny_dir("qwen3"), cache_dir=cache_dir, max_context=257)


def test_page_spec_has_the_geometry_of_the_model(tiny_dir, cache_dir):
    spec = load(tiny_dir("qwen3"), cache_dir=cache_dir).page_spec(page_size=16)
    assert (spec.num_layers, spec.num_kv_heads, spec.page_size) == (3, 2, 16)
    assert (spec.head_dim_k, spec.head_dim_v, spec.format) == (32, 32, "bf16")
    wide = load(tiny_dir("qwen3"), "float32", cache_dir=cache_dir).page_spec()
    assert (wide.page_size, wide.format) == (64, "f32")
