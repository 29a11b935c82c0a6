"""A model directory's tokenizer and chat template, without its weights and without torch."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcore.errors import InvalidArgument, Unsupported
from kvcore.serve.errors import ApiError

if TYPE_CHECKING:
    from jinja2 import Template
    from tokenizers import Tokenizer


class ModelCodec:
    """Text to tokens and back for one model directory (implements ``text.TextCodec``).

    Raises InvalidArgument when config.json lacks what is needed, Unsupported when there is no
    tokenizer.json.
    """

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        config = _read(path / "config.json")
        try:
            self.vocab_size = int(config["vocab_size"])
            self.max_context = int(config["max_position_embeddings"])
        except KeyError as error:
            raise InvalidArgument(f"{path}/config.json has no {error}") from error
        generation = _read(path / "generation_config.json", optional=True)
        self.eos_ids = _ids(generation.get("eos_token_id", config.get("eos_token_id")))
        if not (path / "tokenizer.json").is_file():
            raise Unsupported(f"model: {path} has no tokenizer.json (a fast tokenizer is needed)")
        self._tokenizer: Tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        settings = _read(path / "tokenizer_config.json", optional=True)
        self._special = {k: _content(v) for k, v in settings.items() if k.endswith("_token")}
        self._template = _template(path, settings)
        decoder = json.loads(self._tokenizer.to_str()).get("decoder") or {}
        self._byte_level = "ByteLevel" in json.dumps(decoder)

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt, with the special tokens the model expects."""
        return list(self._tokenizer.encode(text).ids)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation. Raises ApiError when the template refuses it."""
        from jinja2 import TemplateError

        if self._template is None:
            raise ApiError(400, "messages: this model has no chat template", param="messages")
        try:
            text = self._template.render(
                messages=messages, add_generation_prompt=True, **self._special
            )
        except (TemplateError, TypeError) as error:
            raise ApiError(400, f"messages: {error}", param="messages") from error
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of tokens, special tokens left out."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def token_bytes(self, token: int) -> bytes:
        """The bytes one token stands for (perhaps a part of a character)."""
        text = self._tokenizer.id_to_token(token)
        if text is None:
            return b""
        if self._byte_level and all(char in _BYTES for char in text):
            return bytes(_BYTES[char] for char in text)
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            return bytes([int(text[3:5], 16)])
        return str(text.replace("\u2581", " ")).encode()


def _read(path: Path, optional: bool = False) -> dict[str, Any]:
    if optional and not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"model: cannot read {path}: {error}") from error
    return value if isinstance(value, dict) else {}


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(i) for i in value) if isinstance(value, list) else (int(value),)


def _content(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")


def _template(path: Path, settings: Mapping[str, Any]) -> Template | None:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    source = settings.get("chat_template")
    if (path / "chat_template.jinja").is_file():
        source = (path / "chat_template.jinja").read_text(encoding="utf-8")
    if isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source}
        source = named.get("default")
    if not isinstance(source, str):
        return None
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    env.filters["tojson"] = lambda value, indent=None: json.dumps(
        value, ensure_ascii=False, indent=indent
    )
    env.globals["raise_exception"] = _refuse
    env.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return env.from_string(source)


def _refuse(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _byte_table() -> dict[str, int]:
    """Byte-level BPE writes each byte as a printable character (GPT-2, encoder.py)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in plain}
    others = (byte for byte in range(256) if byte not in plain)
    table.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return table


_BYTES = _byte_table()
