"""Every refusal has the OpenAI shape, the right status and a message that names the field."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from kvcore.errors import PeerDead
from kvcore.router.state import Done, Failure, Tokens
from kvcore.serve import answer
from kvcore.serve.errors import ApiError
from kvcore.serve.protocol import parse_completion, parse_json
from serve_fakes import MODEL, ByteCodec, ScriptBackend, front, say, serving

GOOD = {"model": MODEL, "prompt": "a"}
GOOD_CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "a"}]}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    backend = ScriptBackend(say("ok"))
    with serving(front(backend, ByteCodec(128))) as base:
        yield base


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"] and body["error"]["type"]
    return dict(body["error"])


COMPLETION_CASES = [
    ({"prompt": ""}, 400, "prompt"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": ["a", ""]}, 400, "prompt"),
    ({"prompt": [[]]}, 400, "prompt"),
    ({"prompt": None}, 400, "prompt"),
    ({"prompt": 5}, 400, "prompt"),
    ({"prompt": {"a": 1}}, 400, "prompt"),
    ({"prompt": [1, "a"]}, 400, "prompt"),
    ({"prompt": [1, True]}, 400, "prompt"),
    ({"prompt": [-1]}, 400, "prompt"),
    ({"prompt": [257]}, 400, "prompt"),
    ({"prompt": "x" * 128}, 400, "prompt"),
    ({"prompt": "x" * 100, "max_tokens": 29}, 400, "max_tokens"),
    ({"prompt": ["a"] * 129}, 400, "prompt"),
    ({"prompt": "\ud800"}, 400, "prompt"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"max_tokens": -5}, 400, "max_tokens"),
    ({"max_tokens": "7"}, 400, "max_tokens"),
    ({"max_tokens": 1.5}, 400, "max_tokens"),
    ({"max_tokens": True}, 400, "max_tokens"),
    ({"max_tokens": 10**30}, 400, "max_tokens"),
    ({"temperature": -0.1}, 400, "temperature"),
    ({"temperature": 2.1}, 400, "temperature"),
    ({"temperature": "hot"}, 400, "temperature"),
    ({"top_p": 0}, 400, "top_p"),
    ({"top_p": 1.1}, 400, "top_p"),
    ({"kv_profile": "tiny"}, 400, "kv_profile"),
    ({"kv_profile": 4}, 400, "kv_profile"),
    ({"seed": 1.0}, 400, "seed"),
    ({"seed": 2**64}, 400, "seed"),
    ({"stop": ["a"] * 5}, 400, "stop"),
    ({"stop": ""}, 400, "stop"),
    ({"stop": [1]}, 400, "stop"),
    ({"stop": 1}, 400, "stop"),
    ({"logprobs": 6}, 400, "logprobs"),
    ({"logprobs": True}, 400, "logprobs"),
    ({"stream": "yes"}, 400, "stream"),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
    ({"stream": True, "stream_options": 3}, 400, "stream_options"),
    (
        {"stream": True, "stream_options": {"include_usage": 1}},
        400,
        "stream_options.include_usage",
    ),
    ({"n": 2}, 400, "n"),
    ({"best_of": 3}, 400, "best_of"),
    ({"echo": True}, 400, "echo"),
    ({"suffix": "x"}, 400, "suffix"),
    ({"presence_penalty": 0.5}, 400, "presence_penalty"),
    ({"logit_bias": {"5": 1}}, 400, "logit_bias"),
    ({"temprature": 1}, 400, "temprature"),
    ({"temperature": 10**400}, 400, "temperature"),
    ({"temperature": -(10**400)}, 400, "temperature"),
    ({"top_p": 10**400}, 400, "top_p"),
    ({"max_tokens": 10**400}, 400, "max_tokens"),
    ({"seed": 10**400}, 400, "seed"),
    ({"logprobs": 10**400}, 400, "logprobs"),
    ({"n": 10**400}, 400, "n"),
    ({"presence_penalty": 10**400}, 400, "presence_penalty"),
    ({"prompt": [10**400]}, 400, "prompt"),
    (
        {"stream": True, "stream_options": {"include_usge": True}},
        400,
        "stream_options.include_usge",
    ),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        400,
        "stream_options.include_obfuscation",
    ),
    ({"model": ""}, 400, "model"),
    ({"model": 5}, 400, "model"),
    ({"model": None}, 400, "model"),
    ({"model": "gpt-9"}, 404, "model"),
]


@pytest.mark.parametrize(("change", "status", "param"), COMPLETION_CASES)
def test_completion_refusals(url: str, change: dict[str, Any], status: int, param: str) -> None:
    body = json.dumps({**GOOD, **change})
    response = httpx.post(url + "/v1/completions", content=body)
    error = error_of(response)
    assert response.status_code == status
    assert error["param"] == param
    assert param.split(".")[-1] in error["message"]
    assert len(error["message"]) < 200


@pytest.mark.parametrize(
    ("path", "field"), [("completions", "prompt"), ("chat/completions", "messages")]
)
def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(path: str, field: str) -> None:
    class Never(ByteCodec):
        def encode(self, text: str, special: bool = True) -> list[int]:
            raise AssertionError("it cannot fit")

    text = "x" * 4_000_000
    asked = text if field == "prompt" else [{"role": "user", "content": text}]
    with serving(front(ScriptBackend(say("ok")), Never(128))) as base:
        response = httpx.post(f"{base}/v1/{path}", json={"model": MODEL, field: asked})
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, field)
    assert error["code"] == "context_length_exceeded" and "holds 128" in error["message"]


LONG_WORK = [
    ("completions", {"prompt": "x" * 5000}),
    ("completions", {"prompt": ["x" * 50] * 100}),
    ("chat/completions", {"messages": [{"role": "user", "content": "x" * 50}] * 100}),
]


@pytest.mark.parametrize(("path", "body"), LONG_WORK)
def test_others_are_answered_while_long_texts_are_tokenised(path: str, body: Any) -> None:
    begun, seen = threading.Event(), threading.Event()

    class Slow(ByteCodec):
        def encode(self, text: str, special: bool = True) -> list[int]:
            begun.set()
            assert seen.wait(10), "nobody else was answered"
            return [1]

    with serving(front(ScriptBackend(say("ok")), Slow(8000))) as base:
        answers: list[httpx.Response] = []

        def ask() -> None:
            answers.append(httpx.post(f"{base}/v1/{path}", json={"model": MODEL, **body}))

        thread = threading.Thread(target=ask)
        thread.start()
        assert begun.wait(10)
        assert httpx.get(base + "/health", timeout=5).status_code == 200
        seen.set()
        thread.join()
    assert answers[0].status_code == 200


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("max_tokens", 10**20, "between 1 and 2147483647"),
        ("max_tokens", 0, "between 1 and 2147483647"),
        ("seed", 2**64, f"between {-(2**63)} and {2**64 - 1}"),
        ("seed", -(2**63) - 1, f"between {-(2**63)} and {2**64 - 1}"),
        ("logprobs", 6, "between 0 and 5"),
        ("temperature", 3, "at least 0 and at most 2"),
    ],
)
def test_both_bounds_are_told(url: str, field: str, value: int, allowed: str) -> None:
    response = httpx.post(url + "/v1/completions", json={**GOOD, field: value})
    assert error_of(response)["message"] == f"{field} = {value}: must be {allowed}"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"seed": ' + "9" * 5000 + "}", "a number has too many digits"),
        ("[" * 100_000, "it is nested too deeply"),
        ('{"seed": NaN}', "NaN is not JSON"),
    ],
)
def test_json_errors_are_told_to_clients_not_to_programmers(url: str, text: str, why: str) -> None:
    response = httpx.post(url + "/v1/completions", content=text)
    error = error_of(response)
    assert error["code"] == "invalid_json"
    assert error["message"] == f"the body is not valid JSON: {why}"


def test_who_holds_no_more_is_named() -> None:
    backend = ScriptBackend(say("ok"))
    backend.workers_context = 64
    with serving(front(backend, ByteCodec(128))) as base:
        for change in ({"prompt": "x" * 100}, {"prompt": "x" * 60, "max_tokens": 9}):
            response = httpx.post(base + "/v1/completions", json={**GOOD, **change})
            message = error_of(response)["message"]
            assert "the KV memory of a worker (--kv-bytes) holds 64" in message
            backend.workers_context = 128
            response = httpx.post(base + "/v1/completions", json={**GOOD, "prompt": "x" * 200})
            assert "the model's context holds 128" in error_of(response)["message"]
            backend.workers_context = 64
        assert httpx.get(base + "/v1/models").json()["data"][0]["max_model_len"] == 64


def test_an_empty_model_name_is_called_empty(url: str) -> None:
    response = httpx.post(url + "/v1/completions", json={**GOOD, "model": ""})
    assert "model is empty" in error_of(response)["message"]


@pytest.mark.parametrize("text", ["1e999", "-1e999", "1" + "0" * 400 + ".0"])
def test_numbers_beyond_a_float(url: str, text: str) -> None:
    body = json.dumps(GOOD)[:-1] + f', "temperature": {text}}}'
    response = httpx.post(url + "/v1/completions", content=body)
    assert (response.status_code, error_of(response)["param"]) == (400, "temperature")


BROKEN = "a\ud800b"  # json.dumps writes the lone surrogate as an escape, which is JSON
BROKEN_TEXTS: list[dict[str, Any]] = [
    {**GOOD, BROKEN: 1},
    {**GOOD, "model": BROKEN},
    {**GOOD, "stop": BROKEN},
    {**GOOD, "suffix": BROKEN},
    {**GOOD, "stream": True, "stream_options": {BROKEN: 1}},
    {**GOOD_CHAT, BROKEN: 1},
    {**GOOD_CHAT, "messages": [{"role": BROKEN, "content": "a"}]},
    {**GOOD_CHAT, "messages": [{"role": "user", "content": BROKEN}]},
    {**GOOD_CHAT, "messages": [{"role": "user", "content": [{"type": BROKEN}]}]},
]


@pytest.mark.parametrize("body", BROKEN_TEXTS)
def test_texts_without_utf_8_are_refused_like_others(url: str, body: dict[str, Any]) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    response = httpx.post(url + path, content=json.dumps(body))
    assert response.status_code in (400, 404) and error_of(response)


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_name_without_utf_8_can_be_served(stream: bool) -> None:
    """The command line hands over bytes that are no UTF-8 as surrogates."""
    name = "m\udcff"
    with serving(front(ScriptBackend(say("ok ✓")), names=[name])) as url:
        card = httpx.get(url + "/v1/models").json()["data"][0]
        body = json.dumps({"model": name, "prompt": "a", "stream": stream})
        response = httpx.post(url + "/v1/completions", content=body)
    assert card["id"] == name
    assert response.status_code == 200 and "m\\udcff" in response.text


def test_nesting_that_can_be_read_but_not_shown_is_refused() -> None:
    for depth in range(1, 1100):
        text = json.dumps(GOOD)[:-1] + ', "n": ' + "[" * depth + "]" * depth + "}"
        with pytest.raises(ApiError) as caught:
            parse_completion(parse_json(text.encode()), 257)
        assert caught.value.status == 400


CHAT_CASES = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "king", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 4}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0]",
    ),
    ({"messages": [{"role": "user", "content": "x" * 200}]}, "messages"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 3}, "logprobs"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"modalities": "text"}, "modalities"),
    ({"verbosity": "high"}, "verbosity"),
    (
        {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{"id": "x"}]}]},
        "messages[0].tool_calls",
    ),
    (
        {"messages": [{"role": "assistant", "content": "a", "audio": {"id": "x"}}]},
        "messages[0].audio",
    ),
]


@pytest.mark.parametrize(("change", "param"), CHAT_CASES)
def test_chat_refusals(url: str, change: dict[str, Any], param: str) -> None:
    response = httpx.post(url + "/v1/chat/completions", json={**GOOD_CHAT, **change})
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, param)
    assert param in error["message"]


def test_context_length_code(url: str) -> None:
    response = httpx.post(url + "/v1/completions", json={**GOOD, "prompt": "x" * 500})
    error = error_of(response)
    assert error["code"] == "context_length_exceeded"
    assert "500" in error["message"] and "128" in error["message"]


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'"a"', b"\xff\xfe", b'{"model": NaN}', b"[" * 100_000, b"1" * 5000],
)
def test_malformed_json(url: str, body: bytes) -> None:
    response = httpx.post(url + "/v1/completions", content=body)
    assert response.status_code == 400
    assert "JSON" in error_of(response)["message"]


def test_harmless_and_neutral_fields_are_accepted(url: str) -> None:
    extra = {"n": 1, "user": "me", "presence_penalty": 0, "frequency_penalty": 0.0}
    extra |= {"logit_bias": {}, "echo": False, "best_of": 1, "logprobs": None, "stop": None}
    assert httpx.post(url + "/v1/completions", json={**GOOD, **extra}).status_code == 200
    extra = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}}
    extra |= {"modalities": ["text"], "verbosity": "medium"}
    said = {"role": "assistant", "content": "b", "refusal": None, "audio": None, "tool_calls": None}
    extra |= {"messages": [*GOOD_CHAT["messages"], {**said, "function_call": None}]}
    extra |= {"stream": True, "stream_options": {"include_obfuscation": False}}
    assert httpx.post(url + "/v1/chat/completions", json={**GOOD_CHAT, **extra}).status_code == 200


def test_paths_and_methods(url: str) -> None:
    response = httpx.get(url + "/v1/nothing")
    assert response.status_code == 404 and error_of(response)
    response = httpx.get(url + "/v1/completions")
    assert response.status_code == 405 and error_of(response)
    response = httpx.get(url + "/v1/models/other")
    assert response.status_code == 404 and error_of(response)["code"] == "model_not_found"


def test_10_mb_body_with_the_client(url: str) -> None:
    client = openai.OpenAI(base_url=url + "/v1", api_key="x", max_retries=0)
    with client, pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(model=MODEL, prompt="x" * 10_000_000)
    assert caught.value.status_code == 413
    assert caught.value.body["param"] == "body"  # type: ignore[index]


def test_10_mb_body_without_length(url: str) -> None:
    def parts() -> Iterator[bytes]:
        for _ in range(160):
            yield b"x" * 65536

    response = httpx.post(url + "/v1/completions", content=parts())
    assert response.status_code == 413
    assert error_of(response)["code"] == "body_too_large"


def test_large_body_is_refused_before_it_is_sent(url: str) -> None:
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=5) as sock:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10000000\r\n\r\n"
        start = time.monotonic()
        sock.sendall(head.encode())
        answer = sock.recv(65536)
        assert answer.startswith(b"HTTP/1.1 413")
        assert time.monotonic() - start < 1.0


FAILURES = [
    (Failure("no_capacity", "full", 3.0), 429, "3"),
    (Failure("no_workers", "none"), 503, None),
    (Failure("worker_lost", "gone"), 503, None),
    (Failure("timeout", "late"), 504, None),
    (Failure("unsupported", "no"), 400, None),
    (Failure("whatever", "odd"), 500, None),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("failure", "status", "retry"), FAILURES)
def test_failures_of_the_router(
    failure: Failure, status: int, retry: str | None, stream: bool
) -> None:
    with serving(front(ScriptBackend(lambda ask: [failure]))) as url:
        response = httpx.post(url + "/v1/completions", json={**GOOD, "stream": stream})
    assert response.status_code == status
    assert error_of(response)["code"] == failure.code
    assert response.headers.get("retry-after") == retry


def test_failure_in_mid_stream_reaches_the_client() -> None:
    script = [Tokens([104]), Tokens([105]), Failure("worker_lost", "the worker died")]
    with serving(front(ScriptBackend(lambda ask: script))) as url:
        client = openai.OpenAI(base_url=url + "/v1", api_key="x", max_retries=0)
        stream = client.completions.create(model=MODEL, prompt="a", stream=True)
        assert next(stream).choices[0].text == "h"
        assert next(stream).choices[0].text == "i"
        with pytest.raises(openai.APIError, match="the worker died"):
            next(stream)
        client.close()


class BrokenCodec(ByteCodec):
    """Fails at the second token."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def decode(self, ids: Sequence[int]) -> str:
        if 105 in ids:
            raise self.error
        return super().decode(ids)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("error", [RuntimeError("odd"), OSError("odd"), PeerDead("odd")])
