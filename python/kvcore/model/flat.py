"""The decoder loop of the Llama, Mistral, Qwen2 and Qwen3 families, one flat function.

All sequences of a step lie behind each other in one row dimension ``T``. The loop knows no pages:
attention is a callback that appends the new keys and values and attends. Every operation gives a
row the same bits whatever else is in the batch, so that prefill in chunks, decode in batches and
a prefix hit agree exactly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kvcore.errors import InvalidArgument, Unsupported
from kvcore.model.config import ModelConfig, model_config
from kvcore.model.elementwise import Elementwise
from kvcore.model.hugepages import collapse_resident_memory, large_apart_from_small
from kvcore.model.rope import RopeTable, rope_config
from kvcore.model.weights import Linear, WeightFiles

log = logging.getLogger(__name__)
HUGE_PAGES_FROM_BYTES = 64 << 20
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class _Layer:
    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear


class FlatDecoder:
    """A decoder of a flat family with fused QKV and gate-up and packed linear layers."""

    implementation = "flat"

    def __init__(
        self, hf_config: Any, path: Path, dtype: torch.dtype, max_context: int | None = None
    ) -> None:
        """Read the weights of ``path``.

        Raises:
            Unsupported: a variation that the loop does not have (the message names it).
            Corrupt: a weight is missing or has the wrong shape.
        """
        if hf_config.hidden_act != "silu":
            raise Unsupported(f"hidden_act {hf_config.hidden_act!r} (allowed: silu)")
        if getattr(hf_config, "attn_logit_softcapping", None):
            raise Unsupported("soft-capped attention scores")
        heads, hidden = int(hf_config.num_attention_heads), int(hf_config.hidden_size)
        head_dim = int(getattr(hf_config, "head_dim", None) or hidden // heads)
        rope = rope_config(hf_config)
        self.config: ModelConfig = model_config(
            hf_config,
            path,
            num_kv_heads=int(getattr(hf_config, "num_key_value_heads", None) or heads),
            head_dim=head_dim,
            head_dim_v=head_dim,
            attention_scale=head_dim**-0.5,
            max_context=max_context,
        )
        self.dtype = dtype
        self._ops = Elementwise(dtype, float(hf_config.rms_norm_eps))
        self._rope = RopeTable(rope, head_dim, self.config.max_position)
        with WeightFiles(path) as files, torch.inference_mode(), large_apart_from_small():
            vocab = (self.config.vocab_size, hidden)
            self._embedding = files.get("model.embed_tokens.weight", vocab, dtype)
            self._norm = files.get("model.norm.weight", (hidden,), dtype)
            tied = bool(hf_config.tie_word_embeddings)
            head = self._embedding if tied else files.get("lm_head.weight", vocab, dtype)
            self._head = Linear(head)
            inner = int(hf_config.intermediate_size)
            # Freed copies would leave holes between the packed weights, too small for huge pages.
            most = max(2 * inner * hidden, 3 * heads * head_dim * hidden)
            scratch = torch.empty(most if self._head.packed else 0, dtype=dtype)
            self._layers = [
                self._read_layer(files, f"model.layers.{i}.", inner, scratch)
                for i in range(self.config.num_layers)
            ]
        self.huge_page_bytes = self._use_huge_pages()

    @property
    def row_invariant(self) -> bool:
        """Whether every linear layer passed its trial of row invariance on this machine."""
        layer = self._layers[0]
        used = (layer.qkv, layer.out, layer.gate_up, layer.down, self._head)
        return all(linear.row_invariant for linear in used)

    @property
    def linears(self) -> str:
        """Which matrix kernels run: ``onednn-packed`` or ``torch``."""
        return "onednn-packed" if self._head.packed else "torch"

    @torch.inference_mode()
    def forward(
        self, tokens: Tensor, positions: Tensor, attend: Attend, logits_rows: Tensor
    ) -> Tensor:
        """One step over ``T`` rows.

        Args:
            tokens: int32 or int64 ``[T]``, ``T >= 1``.
            positions: int32 or int64 ``[T]``, each below ``config.max_position``.
            attend: ``(layer, q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D]) -> [T, Hq * D]`` in the
                model's dtype. q, k and v are views with a row stride, valid during the call only.
            logits_rows: int32 or int64 ``[R]``, the rows whose logits are wanted (may be empty).

        Returns:
            float32 ``[R, vocab_size]``.

        Raises:
            InvalidArgument: no rows, or a position outside the model's range.
        """
        if tokens.numel() == 0:
            raise InvalidArgument("tokens: empty (at least one row)")
        c, ops, last = self.config, self._ops, self.config.num_layers - 1
        parts = [c.num_q_heads, c.num_kv_heads, c.num_kv_heads]
        rotation = self._rope.rows(positions)
        x = functional.embedding(tokens, self._embedding)
        h = ops.rms_norm(x, self._layers[0].input_norm)
        for index, layer in enumerate(self._layers):
            heads = layer.qkv(h).view(-1, sum(parts), c.head_dim)
            ops.rope(heads, rotation, parts[0], parts[1], layer.q_norm, layer.k_norm)
            attended = attend(index, *torch.split(heads, parts, 1))
            if index == last:  # nothing below mixes rows: only those wanted go on
                if logits_rows.numel() == 0:
                    return torch.empty(0, c.vocab_size)
                x, attended = x.index_select(0, logits_rows), attended.index_select(0, logits_rows)
            h = ops.rms_norm(x, layer.post_norm, layer.out(attended))
            following = self._norm if index == last else self._layers[index + 1].input_norm
            h = ops.rms_norm(x, following, layer.down(ops.silu_mul(layer.gate_up(h))))
        return self._head(h).float()

    def _use_huge_pages(self) -> int:
        """Bytes of this process in huge pages; small models fit the translation cache anyway."""
        layer = self._layers[0]
        shapes = [layer.qkv, layer.out, layer.gate_up, layer.down]
        held = sum(x.in_features * x.out_features for x in shapes) * len(self._layers)
        if held * self.dtype.itemsize < HUGE_PAGES_FROM_BYTES:
            return 0
        huge, looked_at = collapse_resident_memory()
        log.info("packed weights: %d of %d MiB in huge pages", huge >> 20, looked_at >> 20)
        return huge

    def _read_layer(self, files: WeightFiles, prefix: str, inner: int, scratch: Tensor) -> _Layer:
        c, dtype = self.config, self.dtype
        hidden, q_rows = c.hidden_size, c.num_q_heads * c.head_dim
        kv_rows = c.num_kv_heads * c.head_dim

        def stacked(names: str, rows: tuple[int, ...], width: int) -> Linear:
            parts = [prefix + name for name in names.split()]
            pairs = list(zip(parts, rows, strict=True))
            weights = [files.get(f"{p}.weight", (n, width), dtype) for p, n in pairs]
            own = scratch[: sum(rows) * width].view(-1, width) if len(scratch) else None
            weight = torch.cat(weights, out=own)
            biases = [files.maybe(f"{p}.bias", (n,), dtype) for p, n in pairs]
            present = [bias for bias in biases if bias is not None]
            if present and len(present) != len(biases):
                raise Unsupported(f"{prefix}: some of {names} have a bias and some have none")
            return Linear(weight, torch.cat(present) if present else None)

        return _Layer(
            input_norm=files.get(f"{prefix}input_layernorm.weight", (hidden,), dtype),
            qkv=stacked(
                "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
                (q_rows, kv_rows, kv_rows),
                hidden,
            ),
            q_norm=files.maybe(f"{prefix}self_attn.q_norm.weight", (c.head_dim,), dtype),
            k_norm=files.maybe(f"{prefix}self_attn.k_norm.weight", (c.head_dim,), dtype),
            out=stacked("self_attn.o_proj", (hidden,), q_rows),
            post_norm=files.get(f"{prefix}post_attention_layernorm.weight", (hidden,), dtype),
            gate_up=stacked("mlp.gate_proj mlp.up_proj", (inner, inner), hidden),
            down=stacked("mlp.down_proj", (hidden,), inner),
        )
