"""A model directory's tokenizer and chat template, without its weights and without torch."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcore.errors import InvalidArgument, Unsupported
from kvcore.serve.errors import ApiError

if TYPE_CHECKING:
    from jinja2 import Template
    from tokenizers import Tokenizer

# Pre-tokenizers that drop no character, unless told to.
_KEEPING = {"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split"}


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
        facts = json.loads(self._tokenizer.to_str())
        self._byte_level = "ByteLevel" in json.dumps(facts.get("decoder") or {})
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self._chars_per_token, self._lost = _longest_token(facts, vocabulary)

    def least_tokens(self, text: str) -> int:
        """Tokens that ``text`` has at least, found without tokenising it; 0 = not known."""
        if not self._chars_per_token:
            return 0
        kept = len(text) - sum(map(text.count, self._lost))
        return -(-kept // self._chars_per_token)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of a text; ``special``: with the special tokens the model expects.

        Other threads run meanwhile: unlike ``encode``, the tokenizer's batches release the GIL.
        """
        (found,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
        return list(found.ids)

    def chat_text(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """A conversation by the model's template. Raises ApiError when that refuses it."""
        from jinja2 import TemplateError

        if self._template is None:
            raise ApiError(400, "messages: this model has no chat template", param="messages")
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, **self._special
            )
        except (TemplateError, TypeError) as error:
            raise ApiError(400, f"messages: {error}", param="messages") from error

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


def _longest_token(facts: Mapping[str, Any], vocabulary: Mapping[str, int]) -> tuple[int, str]:
    """(characters that one token stands for at most, the characters that have no token).

    Texts that cannot fit are refused by it, so it must hold for every text: (0, "") where more
    characters may be lost on their way to tokens. ``facts``: of tokenizer.json.
    """
    if "ByteLevel" in json.dumps(facts.get("pre_tokenizer") or {}):
        # A token has a character per byte, a text at most as many. Bytes without a token vanish.
        missing = {byte for char, byte in _BYTES.items() if char not in vocabulary}
    else:
        missing = {byte for byte in range(256) if f"<0x{byte:02X}>" not in vocabulary}
    keeps = all(
        step["type"] in _KEEPING and step.get("behavior") != "Removed"
        for step in _steps(facts, "pre_tokenizer")
    )
    padded = any(token["lstrip"] or token["rstrip"] for token in facts.get("added_tokens") or ())
    shrinking = math.prod(map(_shrinking, _steps(facts, "normalizer")))
    if padded or not keeps or not shrinking or missing & set(range(0x80, 0xC0)):
        return 0, ""  # all other characters have a byte between 0x80 and 0xBF
    return shrinking * max(map(len, vocabulary)), "".join(map(chr, missing & set(range(0x80))))


def _steps(facts: Mapping[str, Any], kind: str) -> list[Mapping[str, Any]]:
    step = facts.get(kind) or {"type": "Sequence"}
    if step["type"] != "Sequence":
        return [step]
    return [inner for inner in step.get(f"{kind}s") or step.get("pretokenizers") or ()]


def _shrinking(step: Mapping[str, Any]) -> int:
    """How many characters a normalizer may make one of; 0 = any number."""
    if step["type"] == "Replace":
        pattern = step["pattern"].get("String")
        return int(pattern is not None and len(pattern) <= len(step["content"]))
    return {"NFC": 4, "Prepend": 1}.get(step["type"], 0)  # no canonical decomposition is longer


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
