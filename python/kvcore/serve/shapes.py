"""Answers of the OpenAI API: whole ones and the chunks of a stream."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Sequence
from typing import Any

from kvcore.router.state import Done


@dataclasses.dataclass(frozen=True)
class TokenInfo:
    """One token with its log probability and the likeliest ones: (text, bytes, logprob)."""

    text: str
    raw: bytes
    logprob: float
    top: tuple[tuple[str, bytes, float], ...]
    offset: int


@dataclasses.dataclass
class Piece:
    """A part of an answer; the last one has the finish reason."""

    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    infos: list[TokenInfo] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None

    def add(self, other: Piece) -> None:
        """Append what follows."""
        self.text += other.text
        self.token_ids += other.token_ids
        self.infos += other.infos
        self.finish_reason = other.finish_reason


@dataclasses.dataclass(frozen=True)
class Shape:
    """How the answers of one request look; ``logprobs`` says whether they were asked for."""

    chat: bool
    model: str
    logprobs: bool
    token_ids: bool
    id: str = dataclasses.field(default_factory=lambda: secrets.token_hex(14))
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    def head(self, chunk: bool) -> dict[str, Any]:
        """The fields that every answer of this request shares."""
        kind = "chat.completion" if self.chat else "text_completion"
        return {
            "id": ("chatcmpl-" if self.chat else "cmpl-") + self.id,
            "object": kind + (".chunk" if chunk and self.chat else ""),
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
        }

    def choice(self, index: int, piece: Piece, prompt: Sequence[int]) -> dict[str, Any]:
        """A whole choice."""
        choice = self._choice(index, piece)
        if self.chat:
            choice["message"] = {"role": "assistant", "content": piece.text, "refusal": None}
        else:
            choice["text"] = piece.text
        if self.token_ids:
            choice["prompt_token_ids"] = list(prompt)
        return choice

    def chunk(self, index: int, piece: Piece, first: bool) -> dict[str, Any]:
        """One event of a stream."""
        choice = self._choice(index, piece)
        if self.chat:
            delta: dict[str, Any] = {"role": "assistant"} if first else {}
            if piece.text or first:
                delta["content"] = piece.text
            choice["delta"] = delta
        else:
            choice["text"] = piece.text
        return {**self.head(chunk=True), "choices": [choice]}

    def _choice(self, index: int, piece: Piece) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "logprobs": self._logprobs(piece.infos) if self.logprobs else None,
            "finish_reason": piece.finish_reason,
        }
        if self.token_ids:
            choice["token_ids"] = piece.token_ids
        return choice

    def _logprobs(self, infos: Sequence[TokenInfo]) -> dict[str, Any]:
        if self.chat:
            return {"content": [_chat_logprob(info) for info in infos], "refusal": None}
        return {
            "tokens": [info.text for info in infos],
            "token_logprobs": [info.logprob for info in infos],
            # The API's "up to logprobs + 1 elements": the token itself is always among them.
            "top_logprobs": [
                {**{text: value for text, _, value in info.top}, info.text: info.logprob}
                for info in infos
            ],
            "text_offset": [info.offset for info in infos],
        }


def _chat_logprob(info: TokenInfo) -> dict[str, Any]:
    top = [{"token": text, "logprob": value, "bytes": list(raw)} for text, raw, value in info.top]
    return {
        "token": info.text,
        "logprob": info.logprob,
        "bytes": list(info.raw),
        "top_logprobs": top,
    }


def usage(dones: Sequence[Done]) -> dict[str, Any]:
    """Usage over all choices of a request."""
    prompt = sum(done.prompt_tokens for done in dones)
    completion = sum(done.completion_tokens for done in dones)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(done.cached_tokens for done in dones)},
    }


def facts(dones: Sequence[Done]) -> dict[str, Any]:
    """How the answer was made (an extension of the API): one entry per choice's request."""
    keys = ("kv_bytes", "transport", "arrived_fraction", "exposed_s", "prefill_s", "queue_s")
    return {
        key: [getattr(done, key) for done in dones]
        for key in (*keys, "computed_prompt_tokens", "attempts")
    }
