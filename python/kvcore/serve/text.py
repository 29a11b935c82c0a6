"""Text out of tokens as they come: whole UTF-8 characters only, and stop strings held back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

_REPLACEMENT = "\ufffd"
_MAX_HELD_TOKENS = 8


class TextCodec(Protocol):
    """What the front needs of a tokenizer and its model's configuration."""

    eos_ids: tuple[int, ...]
    vocab_size: int
    max_context: int

    def least_tokens(self, text: str) -> int:
        """Tokens that ``text`` has at least, found in no time."""
        ...

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of a text; ``special``: with the special tokens the model expects."""
        ...

    def chat_text(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """A conversation as text with its own special tokens, ready for the assistant's answer."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of tokens, special tokens left out."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes one token stands for (perhaps a part of a character)."""
        ...


class Detokenizer:
    """Turns tokens into text one by one; an unfinished character waits for its last byte.

    Only a short window is decoded again per token: from the tokens whose text went out last, so
    that tokenizers which look at the previous token (leading spaces) agree with a whole decode.
    """

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._ids: list[int] = []
        self._prefix = 0
        self._read = 0

    def push(self, token: int) -> str:
        """The text that became certain with this token, "" while a character is incomplete."""
        self._ids.append(token)
        return self._take(final=len(self._ids) - self._read >= _MAX_HELD_TOKENS)

    def flush(self) -> str:
        """The rest at the end of an answer; an incomplete character shows as U+FFFD."""
        return self._take(final=True)

    def _take(self, final: bool) -> str:
        known = self._codec.decode(self._ids[self._prefix : self._read])
        text = self._codec.decode(self._ids[self._prefix :])
        if text.endswith(_REPLACEMENT) and not final:
            return ""
        if len(text) <= len(known):  # special tokens have no text
            self._read = len(self._ids)
            return ""
        self._ids = self._ids[self._read :]
        self._prefix, self._read = 0, len(self._ids)
        return text[len(known) :]


class StopFilter:
    """Cuts text before the first stop string; text that may begin one is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max((len(s) for s in stops), default=1)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text that may go out, whether a stop string was found)."""
        if not self._stops:
            return text, False
        held = self._held + text
        cuts = [at for at in (held.find(stop) for stop in self._stops) if at >= 0]
        if cuts:
            self._held = ""
            return held[: min(cuts)], True
        keep = self._may_begin(held)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], False

    def flush(self) -> str:
        """The text held back, at the end of an answer without a stop string."""
        held, self._held = self._held, ""
        return held

    def _may_begin(self, text: str) -> int:
        for size in range(min(len(text), self._longest - 1), 0, -1):
            tail = text[len(text) - size :]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0
