"""``load``: one call from a name to a model that can step."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from kvcore.config import PAGE_FORMATS
from kvcore.errors import InvalidArgument, Unsupported
from kvcore.model.config import FLAT_FAMILIES, ModelConfig, read_hf_config, refusal
from kvcore.model.flat import Attend, FlatDecoder
from kvcore.model.hub import ModelFiles, default_cache_dir, resolve, weights_digest

if TYPE_CHECKING:
    from kvcore.compress import Statistics
    from kvcore.pages import PageSpec

log = logging.getLogger(__name__)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Decoder(Protocol):
    """What runs a step: the flat loop, or transformers behind the same signature."""

    implementation: str
    config: ModelConfig

    @property
    def row_invariant(self) -> bool: ...

    def forward(
        self, tokens: Tensor, positions: Tensor, attend: Attend, logits_rows: Tensor
    ) -> Tensor: ...


class Model:
    """A loaded model: geometry, tokenizer, and ``forward`` over rows of tokens.

    Attributes:
        config: geometry and limits.
        tokenizer: the transformers tokenizer, with chat template where the model has one.
        model_id: the name that requests use; ``epoch``: BLAKE2b-256 of config and weights (hex).
        dtype: "bfloat16" or "float32"; ``implementation``: "flat" or "transformers".
        forward: see ``kvcore.model.flat.FlatDecoder.forward``.
    """

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Any,
        files: ModelFiles,
        epoch: str,
        dtype: str,
        cache_dir: Path | None = None,
    ) -> None:
        self.config = decoder.config
        self.implementation = decoder.implementation
        self.row_invariant = decoder.row_invariant
        self.tokenizer = tokenizer
        self.path = files.path
        self.model_id = files.model_id
        self.epoch = epoch
        self.dtype = dtype
        self.forward = decoder.forward
        self.decoder = decoder
        self.cache_dir = cache_dir or default_cache_dir()

    def page_spec(self, page_size: int = 64, format: str | None = None) -> PageSpec:
        """The page geometry of this model; ``format`` defaults to the one of its dtype."""
        from kvcore.pages import PageSpec

        c = self.config
        return PageSpec(
            num_layers=c.num_layers,
            num_kv_heads=c.num_kv_heads,
            head_dim_k=c.head_dim,
            head_dim_v=c.head_dim_v,
            page_size=page_size,
            format=format or PAGE_FORMATS[self.dtype],
        )

    def kv_statistics(self, page_size: int = 64) -> Statistics:
        """What formats do to this model's pages: from the cache directory, else measured once."""
        from kvcore.model.calibration import cached_statistics

        return cached_statistics(self, page_size, self.cache_dir)


def load(
    model: str | Path,
    dtype: str = "bfloat16",
    *,
    cache_dir: str | Path | None = None,
    max_context: int | None = None,
) -> Model:
    """Load a model for stepping.

    Args:
        model: a Hugging Face directory, a ``.gguf`` file or a known name (``hub.resolve``).
        dtype: "bfloat16" or "float32", of weights and activations.
        cache_dir: where converted models live.
        max_context: use at most this many positions (tokens).

    Raises:
        InvalidArgument: unknown name or dtype. ModelUnavailable: see ``hub.resolve``.
        Unsupported: a model kvcore cannot run; the message gives the reason.
    """
    if dtype not in DTYPES:
        raise InvalidArgument(f"dtype: {dtype!r} (allowed: {', '.join(DTYPES)})")
    files = resolve(model, cache_dir)
    hf_config = read_hf_config(files.path)
    reason = refusal(hf_config, max_context)
    if reason:
        raise Unsupported(f"model: {files.model_id} ({hf_config.model_type}): {reason}")
    decoder = _decoder(hf_config, files, DTYPES[dtype], max_context)
    log.info("%s: %s decoder, %s", files.model_id, decoder.implementation, dtype)
    tokenizer = load_tokenizer(files.path)
    epoch = weights_digest(files, cache_dir)
    return Model(decoder, tokenizer, files, epoch, dtype, Path(cache_dir) if cache_dir else None)


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer of a model directory, or None when it has no tokenizer files."""
    from transformers import AutoTokenizer

    path = Path(path)
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        return None
    return AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)


def _decoder(
    hf_config: Any, files: ModelFiles, dtype: torch.dtype, max_context: int | None
) -> Decoder:
    """The flat loop where it fits, else transformers; the log says which and why."""
    if hf_config.model_type in FLAT_FAMILIES:
        try:
            return FlatDecoder(hf_config, files.path, dtype, max_context)
        except Unsupported as error:
            log.info("%s: not in the flat loop: %s", files.model_id, error)
    from kvcore.model.fallback import TransformersDecoder

    try:
        return TransformersDecoder(hf_config, files.path, dtype, max_context)
    except Unsupported as error:
        raise Unsupported(f"model: {files.model_id} ({hf_config.model_type}): {error}") from error
