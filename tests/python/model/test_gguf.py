"""GGUF conversion against transformers' own reading of the same file."""

from __future__ import annotations

import gguf_files
import numpy as np
import pytest
import tiny
import torch
import transformers
from kvcore.errors import Unsupported
from kvcore.model import gguf, load, load_tokenizer, resolve
from kvcore.model.rope import RopeConfig, inverse_frequencies
from safetensors.torch import load_file
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint


def theirs(path):
    """transformers' model with its own configuration and weights of the file, as float32."""
    config = transformers.AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
    config.head_dim = gguf_files.HEAD_DIM  # its reader does not take the field from the file
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    read = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
    unset = set(model.state_dict()) - set(read["tensors"])
    assert unset <= {"lm_head.weight"} and config.tie_word_embeddings == bool(unset)
    model.load_state_dict(read["tensors"], strict=False)
    return model


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_weights_equal_transformers_own_reading(architecture, tmp_path):
    path = gguf_files.write_llama(tmp_path / "small.gguf", architecture)
    ours = load_file(resolve(path, tmp_path / "cache").path / "model.safetensors")
    reference = theirs(path).to(torch.bfloat16).state_dict()
    if "lm_head.weight" not in ours:
        reference.pop("lm_head.weight")
    assert set(ours) == set(reference)
    for name, tensor in ours.items():
        assert torch.equal(tensor, reference[name]), name


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_converted_file_computes_what_transformers_computes(architecture, tmp_path):
    path = gguf_files.write_llama(tmp_path / "small.gguf", architecture)
    model = load(path, "float32", cache_dir=tmp_path / "cache")
    assert model.implementation == "flat" and model.config.eos_ids == (1,)
    tokens = tiny.random_tokens(100, seed=0)
    reference = theirs(path)
    for parameter in reference.parameters():  # not .to(): that would round the frequencies too
        parameter.data = parameter.data.bfloat16().float()
    with torch.inference_mode():
        expected = reference(input_ids=torch.tensor([tokens])).logits[0]
    assert (tiny.Runner(model).whole(tokens) - expected).abs().max() <= 1e-4


def test_a_large_file_is_written_in_shards(tmp_path, monkeypatch):
    path = gguf_files.write_llama(tmp_path / "small.gguf")
    whole = load(path, "float32", cache_dir=tmp_path / "whole")
    monkeypatch.setattr(gguf, "SHARD_BYTES", 40_000)
    sharded = load(path, "float32", cache_dir=tmp_path / "sharded")
    assert len(list(sharded.path.glob("model-*.safetensors"))) > 2
    tokens = tiny.random_tokens(20, seed=0)
    assert torch.equal(tiny.Runner(whole).whole(tokens), tiny.Runner(sharded).whole(tokens))


def test_the_tokenizer_round_trips_and_has_the_chat_template(tmp_path):
    path = gguf_files.write_llama(tmp_path / "small.gguf")
    tokenizer = load_tokenizer(resolve(path, tmp_path / "cache").path)
    text = "  the end, and 12 then\n\n\tüñí ☃"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids) == text
    assert "".join(tokenizer.convert_ids_to_tokens(tokenizer("12").input_ids)) == "12"
    assert len(tokenizer("12", add_special_tokens=False).input_ids) == 2  # digits stand alone
    messages = [{"role": "user", "content": "the"}, {"role": "assistant", "content": "end"}]
    chat = tokenizer.apply_chat_template(messages, tokenize=False)
    assert chat == "<s>user: the</s><s>assistant: end</s>"
    ids = tokenizer(chat, add_special_tokens=False).input_ids
    assert ids.count(0) == 2 and ids.count(1) == 2
    assert tokenizer.eos_token_id == 1


@pytest.mark.parametrize(
    ("pre", "pieces"), [("llama-bpe", ["123", "45"]), ("qwen2", ["1", "2", "3", "4", "5"])]
)
def test_the_words_before_bpe_follow_the_file(pre, pieces, tmp_path):
    path = gguf_files.write_llama(tmp_path / "small.gguf", pre=pre)
    tokenizer = load_tokenizer(resolve(path, tmp_path / "cache").path)
    split = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("the12345")
    assert [piece for piece, _ in split] == ["the", *pieces]


def test_rope_scaling_is_carried_over_or_refused(tmp_path):
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    path = gguf_files.write_llama(tmp_path / "linear.gguf", extra=linear)
    assert '"factor": 4.0' in load(path, cache_dir=tmp_path / "cache").config.rope
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    path = gguf_files.write_llama(tmp_path / "yarn.gguf", extra=yarn)
    with pytest.raises(Unsupported, match="yarn"):
        resolve(path, tmp_path / "cache")


def test_llama3_divisors_become_parameters_or_are_refused(tmp_path):
    rope = RopeConfig("llama3", 50000.0, 8.0, 1.0, 4.0, 8192)
    scaled = inverse_frequencies(rope, gguf_files.HEAD_DIM)
    plain = inverse_frequencies(RopeConfig(theta=50000.0), gguf_files.HEAD_DIM)
    divisors = plain / scaled
    assert divisors.max() == pytest.approx(8.0)
    path = gguf_files.write_llama(tmp_path / "a.gguf", rope_freqs=divisors)
    config = load(path, cache_dir=tmp_path / "cache").config
    assert '"rope_type": "llama3"' in config.rope and '"factor": 8.0' in config.rope
    strange = np.linspace(1.0, 8.0, divisors.size)
    path = gguf_files.write_llama(tmp_path / "b.gguf", rope_freqs=strange)
    with pytest.raises(Unsupported, match="rope_freqs"):
        resolve(path, tmp_path / "cache")
