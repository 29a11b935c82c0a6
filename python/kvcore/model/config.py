"""What the rest of kvcore needs to know about a model, and which models are refused."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcore.errors import InvalidArgument, Unsupported
from kvcore.model.rope import rope_parameters

FLAT_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
# Rope types whose angles depend on the position alone (dynamic and longrope change with length).
_STATELESS_ROPE = ("default", "linear", "llama3", "yarn")
_RECURRENT_FIELDS = (
    "state_size",
    "ssm_state_size",
    "mamba_d_state",
    "mamba_d_ssm",
    "conv_L_cache",
    "lru_width",
)
_RECURRENT_TYPES = ("rwkv", "xlstm")
_ALIBI_TYPES = ("bloom", "mpt", "jais2")


@dataclass(frozen=True)
class ModelConfig:
    """Geometry and limits of a loaded model; lengths in tokens.

    ``windows``: sliding window of each layer, 0 where a layer sees everything (pages of tokens that
    no window reaches any more stay held all the same). ``soft_cap``: of the scores; 0: none.
    """

    model_type: str
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    hidden_size: int
    vocab_size: int
    max_position: int
    attention_scale: float
    rope: str
    eos_ids: tuple[int, ...]
    bos_id: int | None
    windows: tuple[int, ...] = ()
    soft_cap: float = 0.0

    @property
    def attention_options(self) -> dict[str, Any]:
        """What :class:`kvcore.kernels.AttentionPlan` has to know beside heads and pages."""
        return {"scale": self.attention_scale, "window": self.windows, "soft_cap": self.soft_cap}


def read_hf_config(path: Path) -> Any:
    """The transformers configuration of a model directory.

    Raises:
        Unsupported: an architecture this transformers does not know (remote code is never run).
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(path), trust_remote_code=False)
    except (ValueError, KeyError, OSError) as error:
        raise Unsupported(f"model: cannot read the configuration in {path}: {error}") from error


def refusal(hf_config: Any, max_context: int | None = None) -> str | None:
    """Why kvcore cannot run this model, or None.

    Only what the configuration tells; the transformers path checks the rest by a trial run.
    """

    def get(name: str, default: Any = None) -> Any:
        return getattr(hf_config, name, default)

    if get("is_encoder_decoder", False):
        return "encoder-decoder models have cross attention, which is not paged"
    if get("vision_config") or get("audio_config") or get("text_config"):
        return "multimodal models are not supported, only their text decoders"
    if get("kv_lora_rank"):
        return "MLA (multi-head latent attention) is not supported yet"
    recurrent = [name for name in _RECURRENT_FIELDS if get(name)]
    recurrent += [kind for kind in _RECURRENT_TYPES if get("model_type") == kind]
    kinds = set(get("layer_types") or [])
    other = kinds - {"full_attention", "sliding_attention", "chunked_attention"}
    if recurrent or other:
        return f"hybrid or recurrent layers ({', '.join([*recurrent, *sorted(other)])}) keep state"
    if get("is_decoder") is False and get("is_causal") is False:
        return "attention is not causal"
    if get("alibi", False) or get("model_type") in _ALIBI_TYPES:
        return "ALiBi adds a bias to the attention scores"
    rope = str(rope_parameters(hf_config).get("rope_type", "default"))
    if rope not in _STATELESS_ROPE:
        return f"rope type {rope!r} depends on the sequence length (allowed: {_STATELESS_ROPE})"
    chunk, context = get("attention_chunk_size"), context_length(hf_config, max_context)
    if "chunked_attention" in kinds and chunk and chunk < context:
        return (
            f"attention in chunks of {chunk} tokens is not supported "
            f"(the context is {context}; a context of at most {chunk} would be)"
        )
    return None


def layer_windows(hf_config: Any, max_context: int | None = None) -> tuple[int, ...]:
    """Sliding window of each layer; 0 where there is none, or none shorter than the context."""
    window = getattr(hf_config, "sliding_window", None)
    layers = int(hf_config.num_hidden_layers)
    kinds = list(getattr(hf_config, "layer_types", None) or [])
    if not kinds and getattr(hf_config, "use_sliding_window", True):
        kinds = ["sliding_attention"] * layers
    if not kinds or not window or window >= context_length(hf_config, max_context):
        return (0,) * layers
    return tuple(int(window) if kind == "sliding_attention" else 0 for kind in kinds)


def context_length(hf_config: Any, max_context: int | None = None) -> int:
    """Positions the model may use: its own limit, or a smaller one that the caller asks for."""
    own = getattr(hf_config, "max_position_embeddings", None)
    if own is None and max_context is None:
        raise Unsupported("the configuration has no max_position_embeddings; give max_context")
    if max_context is not None and not 1 <= max_context <= (own or max_context):
        raise InvalidArgument(f"max_context: {max_context} is outside 1..{own}")
    return max_context if max_context is not None else int(own or 0)


def model_config(
    hf_config: Any,
    path: Path,
    *,
    num_kv_heads: int,
    head_dim: int,
    head_dim_v: int,
    attention_scale: float,
    soft_cap: float = 0.0,
    max_context: int | None = None,
) -> ModelConfig:
    """Fill a ``ModelConfig``; the attention geometry is the caller's, who knows the weights."""
    rope = rope_parameters(hf_config)
    return ModelConfig(
        model_type=str(hf_config.model_type),
        num_layers=int(hf_config.num_hidden_layers),
        num_q_heads=int(hf_config.num_attention_heads),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        hidden_size=int(hf_config.hidden_size),
        vocab_size=int(hf_config.vocab_size),
        max_position=context_length(hf_config, max_context),
        attention_scale=attention_scale,
        rope=json.dumps({k: v for k, v in sorted(rope.items()) if v is not None}),
        eos_ids=_eos_ids(hf_config, path),
        bos_id=_first_int(getattr(hf_config, "bos_token_id", None)),
        windows=layer_windows(hf_config, max_context),
        soft_cap=soft_cap,
    )


def _eos_ids(hf_config: Any, path: Path) -> tuple[int, ...]:
    """generation_config.json has the last word: chat models end turns with their own token."""
    found = getattr(hf_config, "eos_token_id", None)
    generation = path / "generation_config.json"
    if generation.is_file():
        found = json.loads(generation.read_text()).get("eos_token_id", found)
    if found is None:
        return ()
    ids: Iterable[Any] = found if isinstance(found, (list, tuple)) else [found]
    return tuple(sorted({int(i) for i in ids}))


def _first_int(value: Any) -> int | None:
    if isinstance(value, (list, tuple)):
        return int(value[0]) if value else None
    return None if value is None else int(value)
