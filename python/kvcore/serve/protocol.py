"""Requests of the OpenAI API, checked field by field. A refusal names the field."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvcore.config import number_error
from kvcore.serve.errors import ApiError

MAX_PROMPTS = 128
MAX_STOPS = 4
KV_PROFILES = ("exact", "balanced", "small")
# Fields that change nothing here and that clients send by habit.
_HARMLESS = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
_HARMLESS |= {"prompt_cache_retention", "parallel_tool_calls"}
# Fields that would change the answer: accepted only with the value that means "off".
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "audio": (None,),
    "modalities": (None, ["text"]),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
}
_NEUTRAL_IN_STREAM_OPTIONS: dict[str, tuple[Any, ...]] = {"include_obfuscation": (None, False)}
# Clients send answers back as they got them, with empty fields beside the text.
_NEUTRAL_IN_MESSAGES: dict[str, tuple[Any, ...]] = {
    "tool_calls": (None, []),
    "function_call": (None,),
    "audio": (None,),
}
_SAMPLING = {"model", "stream", "stream_options", "max_tokens", "temperature", "top_p", "seed"}
_SAMPLING |= {"stop", "logprobs", "ignore_eos", "return_token_ids", "kv_profile"}
_COMPLETION = _SAMPLING | {"prompt"}
_CHAT = _SAMPLING | {"messages", "max_completion_tokens", "top_logprobs"}
_ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclasses.dataclass(frozen=True)
class Params:
    """A checked request but for its prompt. ``max_tokens`` None = not given: then the answer has
    at most ``default_max_tokens`` (None = as many as the context holds). ``kv_profile`` "" = the
    server's own."""

    model: str
    stream: bool
    include_usage: bool
    max_tokens: int | None
    default_max_tokens: int | None
    max_tokens_field: str
    temperature: float
    top_p: float
    seed: int | None
    stop: tuple[str, ...]
    num_logprobs: int
    ignore_eos: bool
    return_token_ids: bool
    kv_profile: str


