"""Small GGUF files made with the gguf package, in the form llama.cpp's converters give them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

VOCAB, HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 288, 64, 96, 2, 4, 2, 16
CHAT = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"


def _tokens() -> tuple[list[str], list[str], list[int]]:
    """A byte-level vocabulary with a few merges and two control tokens."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    merges = ["t h", "th e", "i n", "Ġ the", "e r", "o n", "1 2", "a n", "an d", "Ġ and"]
    words = ["<s>", "</s>", *letters, *(merge.replace(" ", "") for merge in merges)]
    words += [f"<unused{i}>" for i in range(VOCAB - len(words))]
    kinds = [3, 3] + [1] * (len(letters) + len(merges))
    return words, merges, kinds + [5] * (VOCAB - len(kinds))


def write_llama(
    path: Path,
    architecture: str = "llama",
    seed: int = 0,
    pre: str = "smollm",
    extra: dict[str, Any] | None = None,
    rope_freqs: np.ndarray[Any, Any] | None = None,
) -> Path:
    """A random model: Q8_0 matrices (Q4_1 for ffn_down), float32 norms, tied embedding."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_name("small")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_freq_base(50000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in (extra or {}).items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        add(f"{architecture}.{key}", value)
    words, merges, kinds = _tokens()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(words)
    writer.add_token_merges(merges)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(CHAT)

    def matrix(name: str, rows: int, columns: int, kind: str = "Q8_0") -> None:
        kind_id = gguf.GGMLQuantizationType[kind]
        values = (rng.standard_normal((rows, columns)) * 0.1).astype(np.float32)
        writer.add_tensor(name, gguf.quantize(values, kind_id), raw_dtype=kind_id)

    def vector(name: str, size: int, center: float) -> None:
        writer.add_tensor(name, (center + 0.1 * rng.standard_normal(size)).astype(np.float32))

    matrix("token_embd.weight", VOCAB, HIDDEN)
    vector("output_norm.weight", HIDDEN, 1.0)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs.astype(np.float32))
    for i in range(LAYERS):
        for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            matrix(f"blk.{i}.attn_{part}.weight", heads * HEAD_DIM, HIDDEN)
            if architecture == "qwen2":
                vector(f"blk.{i}.attn_{part}.bias", heads * HEAD_DIM, 0.0)
        if architecture == "qwen3":
            vector(f"blk.{i}.attn_q_norm.weight", HEAD_DIM, 1.0)
            vector(f"blk.{i}.attn_k_norm.weight", HEAD_DIM, 1.0)
        matrix(f"blk.{i}.attn_output.weight", HIDDEN, HEADS * HEAD_DIM)
        for part, rows, columns in (("gate", INNER, HIDDEN), ("up", INNER, HIDDEN)):
            matrix(f"blk.{i}.ffn_{part}.weight", rows, columns)
        matrix(f"blk.{i}.ffn_down.weight", HIDDEN, INNER, "Q4_1")
        vector(f"blk.{i}.attn_norm.weight", HIDDEN, 1.0)
        vector(f"blk.{i}.ffn_norm.weight", HIDDEN, 1.0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
