"""Models kvcore cannot run are refused at load, with the reason."""

from __future__ import annotations

import pytest
import tiny
import torch
import transformers
from kvcore.errors import Unsupported
from kvcore.model import load

REFUSED = {
    "attention in chunks": ("Llama4TextConfig", {"attention_chunk_size": 16}, "in chunks of 16"),
    "attention sinks": ("GptOssConfig", {"sliding_window": 512}, "s_aux"),
    "ALiBi": ("BloomConfig", {}, "ALiBi"),
    "MLA": ("DeepseekV3Config", {}, "MLA"),
    "state space": ("MambaConfig", {}, "hybrid or recurrent"),
    "hybrid": ("Lfm2Config", {}, "hybrid or recurrent"),
    "rope that follows the length": (
        "LlamaConfig",
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        "rope type 'dynamic'",
    ),
    "a learned mask": ("DogeConfig", {}, "mask or bias"),
    "attention of its own": ("FalconConfig", {}, "AttentionInterface"),
    "two attentions a layer": ("DiffLlamaConfig", {}, "AttentionInterface"),
}


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_refused_with_the_reason(case, tmp_path, cache_dir):
    config_class, fields, reason = REFUSED[case]
    path = tiny.make(tmp_path / "refused", config_class, **fields)
    with pytest.raises(Unsupported, match=reason):
        load(path, "float32", cache_dir=cache_dir)


def test_encoder_decoder_and_bidirectional_models_are_refused(tmp_path, cache_dir):
    sizes = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4}
    config = transformers.T5Config(vocab_size=tiny.VOCAB, decoder_start_token_id=0, **sizes)
    transformers.AutoModelForSeq2SeqLM.from_config(config).save_pretrained(tmp_path / "t5")
    with pytest.raises(Unsupported, match="encoder-decoder"):
        load(tmp_path / "t5", cache_dir=cache_dir)
    path = tiny.make(tmp_path / "bert", "BertConfig")
    with pytest.raises(Unsupported, match="not causal"):
        load(path, cache_dir=cache_dir)


def test_an_unknown_architecture_is_refused_and_its_code_not_run(tmp_path, cache_dir):
    path = tiny.make(tmp_path / "new", "LlamaConfig")
    text = (path / "config.json").read_text()
    remote = '"model_type": "brand_new", "auto_map": {"AutoConfig": "evil.Config"}'
    (path / "config.json").write_text(text.replace('"model_type": "llama"', remote))
    (path / "evil.py").write_text("raise SystemExit('remote code ran')")
    with pytest.raises(Unsupported, match="configuration"):
        load(path, cache_dir=cache_dir)


def test_a_window_no_shorter_than_the_context_is_allowed(tmp_path, cache_dir):
    path = tiny.make(tmp_path / "windowed", "MistralConfig", sliding_window=32)
    model = load(path, "float32", cache_dir=cache_dir, max_context=32)
    tokens = tiny.random_tokens(32, seed=1)
    ours = tiny.Runner(model).whole(tokens)
    assert (ours - tiny.eager(path, torch.float32, tokens)).abs().max() <= 1e-4
