"""Names of pages outside their process: namespaces and chained page keys (csrc/pages/keys.h).

A key names a whole prefix: BLAKE2b-256(key=secret, namespace digest | previous key | tokens of the
unit as little-endian int32). Without the secret nobody can test whether a prompt was seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvcore import _core

__all__ = ["KeyChain", "Namespace", "page_keys"]


@dataclass(frozen=True)
class Namespace:
    """Everything besides the tokens that decides what KV a prefix has.

    Each field is text. An empty text is a statement ("no adapter"); None means "not known", and
    then nothing may be cached: :meth:`digest` is None and there are no keys.

    Attributes:
        tenant_salt: separates tenants that must not share pages.
        model_id, weights_epoch: name and digest of the weights.
        kv_geometry: ``PageSpec.describe()``.
        dtype: compute type of the model.
        rope: rotary settings. lora: adapter name and version. multimodal: digest of other inputs.
    """

    tenant_salt: str | None
    model_id: str | None
    weights_epoch: str | None
    kv_geometry: str | None
    dtype: str | None
    rope: str | None
    lora: str | None
    multimodal: str | None

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Namespace | None:
        """A namespace from named values, e.g. of another engine.

        Returns None (uncacheable) when a name is not known here: a field we cannot interpret may
        change the KV. Names that are missing become None, which is uncacheable too.
        """
        names = [f.name for f in fields(cls)]
        if any(name not in names for name in values):
            return None
        given = {name: values.get(name) for name in names}
        if any(v is not None and not isinstance(v, str) for v in given.values()):
            return None
        return cls(**given)

    @property
    def cacheable(self) -> bool:
        """Whether every field is known."""
        return all(getattr(self, f.name) is not None for f in fields(self))

    def digest(self) -> bytes | None:
        """32 bytes over the tagged fields, or None when a field is unknown."""
        if not self.cacheable:
            return None
        pairs = [(f.name, getattr(self, f.name)) for f in fields(self)]
        return _core.keys.namespace_digest(pairs)


class KeyChain:
    """The keys of one growing sequence; each turn hashes only its new tokens.

    Args:
        secret: 0 to 64 bytes, the same on every worker of a cluster.
        namespace: what the tokens are evaluated under; if uncacheable, no key is ever made.
        unit: tokens per key (the page size).

    Raises:
        InvalidArgument: secret or unit out of range.
    """

    def __init__(self, secret: bytes, namespace: Namespace, unit: int = 64) -> None:
        digest = namespace.digest()
        chain = _core.keys.KeyChain(secret, digest or bytes(32), unit)
        self._chain = chain if digest is not None else None

    def extend(self, tokens: Any) -> list[bytes]:
        """Appends tokens (int32 [n], 0 and up); returns the keys of the units this completes."""
        return [] if self._chain is None else self._chain.extend(tokens)

    @property
    def keys(self) -> list[bytes]:
        """All keys so far, 32 bytes each."""
        return [] if self._chain is None else self._chain.keys

    @property
    def num_tokens(self) -> int:
        """Tokens appended so far, including those of a unit that is not whole yet."""
        return 0 if self._chain is None else self._chain.num_tokens


def page_keys(secret: bytes, namespace: Namespace, tokens: Any, unit: int = 64) -> list[bytes]:
    """The keys of all whole units of ``tokens``.

    Args:
        secret: 0 to 64 bytes.
        namespace: see :class:`Namespace`; uncacheable gives no keys.
        tokens: int32 [n], 0 and up.
        unit: tokens per key.

    Returns:
        ``n // unit`` keys of 32 bytes.

    Raises:
        InvalidArgument: secret, unit or a token out of range.
    """
    return KeyChain(secret, namespace, unit).extend(tokens)
