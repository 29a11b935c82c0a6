"""A random two-layer Llama with a byte-level tokenizer and a chat template, as a directory."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

EOS = "<|end|>"
TEMPLATE = (
    "{% for m in messages %}{{ '<|start|>' + m['role'] + ' ' + m['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant ' }}{% endif %}"
)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 257,
    "dtype": "bfloat16",
}


def make(path: Path, max_position: int = 2048) -> Path:
    """Write the model; the same weights each time."""
    path.mkdir()
    config = {**CONFIG, "max_position_embeddings": max_position}
    (path / "config.json").write_text(json.dumps(config))
    torch.manual_seed(1)
    save_file(_weights(), path / "model.safetensors", metadata={"format": "pt"})
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|start|>", EOS])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"eos_token": EOS, "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def _weights() -> dict[str, torch.Tensor]:
    hidden, kv, inner = 128, 64, 128

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape) * 0.15).to(torch.bfloat16)

    weights = {"model.embed_tokens.weight": random(320, hidden)}
    weights["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        for name, rows in (("q", hidden), ("k", kv), ("v", kv), ("o", hidden)):
            weights[f"{prefix}self_attn.{name}_proj.weight"] = random(rows, hidden)
        weights[prefix + "mlp.gate_proj.weight"] = random(inner, hidden)
        weights[prefix + "mlp.up_proj.weight"] = random(inner, hidden)
        weights[prefix + "mlp.down_proj.weight"] = random(hidden, inner)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    return weights