def test_a_fault_of_the_server_is_no_silent_end(error: Exception, stream: bool) -> None:
    backend = ScriptBackend(say("hi"))
    with serving(front(backend, BrokenCodec(error))) as url:
        response = httpx.post(url + "/v1/completions", json={**GOOD, "stream": stream})
        metrics = httpx.get(url + "/metrics").text
    assert 'kvcore_requests_total{path="/v1/completions",status="500"} 1.0' in metrics
    assert response.status_code == (200 if stream else 500)
    last = [line for line in response.text.splitlines() if line][-1].removeprefix("data: ")
    assert "internal error" in json.loads(last)["error"]["message"]
    assert len(backend.cancelled) == 1


def test_a_stream_that_stands_still_shows_that_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer, "KEEP_ALIVE_S", 0.1)
    script = [0.3, Tokens([104]), 0.35, Tokens([105]), Done("stop", 1, 2)]
    with serving(front(ScriptBackend(lambda ask: script))) as url:
        client = openai.OpenAI(base_url=url + "/v1", api_key="x", max_retries=0)
        stream = client.completions.create(model=MODEL, prompt="a", stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == "hi"
        client.close()
        response = httpx.post(url + "/v1/completions", json={**GOOD, "stream": True})
    lines = [line.partition(":")[0] for line in response.text.split("\n\n") if line]
    assert lines[0] == "data" and 2 <= lines.count("") <= 3 and lines[-1] == "data"


def test_one_failed_choice_cancels_the_others() -> None:
    def script(ask: Any) -> Any:
        return [Failure("worker_lost", "x")] if ask.tokens == (98,) else [Tokens([97]), 30.0]

    backend = ScriptBackend(script)
    with serving(front(backend)) as url:
        response = httpx.post(url + "/v1/completions", json={**GOOD, "prompt": ["a", "b"]})
    assert response.status_code == 503
    assert len(backend.cancelled) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_client_disconnect_cancels(stream: bool) -> None:
    backend = ScriptBackend(lambda ask: [Tokens([97]), 30.0])
    with serving(front(backend)) as url:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url + "/v1/completions", json={**GOOD, "stream": stream}, timeout=0.3)
        end = time.monotonic() + 2
        while not backend.cancelled and time.monotonic() < end:
            time.sleep(0.01)
        assert backend.cancelled == [backend.asks[0].request_id]
        text = httpx.get(url + "/metrics").text
        assert "kvcore_client_disconnects_total 1.0" in text
        assert 'kvcore_requests_total{path="/v1/completions",status="499"} 1.0' in text


def test_api_key() -> None:
    with serving(front(ScriptBackend(say("ok")), api_key="s3cret")) as url:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic s3cret"}):
            response = httpx.post(url + "/v1/completions", json=GOOD, headers=headers)
            assert response.status_code == 401
            assert error_of(response)["code"] == "invalid_api_key"
            assert "s3cret" not in response.text
        assert httpx.get(url + "/metrics").status_code == 401
        assert httpx.get(url + "/health").status_code == 200
        good = {"Authorization": "Bearer s3cret"}
        assert httpx.post(url + "/v1/completions", json=GOOD, headers=good).status_code == 200
