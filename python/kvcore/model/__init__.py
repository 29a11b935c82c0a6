"""Models: from a name, a directory or a GGUF file to ``forward`` over rows of tokens.

Importing this package loads neither torch nor transformers; ``load`` and ``load_tokenizer`` do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcore.model.hub import (
    DEFAULT_MODEL,
    KNOWN_MODELS,
    ModelFiles,
    ModelUnavailable,
    resolve,
    weights_digest,
)

if TYPE_CHECKING:
    from kvcore.model.config import ModelConfig
    from kvcore.model.loading import Model, load, load_tokenizer

__all__ = [
    "DEFAULT_MODEL",
    "KNOWN_MODELS",
    "Model",
    "ModelConfig",
    "ModelFiles",
    "ModelUnavailable",
    "load",
    "load_tokenizer",
    "resolve",
    "weights_digest",
]


def __getattr__(name: str) -> Any:
    if name in ("Model", "load", "load_tokenizer"):
        from kvcore.model import loading

        return getattr(loading, name)
    if name == "ModelConfig":
        from kvcore.model.config import ModelConfig

        return ModelConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
