"""Page keys of prompts, under the namespace of what the workers run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvcore.keys import Namespace, page_keys
from kvcore.pages import geometry
from kvcore.router.dispatch import KeysOf
from kvcore.router.state import Worker


def keys_under(secret: bytes, dtype: str) -> KeysOf:
    """The dispatcher's ``keys_of``: keys under ``secret`` for workers computing in ``dtype``.

    The weights' epoch covers the model's configuration, rope included.
    """
    known: dict[tuple[str, str, str], tuple[Namespace, bytes]] = {}

    def keys_of(worker: Worker, tokens: Sequence[int]) -> tuple[bytes, list[bytes]]:
        identity = (worker.model, worker.model_epoch, worker.page_spec)
        if identity not in known:
            known[identity] = _namespace(*identity, dtype)
        namespace, digest = known[identity]
        unit = geometry(worker.page_spec).page_size
        return digest, page_keys(secret, namespace, np.asarray(tokens, np.int32), unit)

    return keys_of


def _namespace(model: str, epoch: str, spec: str, dtype: str) -> tuple[Namespace, bytes]:
    namespace = Namespace(
        tenant_salt="",
        model_id=model or None,
        weights_epoch=epoch or None,
        kv_geometry=spec or None,
        dtype=dtype,
        rope=f"of {epoch}",
        lora="",
        multimodal="",
    )
    return namespace, namespace.digest() or b""
