"""GGUF files to a Hugging Face directory: weights dequantized to bf16, config, tokenizer.

The container format and the dequantization are the ``gguf`` package's. Only dense Llama, Qwen2 and
Qwen3 files are read (Mistral files say ``llama``). llama.cpp stores the q and k rows of Llama
models interleaved for its own rotary embedding; that permutation is undone here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvcore.errors import Corrupt, Unsupported

SHARD_BYTES = 2 << 30
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original": 8192}
# What cuts text into words before BPE, by the file's tokenizer.ggml.pre.
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")


def convert(path: Path, target: Path) -> None:
    """Write ``config.json``, ``model*.safetensors`` (bf16) and the tokenizer of ``path``.

    Args:
        path: the ``.gguf`` file.
        target: an existing directory.

    Raises:
        Unsupported: an architecture, rope scaling or tensor the decoder loop does not know.
        Corrupt: not a readable GGUF file.
    """
    import gguf

    try:
        reader = gguf.GGUFReader(str(path))
    except (ValueError, OSError, IndexError) as error:
        raise Corrupt(f"model: {path} is not a readable GGUF file: {error}") from error
    meta = _Metadata(path, reader)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = _config(meta, tensors)
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    _write_weights(_weights(config, tensors, gguf.dequantize), target)
    _write_tokenizer(meta, target)


class _Metadata:
    """Typed look-ups in the key-value part of a GGUF file."""

    def __init__(self, path: Path, reader: Any) -> None:
        self.path = path
        self._fields = reader.fields
        self.architecture = str(self.get("general.architecture", ""))
        if self.architecture not in _ARCHITECTURES:
            raise Unsupported(
                f"model: GGUF architecture {self.architecture!r} of {path} cannot be converted "
                f"(known: {sorted(_ARCHITECTURES)}); use the model's Hugging Face directory"
            )

    def get(self, key: str, default: Any = None) -> Any:
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def arch(self, key: str, default: Any = None) -> Any:
        return self.get(f"{self.architecture}.{key}", default)

    def need(self, key: str) -> Any:
        value = self.arch(key)
        if value is None:
            raise Corrupt(f"model: {self.path} has no field {self.architecture}.{key}")
        return value


def _config(meta: _Metadata, tensors: dict[str, Any]) -> dict[str, Any]:
    if int(meta.arch("expert_count", 0)) > 0:
        raise Unsupported(f"model: {meta.path} is a mixture of experts, not converted from GGUF")
    heads, hidden = int(meta.need("attention.head_count")), int(meta.need("embedding_length"))
    window = int(meta.arch("attention.sliding_window", 0) or 0)
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[meta.architecture]],
        "model_type": meta.architecture,
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "hidden_size": hidden,
        "intermediate_size": int(meta.need("feed_forward_length")),
        "num_hidden_layers": int(meta.need("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(meta.arch("attention.head_count_kv", heads)),
        "head_dim": int(meta.arch("attention.key_length", hidden // heads)),
        "max_position_embeddings": int(meta.need("context_length")),
        "rms_norm_eps": _shortest_float32(meta.need("attention.layer_norm_rms_epsilon")),
        "rope_theta": float(meta.arch("rope.freq_base", 10000.0)),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": meta.architecture == "llama" and "blk.0.attn_q.bias" in tensors,
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": meta.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": meta.get("tokenizer.ggml.padding_token_id"),
        "dtype": "bfloat16",
    }
    if window:
        config |= {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 0}
    scaling = _rope_scaling(meta, tensors, config)
    if scaling:
        config["rope_scaling"] = scaling
    return config


def _shortest_float32(value: float) -> float:
    """1e-5 and not 9.999999747e-06: the shortest decimal that is the same float32."""
    return float(str(np.float32(value)))


def _rope_scaling(
    meta: _Metadata, tensors: dict[str, Any], config: dict[str, Any]
) -> dict[str, Any] | None:
    kind = str(meta.arch("rope.scaling.type", "none"))
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(meta.need("rope.scaling.factor"))}
    if kind != "none":
        raise Unsupported(f"model: rope scaling {kind!r} of {meta.path} is not converted from GGUF")
    if "rope_freqs.weight" not in tensors:
        return None
    # Llama 3.1 and later: the file holds the divisors themselves. Find the parameters that give
    # them, and refuse if they do not.
    from kvcore.model.rope import RopeConfig, inverse_frequencies

    divisors = np.asarray(tensors["rope_freqs.weight"].data, dtype=np.float32).reshape(-1)
    plain = RopeConfig(theta=config["rope_theta"])
    scaled = RopeConfig(
        kind="llama3",
        theta=config["rope_theta"],
        factor=float(divisors.max()),
        low_freq_factor=_LLAMA3["low_freq_factor"],
        high_freq_factor=_LLAMA3["high_freq_factor"],
        original_max_position=int(_LLAMA3["original"]),
    )
    width = 2 * divisors.size
    ratio = inverse_frequencies(plain, width) / inverse_frequencies(scaled, width)
    if not np.allclose(ratio, divisors, rtol=1e-3):
        raise Unsupported(f"model: rope_freqs.weight of {meta.path} is not the llama3 rule's")
    return {
        "rope_type": "llama3",
        "factor": scaled.factor,
        "low_freq_factor": scaled.low_freq_factor,
        "high_freq_factor": scaled.high_freq_factor,
        "original_max_position_embeddings": scaled.original_max_position,
    }


def _hf_name(name: str) -> str:
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    if len(parts) == 2 and parts[0] in _TOP_NAMES:
        return f"{_TOP_NAMES[parts[0]]}.{parts[1]}"
    raise Unsupported(f"model: GGUF tensor {name!r} has no place in the decoder loop")


def _weights(
    config: dict[str, Any], tensors: dict[str, Any], dequantize: Callable[..., Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    heads = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config["num_key_value_heads"],
    }
    for name, tensor in tensors.items():
        if name == "rope_freqs.weight":
            continue
        values = dequantize(tensor.data, tensor.tensor_type)
        values = values.reshape(tuple(int(n) for n in reversed(tensor.shape)))
        part = name.split(".")[2] if name.startswith("blk.") else ""
        if config["model_type"] == "llama" and part in heads:
            values = _unpermute_rows(values, heads[part])
        array = np.array(values, dtype=np.float32, order="C")
        yield _hf_name(name), torch.from_numpy(array).to(torch.bfloat16)


def _unpermute_rows(values: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows of a head from (d/2 pairs, 2) back to (2 halves, d/2); works for biases too."""
    paired = values.reshape(heads, -1, 2, *values.shape[1:])
    return paired.swapaxes(1, 2).reshape(values.shape)