@dataclasses.dataclass(frozen=True)
class Completion:
    """Body of /v1/completions: one text or list of token ids per prompt."""

    params: Params
    prompts: tuple[str | tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Chat:
    """Body of /v1/chat/completions."""

    params: Params
    messages: tuple[Mapping[str, Any], ...]


def parse_json(body: bytes) -> dict[str, Any]:
    """The JSON object of a body. Raises ApiError 400."""
    try:
        value = json.loads(body, parse_constant=_no_constant)
    except RecursionError as error:
        raise _not_json("it is nested too deeply") from error
    except ValueError as error:
        raise _not_json(number_error(error)) from error
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, got {_name(value)}")
    return value


def _not_json(why: str) -> ApiError:
    return ApiError(400, f"the body is not valid JSON: {why}", code="invalid_json")


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def parse_completion(body: Mapping[str, Any], vocab_size: int) -> Completion:
    """Check a completion request; token ids must be below ``vocab_size``. Raises ApiError."""
    _refuse_unknown(body, _COMPLETION | _HARMLESS, _NEUTRAL)
    logprobs = _integer(body, "logprobs", 0, 5)
    params = _params(body, "max_tokens", 16, -1 if logprobs is None else logprobs)
    return Completion(params, _prompts(body.get("prompt"), vocab_size))


def parse_chat(body: Mapping[str, Any]) -> Chat:
    """Check a chat request. Raises ApiError."""
    _refuse_unknown(body, _CHAT | _HARMLESS, _NEUTRAL)
    wanted = _boolean(body, "logprobs")
    top = _integer(body, "top_logprobs", 0, 20)
    if top is not None and not wanted:
        raise _bad("top_logprobs", "top_logprobs needs logprobs: true")
    field = "max_completion_tokens"
    if body.get(field) is None and body.get("max_tokens") is not None:
        field = "max_tokens"
    params = _params(body, field, None, (top or 0) if wanted else -1)
    return Chat(params, _messages(body.get("messages")))


def _params(body: Mapping[str, Any], limit: str, default: int | None, logprobs: int) -> Params:
    model = body.get("model")
    if not isinstance(model, str):
        raise _bad("model", f"model: expected the name of a model, got {_name(model)}")
    if not model:
        raise _bad("model", "model is empty: the name of a model is needed")
    stream = _boolean(body, "stream")
    options = body.get("stream_options")
    if options is not None:
        if not stream:
            raise _bad("stream_options", "stream_options is only allowed with stream: true")
        if not isinstance(options, dict):
            raise _bad("stream_options", f"stream_options: expected object, got {_name(options)}")
        known = {"include_usage"}
        _refuse_unknown(options, known, _NEUTRAL_IN_STREAM_OPTIONS, "stream_options.")
    max_tokens = _integer(body, limit, 1, 2**31 - 1)
    seed = _integer(body, "seed", -(2**63), 2**64 - 1)
    return Params(
        model=model,
        stream=stream,
        include_usage=_boolean(options or {}, "include_usage", "stream_options."),
        max_tokens=max_tokens,
        default_max_tokens=default,
        max_tokens_field=limit,
        temperature=_number(body, "temperature", 1.0, 0.0, 2.0),
        top_p=_number(body, "top_p", 1.0, 0.0, 1.0, open_low=True),
        seed=seed,
        stop=_stops(body.get("stop")),
        num_logprobs=logprobs,
        ignore_eos=_boolean(body, "ignore_eos"),
        return_token_ids=_boolean(body, "return_token_ids"),
        kv_profile=_choice(body, "kv_profile", KV_PROFILES),
    )


def _refuse_unknown(
    body: Mapping[str, Any],
    known: set[str],
    neutral: Mapping[str, tuple[Any, ...]],
    prefix: str = "",
) -> None:
    for key, value in body.items():
        if key in known:
            continue
        if key in neutral:
            _neutral(prefix + key, value, neutral[key])
            continue
        near = difflib.get_close_matches(key, known | set(neutral), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        name = prefix + key[:64]
        raise _bad(name, f"unrecognized field {name!r}{hint}")


def _neutral(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Refuse a value that would ask for something this server does not do."""
    if not any(type(value) is type(ok) and value == ok for ok in allowed) and not (
        _is_number(value) and any(_is_number(ok) and value == ok for ok in allowed)
    ):
        shown = ", ".join(json.dumps(ok) for ok in allowed if ok is not None) or "null"
        raise _bad(name, f"{name} = {_show(value)} is not supported; allowed: {shown}")


def _prompts(value: Any, vocab_size: int) -> tuple[str | tuple[int, ...], ...]:
    if value is None:
        raise _bad("prompt", "prompt is required: a string, a list of strings, or token ids")
    if isinstance(value, str) or (isinstance(value, list) and value and _is_int(value[0])):
        value = [value]
    if not isinstance(value, list):
        raise _bad("prompt", f"prompt: expected string or array, got {_name(value)}")
    if not value:
        raise _bad("prompt", "prompt is empty: at least one token is needed")
    if len(value) > MAX_PROMPTS:
        raise _bad("prompt", f"prompt: {len(value)} prompts, at most {MAX_PROMPTS} are allowed")
    return tuple(_one_prompt(item, vocab_size) for item in value)


def _one_prompt(item: Any, vocab_size: int) -> str | tuple[int, ...]:
    if not isinstance(item, (str, list)):
        raise _bad("prompt", f"prompt: expected strings or token ids, got {_name(item)}")
    if not item:
        raise _bad("prompt", "prompt is empty: at least one token is needed")
    if isinstance(item, str):
        return _text("prompt", item)
    for token in item:
        if not _is_int(token):
            raise _bad("prompt", f"prompt: expected token ids, got {_name(token)}")
        if not 0 <= token < vocab_size:
            raise _bad("prompt", f"prompt: token id {_show(token)} is outside 0..{vocab_size - 1}")
    return tuple(item)


def _messages(value: Any) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, list):
        raise _bad("messages", f"messages: expected array, got {_name(value)}")
    if not value:
        raise _bad("messages", "messages is empty: at least one message is needed")
    return tuple(_message(f"messages[{i}]", item) for i, item in enumerate(value))


def _message(where: str, item: Any) -> Mapping[str, Any]:
    if not isinstance(item, dict):
        raise _bad(where, f"{where}: expected object, got {_name(item)}")
    role = item.get("role")
    if role not in _ROLES:
        raise _bad(f"{where}.role", f"{where}.role = {_show(role)}: allowed: {', '.join(_ROLES)}")
    for key, allowed in _NEUTRAL_IN_MESSAGES.items():
        _neutral(f"{where}.{key}", item.get(key), allowed)
    content = item.get("content")
    if isinstance(content, list):
        content = "".join(_part(f"{where}.content[{i}]", part) for i, part in enumerate(content))
    if not isinstance(content, str):
        raise _bad(
            f"{where}.content",
            f"{where}.content: expected string or array of text parts, got {_name(content)}",
        )
    role = "system" if role == "developer" else role
    return {"role": role, "content": _text(f"{where}.content", content)}


def _part(where: str, part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, dict) else _name(part)
        raise _bad(where, f"{where}: only parts of type text are supported, got {_show(kind)}")
    if not isinstance(part.get("text"), str):
        raise _bad(f"{where}.text", f"{where}.text: expected string, got {_name(part.get('text'))}")
    return str(part["text"])


def _stops(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    stops: Sequence[Any] = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise _bad("stop", f"stop: expected string or array of strings, got {_name(value)}")
    if len(stops) > MAX_STOPS:
        raise _bad("stop", f"stop: {len(stops)} strings, at most {MAX_STOPS} are allowed")
    for stop in stops:
        if not isinstance(stop, str) or not stop:
            raise _bad("stop", f"stop: expected strings that are not empty, got {_show(stop)}")
    return tuple(_text("stop", stop) for stop in stops)


def _text(field: str, value: str) -> str:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _bad(field, f"{field}: a lone surrogate at character {error.start}") from error
    return value


def _field(
    body: Mapping[str, Any], field: str, kind: str, check: Callable[[Any], bool], prefix: str = ""
) -> Any:
    value = body.get(field)
    if value is not None and not check(value):
        name = prefix + field
        raise _bad(name, f"{name}: expected {kind}, got {_name(value)}")
    return value


def _boolean(body: Mapping[str, Any], field: str, prefix: str = "") -> bool:
    value = _field(body, field, "boolean", lambda v: isinstance(v, bool), prefix)
    return bool(value)


def _choice(body: Mapping[str, Any], field: str, allowed: Sequence[str]) -> str:
    value = _field(body, field, "string", lambda v: isinstance(v, str))
    if value is not None and value not in allowed:
        raise _bad(field, f"{field} = {_show(value)}: allowed: {', '.join(allowed)}")
    return value or ""


def _integer(body: Mapping[str, Any], field: str, low: int, high: int) -> int | None:
    value = _field(body, field, "integer", _is_int)
    if value is not None and not low <= value <= high:
        raise _bad(field, f"{field} = {_show(value)}: must be between {low} and {high}")
    return None if value is None else int(value)


def _number(
    body: Mapping[str, Any],
    field: str,
    default: float,
    low: float,
    high: float,
    *,
    open_low: bool = False,
) -> float:
    value = _field(body, field, "number", _is_number)
    if value is None:
        return default
    # Compared as it came: an integer may be too large for a float. Infinity is out of range too.
    if not low <= value <= high or (open_low and value == low):
        least = "greater than" if open_low else "at least"
        raise _bad(field, f"{field} = {_show(value)}: must be {least} {low:g} and at most {high:g}")
    return float(value)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _name(value: Any) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


def _show(value: Any) -> str:
    """A value for a message, cut; nesting too deep to be written again shows as its kind."""
    try:
        text = json.dumps(value)
    except RecursionError:
        return _name(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _bad(field: str, message: str) -> ApiError:
    return ApiError(400, message, param=field)
