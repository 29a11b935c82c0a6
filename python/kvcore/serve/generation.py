"""From the router's tokens to the pieces of an answer: text, stop strings, log probabilities."""

from __future__ import annotations

import dataclasses
from typing import Protocol

from kvcore.router.state import Ask, Output, Tokens
from kvcore.serve.protocol import Params
from kvcore.serve.shapes import Piece, TokenInfo
from kvcore.serve.text import Detokenizer, StopFilter, TextCodec

_LEAST_LOGPROB = -9999.0  # JSON has no infinity


class Stream(Protocol):
    """The outputs of one request in flight."""

    async def next(self) -> Output:
        """The next output; after Done or Failure there is none."""
        ...

    def finish(self) -> None:
        """The answer is complete for the client (a stop string): Done follows."""
        ...

    def cancel(self) -> None:
        """The client is gone. Harmless when the request is over."""
        ...


class Backend(Protocol):
    """What the HTTP front needs of the router."""

    def submit(self, ask: Ask) -> Stream:
        """Start a request; trouble shows as a Failure of its stream."""
        ...

    def roles(self) -> dict[str, int]:
        """Live workers by role."""
        ...

    def ready(self) -> bool:
        """Whether workers can serve a request now."""
        ...

    def max_context(self) -> int | None:
        """Tokens that prompt and answer may have together, by the workers; None while unknown."""
        ...

    def now(self) -> float:
        """The clock of ``Ask.deadline``, seconds."""
        ...


@dataclasses.dataclass
class _Held:
    token: int
    info: TokenInfo | None
    start: int
    end: int


class Assembler:
    """Sans-I/O: tokens in, pieces out; a token leaves together with its text."""

    def __init__(self, codec: TextCodec, params: Params) -> None:
        self._codec = codec
        self._top = params.num_logprobs
        self._detok = Detokenizer(codec)
        self._stops = StopFilter(params.stop)
        self._held: list[_Held] = []
        self._made = 0
        self._sent = 0
        self.count = 0
        self.stopped = False

    def push(self, tokens: Tokens) -> Piece:
        """What may go out after these tokens; after a stop string, what came before it."""
        piece = Piece()
        for index, token in enumerate(tokens.ids):
            if self.stopped:
                break
            self.count += 1
            text = self._detok.push(token)
            start, self._made = self._made, self._made + len(text)
            self._held.append(_Held(token, self._info(tokens, index, start), start, self._made))
            self._pass(piece, *self._stops.push(text))
        return piece

    def end(self, reason: str) -> Piece:
        """The last piece."""
        piece = Piece(finish_reason=reason)
        if not self.stopped:
            tail = self._detok.flush()
            self._made += len(tail)
            self._pass(piece, *self._stops.push(tail))
        if self.stopped:
            piece.finish_reason = "stop"
        else:
            self._pass(piece, self._stops.flush(), False)
        return piece

    def _pass(self, piece: Piece, text: str, stopped: bool) -> None:
        piece.text += text
        self._sent += len(text)
        self.stopped = stopped
        free = [h for h in self._held if stopped or h.end <= self._sent]
        self._held = [h for h in self._held if not stopped and h.end > self._sent]
        piece.token_ids += [h.token for h in free]
        piece.infos += [
            h.info for h in free if h.info and (h.end <= self._sent or h.start < self._sent)
        ]

    def _info(self, tokens: Tokens, index: int, offset: int) -> TokenInfo | None:
        if self._top < 0 or index >= len(tokens.logprobs):
            return None
        span = slice(index * self._top, (index + 1) * self._top)
        pairs = zip(tokens.top_ids[span], tokens.top_logprobs[span], strict=True)
        top = tuple((*self._named(t), max(value, _LEAST_LOGPROB)) for t, value in pairs)
        logprob = max(tokens.logprobs[index], _LEAST_LOGPROB)
        return TokenInfo(*self._named(tokens.ids[index]), logprob, top, offset)

    def _named(self, token: int) -> tuple[str, bytes]:
        raw = self._codec.token_bytes(token)
        return raw.decode("utf-8", errors="replace"), raw