def _write_weights(weights: Iterator[tuple[str, torch.Tensor]], target: Path) -> None:
    """Shards of at most about 2 GiB, so that a large file converts in bounded memory."""
    from safetensors.torch import save_file

    shards: list[dict[str, torch.Tensor]] = [{}]
    index: dict[str, str] = {}
    held = total = 0

    def flush() -> None:
        file = f"model-{len(shards):05d}.safetensors"
        save_file(shards[-1], str(target / file), metadata={"format": "pt"})
        index.update(dict.fromkeys(shards[-1], file))
        shards[-1] = {}

    for name, tensor in weights:
        if held and held + tensor.nbytes > SHARD_BYTES:
            flush()
            shards.append({})
            held = 0
        shards[-1][name] = tensor
        held += tensor.nbytes
        total += tensor.nbytes
    flush()
    if len(shards) == 1:
        (target / "model-00001.safetensors").rename(target / "model.safetensors")
        return
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
    (target / "model.safetensors.index.json").write_text(text + "\n")


def _write_tokenizer(meta: _Metadata, target: Path) -> None:
    from tokenizers import Regex, pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(meta.path.parent), gguf_file=meta.path.name)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    plain_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    kind = str(meta.get("tokenizer.ggml.pre", ""))
    # transformers ignores this field for Llama files; digits and words would be cut otherwise.
    if kind == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    elif kind in ("llama-bpe", "llama3", "llama-v3", "qwen2"):
        words = Regex(_QWEN2_WORDS if kind == "qwen2" else _LLAMA3_WORDS)
        split = pre_tokenizers.Split(words, behavior="isolated", invert=False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, plain_bytes])
    tokenizer.save_pretrained(str(target))
