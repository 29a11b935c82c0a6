"""Small random models, and plain float32 attention to run them with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

VOCAB = 160
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # Wide enough that random logits are far from flat.
    "initializer_range": 0.1,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FLAT = {
    "llama": ("LlamaConfig", {}),
    "llama-tied-biased": (
        "LlamaConfig",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama-rope-llama3": ("LlamaConfig", {"rope_scaling": LLAMA3_ROPE}),
    "llama-rope-linear": ("LlamaConfig", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "llama-head-32": ("LlamaConfig", {"head_dim": 32}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
}


def make(directory: Path, config_class: str, seed: int = 0, **fields: Any) -> Path:
    """Save a random model of ``config_class`` with ``COMMON`` and ``fields`` into ``directory``."""
    config = getattr(transformers, config_class)(**{**COMMON, **fields})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # norms and biases start at ones and zeros, which would hide mistakes
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    return directory


class PlainAttention:
    """Causal attention over remembered keys and values, one row at a time in float32.

    ``sequences`` and ``counts`` say whose rows a step holds. A row's result depends on its query
    and the keys before it only.
    """

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.sequences: list[int] = []
        self.counts: list[int] = []
        self._held: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outs = []
        parts = [x.float().split(self.counts) for x in (q, k, v)]
        for sequence, qs, ks, vs in zip(self.sequences, *parts, strict=True):
            if (layer, sequence) in self._held:
                old_k, old_v = self._held[layer, sequence]
                ks, vs = torch.cat((old_k, ks)), torch.cat((old_v, vs))
            self._held[layer, sequence] = (ks.clone(), vs.clone())
            start, groups = len(ks) - len(qs), q.shape[1] // k.shape[1]
            keys, values = ks.repeat_interleave(groups, 1), vs.repeat_interleave(groups, 1)
            for row in range(len(qs)):
                seen = start + row + 1
                scores = torch.einsum("hd,nhd->hn", qs[row], keys[:seen]) * self.scale
                weights = scores.softmax(-1)
                outs.append(torch.einsum("hn,nhd->hd", weights, values[:seen]).flatten())
        return torch.stack(outs).to(q.dtype)


class Runner:
    """Steps of a kvcore model over several sequences."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.attention = PlainAttention(model.config.attention_scale)
        self._lengths: dict[int, int] = {}

    def step(self, pieces: dict[int, Sequence[int]]) -> dict[int, Tensor]:
        """Feed the next tokens of some sequences at once; logits of all their rows."""
        self.attention.sequences = list(pieces)
        self.attention.counts = [len(piece) for piece in pieces.values()]
        starts = [self._lengths.get(s, 0) for s in pieces]
        positions = [
            torch.arange(start, start + len(piece))
            for start, piece in zip(starts, pieces.values(), strict=True)
        ]
        tokens = torch.tensor([t for piece in pieces.values() for t in piece])
        rows = torch.arange(len(tokens))
        logits = self.model.forward(tokens, torch.cat(positions), self.attention, rows)
        for sequence, piece in pieces.items():
            self._lengths[sequence] = self._lengths.get(sequence, 0) + len(piece)
        return dict(zip(pieces, logits.split(self.attention.counts), strict=True))

    def whole(self, tokens: Sequence[int]) -> Tensor:
        """Logits of all rows of one sequence in one step."""
        return self.step({-1 - len(self._lengths): tokens}).popitem()[1]


def eager(path: Path, dtype: torch.dtype, tokens: Sequence[int]) -> Tensor:
    """float32 logits ``[T, vocab]`` of transformers' own eager attention."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(path), dtype=dtype, attn_implementation="eager"
    )
    with torch.inference_mode():
        return model(input_ids=torch.tensor([list(tokens)])).logits[0].float()


def kl(reference: Tensor, other: Tensor) -> float:
    """Mean KL(reference || other) over rows of logits, in float64."""
    p, q = reference.double().log_softmax(-1), other.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def random_tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (count,), generator=generator).tolist()
