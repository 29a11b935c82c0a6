"""Every other decoder-only architecture, through transformers' own code and our attention.

transformers lets a model's attention be a registered function (``AttentionInterface``). Ours hands
q, k and v of each layer to the same callback as the flat loop: all sequences of a step lie in one
batch row ``[1, T]``, positions are given, and transformers keeps no cache. Slower, but right: a
trial at load compares with the model's own attention and refuses what this scheme cannot express.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvcore.errors import Corrupt, InvalidArgument, Unsupported
from kvcore.model.config import ModelConfig, context_length, model_config

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
ATTENTION_NAME = "kvcore"
# Relative root mean square of the logits' difference that the trial accepts.
_TRIAL_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
# Arguments of other models' attention that change the scores in ways pages do not express.
_SCORE_CHANGES = ("s_aux", "sinks", "position_bias", "head_mask", "alibi")
_step = threading.local()


@dataclass
class _Observed:
    """What the trial saw of a model's attention."""

    layers: list[int] = field(default_factory=list)
    geometries: set[tuple[int, int, int, int]] = field(default_factory=set)
    scales: set[float] = field(default_factory=set)
    soft_caps: set[float] = field(default_factory=set)
    windows: dict[int, int] = field(default_factory=dict)  # of each layer; 0: none


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature: query ``[1, Hq, T, D]``, returns ``[1, T, Hq, Dv]``."""
    observed: _Observed | None = getattr(_step, "observed", None)
    layer = getattr(module, "layer_idx", None)
    if observed is not None:
        _check_call(module, layer, attention_mask, kwargs)
        observed.layers.append(int(layer or 0))
        window = int(kwargs.get("sliding_window") or 0)
        observed.windows[int(layer or 0)] = window if window < _step.max_position else 0
        observed.soft_caps.add(float(kwargs.get("softcap") or 0.0))
        heads, dim = query.shape[1], query.shape[3]
        observed.geometries.add((heads, key.shape[1], dim, value.shape[3]))
        observed.scales.add(float(scaling if scaling is not None else dim**-0.5))
    rows = [part[0].transpose(0, 1).contiguous() for part in (query, key, value)]
    out: Tensor = _step.attend(layer, *rows)
    return out.view(1, query.shape[2], query.shape[1], value.shape[3]), None


def _check_call(module: Any, layer: Any, mask: Tensor | None, kwargs: dict[str, Any]) -> None:
    if layer is None:
        raise Unsupported("its attention has no layer_idx")
    if mask is not None:
        raise Unsupported("it adds its own mask or bias to the attention scores")
    if kwargs.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise Unsupported("attention is not causal")
    for name in _SCORE_CHANGES:
        if kwargs.get(name) is not None or isinstance(getattr(module, name, None), Tensor):
            raise Unsupported(f"attention scores are changed by {name}")


def _register() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, _attention)
    AttentionMaskInterface.register(ATTENTION_NAME, lambda *args, **kwargs: None)


class TransformersDecoder:
    """A transformers model whose attention is a callback over pages."""

    implementation = "transformers"
    row_invariant = False

    def __init__(
        self, hf_config: Any, path: Path, dtype: torch.dtype, max_context: int | None = None
    ) -> None:
        """Load the model and try it.

        Raises:
            Unsupported: its attention cannot be expressed as causal attention over pages.
            Corrupt: weights are missing or have the wrong shape.
        """
        self._model = _load_model(path, dtype)
        self._takes_rows = "logits_to_keep" in inspect.signature(self._model.forward).parameters
        self.dtype = dtype
        max_position = context_length(hf_config, max_context)
        observed = self._try(hf_config, max_position)
        heads, kv_heads, head_dim, head_dim_v = observed.geometries.pop()
        self.config: ModelConfig = model_config(
            hf_config,
            path,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            attention_scale=observed.scales.pop(),
            soft_cap=observed.soft_caps.pop(),
            max_context=max_context,
        )
        if heads != self.config.num_q_heads:
            raise Unsupported(
                f"attention has {heads} query heads, not {self.config.num_q_heads} as configured"
            )
        if tuple(observed.windows[i] for i in sorted(observed.windows)) != self.config.windows:
            raise Unsupported("its layers' sliding windows are not those of its configuration")

    @torch.inference_mode()
    def forward(
        self, tokens: Tensor, positions: Tensor, attend: Attend, logits_rows: Tensor
    ) -> Tensor:
        """As ``FlatDecoder.forward``; q, k and v are contiguous copies."""
        if tokens.numel() == 0:
            raise InvalidArgument("tokens: empty (at least one row)")
        if int(positions.min()) < 0 or int(positions.max()) >= self.config.max_position:
            raise InvalidArgument(f"positions: outside 0..{self.config.max_position - 1}")
        return self._run(tokens, positions, attend, logits_rows)

    def _run(self, tokens: Tensor, positions: Tensor, attend: Attend, rows: Tensor) -> Tensor:
        _step.attend = attend
        try:
            keep = {"logits_to_keep": rows.long()} if self._takes_rows else {}
            logits: Tensor = self._model(
                input_ids=tokens.long()[None],
                position_ids=positions.long()[None],
                use_cache=False,
                **keep,
            ).logits[0]
        finally:
            _step.attend = None
        return (logits if self._takes_rows else logits.index_select(0, rows)).float()

    @torch.inference_mode()
    def _try(self, hf_config: Any, max_position: int) -> _Observed:
        """Two sequences in two mixed steps against the model's own attention, one by one."""
        vocab, layers = int(hf_config.vocab_size), int(hf_config.num_hidden_layers)
        lengths = [min(9, max_position), min(6, max_position)]
        generator = torch.Generator().manual_seed(1)
        texts = [torch.randint(vocab, (n,), generator=generator) for n in lengths]
        self._model.set_attn_implementation("eager")
        own = [self._model(input_ids=t[None], use_cache=False).logits[0].float() for t in texts]
        self._model.set_attn_implementation(ATTENTION_NAME)
        _step.observed, _step.max_position = _Observed(), max_position
        try:
            got = self._mixed_steps(texts)
            observed: _Observed = _step.observed
        finally:
            _step.observed = None
        if observed.layers != [*range(layers), *range(layers)]:
            raise Unsupported("not every layer attends once, in order, through AttentionInterface")
        if not len(observed.geometries) == len(observed.scales) == len(observed.soft_caps) == 1:
            raise Unsupported("its layers differ in head counts, head sizes, scale or soft cap")
        expected = torch.cat(own)
        error = float((got - expected).norm() / (expected - expected.mean(-1, keepdim=True)).norm())
        if not error <= _TRIAL_TOLERANCE[self.dtype]:
            raise Unsupported(
                f"with attention over pages it differs from its own attention (relative error "
                f"{error:.2g}, allowed {_TRIAL_TOLERANCE[self.dtype]:.2g})"
            )
        return observed

    def _mixed_steps(self, texts: list[Tensor]) -> Tensor:
        """Logits of all rows: most tokens of each text in one step, the rest in another."""
        cuts = [max(1, len(t) * 2 // 3) for t in texts]
        memory = _TrialMemory()
        logits: list[list[Tensor]] = [[] for _ in texts]
        for bounds in (
            [(0, c) for c in cuts],
            [(c, len(t)) for c, t in zip(cuts, texts, strict=True)],
        ):
            memory.counts = [stop - start for start, stop in bounds]
            tokens = torch.cat([t[a:b] for t, (a, b) in zip(texts, bounds, strict=True)])
            positions = torch.cat([torch.arange(a, b) for a, b in bounds])
            rows = torch.arange(len(tokens))
            out = self._run(tokens, positions, memory.attend, rows)
            for kept, part in zip(logits, torch.split(out, memory.counts), strict=True):
                kept.append(part)
        return torch.cat([part for kept in logits for part in kept])


class _TrialMemory:
    """Keys and values of the trial's sequences, and causal attention in float32."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self._held: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outs = []
        parts = zip(*(torch.split(x, self.counts) for x in (q, k, v)), strict=True)
        observed: _Observed = _step.observed
        scale, cap = next(iter(observed.scales)), next(iter(observed.soft_caps))
        window = observed.windows[layer]
        for sequence, (qs, ks, vs) in enumerate(parts):
            if (layer, sequence) in self._held:
                old_k, old_v = self._held[layer, sequence]
                ks, vs = torch.cat((old_k, ks)), torch.cat((old_v, vs))
            self._held[layer, sequence] = (ks, vs)
            groups = q.shape[1] // k.shape[1]
            keys, values = (x.float().repeat_interleave(groups, 1) for x in (ks, vs))
            scores = torch.einsum("tgd,ngd->gtn", qs.float(), keys) * scale
            scores = cap * torch.tanh(scores / cap) if cap else scores
            ahead = len(ks) - len(qs) + 1
            hidden = torch.ones(len(qs), len(ks), dtype=torch.bool).triu(ahead)
            if window:
                hidden |= torch.ones_like(hidden).tril(ahead - 1 - window)
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            outs.append(torch.einsum("gtn,ngd->tgd", weights, values).flatten(1))
        return torch.cat(outs).to(q.dtype)


def _load_model(path: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    _register()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(path),
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (ValueError, ImportError, KeyError) as error:
        reason = "its attention is not open to AttentionInterface"
        if error.args != (ATTENTION_NAME,):
            reason = f"transformers cannot load it for causal generation: {error}"
        raise Unsupported(reason) from error
    model, info = loaded
    wrong = [*info["missing_keys"], *info.get("mismatched_keys", [])]
    if wrong:
        raise Corrupt(f"weights are missing or have the wrong shape: {sorted(map(str, wrong))[:5]}")
    return model.eval()
