"""The official openai client against a real server: shapes of both APIs, streaming and not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import openai
import pytest
from serve_fakes import MODEL, ScriptBackend, front, say, serving

CHAT = [{"role": "user", "content": "hi"}]
TEXT = "naïve 🐢 text ✓ end"


@pytest.fixture
def backend() -> ScriptBackend:
    return ScriptBackend(say(TEXT))


@pytest.fixture
def url(backend: ScriptBackend) -> Iterator[str]:
    with serving(front(backend)) as base:
        yield base


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url + "/v1", api_key="unused", max_retries=0) as made:
        yield made


def test_completion_whole(client: openai.OpenAI, backend: ScriptBackend) -> None:
    answer = client.completions.create(model=MODEL, prompt="abc", max_tokens=100, temperature=0)
    assert answer.choices[0].text == TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 3
    assert answer.usage.completion_tokens == len(TEXT.encode())
    assert answer.usage.total_tokens == 3 + len(TEXT.encode())
    assert answer.usage.prompt_tokens_details.cached_tokens == 64
    ask = backend.asks[0]
    assert (ask.tokens, ask.max_tokens, ask.temperature) == (tuple(b"abc"), 100, 0.0)
    assert ask.stop_token_ids == (256,)


def test_completion_defaults(client: openai.OpenAI, backend: ScriptBackend) -> None:
    answer = client.completions.create(model=MODEL, prompt="abc")
    assert backend.asks[0].max_tokens == 16
    assert (backend.asks[0].temperature, backend.asks[0].top_p) == (1.0, 1.0)
    assert answer.choices[0].finish_reason == "length"
    assert answer.id.startswith("cmpl-")


def test_completion_many_prompts_and_token_ids(
    client: openai.OpenAI, backend: ScriptBackend
) -> None:
    answer = client.completions.create(model=MODEL, prompt=["a", "bc"], max_tokens=3)
    assert [c.index for c in answer.choices] == [0, 1]
    assert answer.usage is not None and answer.usage.prompt_tokens == 3
    client.completions.create(model=MODEL, prompt=[5, 6, 7], max_tokens=3)
    client.completions.create(model=MODEL, prompt=[[1], [2, 3]], max_tokens=3)
    assert sorted(a.tokens for a in backend.asks[2:]) == [(1,), (2, 3), (5, 6, 7)]


def test_completion_stream(client: openai.OpenAI) -> None:
    chunks = list(
        client.completions.create(
            model=MODEL,
            prompt=["a", "b"],
            max_tokens=100,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    for index in (0, 1):
        text = "".join(
            c.choices[0].text for c in chunks if c.choices and c.choices[0].index == index
        )
        assert text == TEXT
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 2 * len(TEXT.encode())
    assert all(c.usage is None for c in chunks[:-1])
    assert len({c.id for c in chunks}) == 1


def test_no_broken_characters_in_a_stream(client: openai.OpenAI) -> None:
    stream = client.completions.create(model=MODEL, prompt="a", max_tokens=100, stream=True)
    parts = [c.choices[0].text for c in stream]
    assert "".join(parts) == TEXT
    assert not any("\ufffd" in part for part in parts)
    assert len(parts) > 10


def test_answer_cut_inside_a_character(client: openai.OpenAI) -> None:
    cut = len("naïve ".encode()) + 2
    answer = client.completions.create(model=MODEL, prompt="a", max_tokens=cut)
    assert answer.choices[0].text == "naïve \ufffd"


def test_chat_whole(client: openai.OpenAI, backend: ScriptBackend) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "system", "content": "be kind"},
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
        ],
        max_completion_tokens=50,
        seed=-1,
        top_p=0.5,
    )
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].message.role == "assistant"
    assert answer.object == "chat.completion"
    ask = backend.asks[0]
    assert bytes(ask.tokens) == b"<system>be kind\n<user>a\n"
    assert (ask.max_tokens, ask.seed, ask.top_p) == (50, 2**64 - 1, 0.5)


def test_chat_default_fills_the_context(client: openai.OpenAI, backend: ScriptBackend) -> None:
    client.chat.completions.create(model=MODEL, messages=CHAT)
    assert backend.asks[0].max_tokens == 4096 - len(backend.asks[0].tokens)


def test_chat_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=CHAT, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage is not None and chunks[-1].usage.prompt_tokens == 9


def test_async_client(url: str) -> None:
    async def run() -> tuple[str, str]:
        async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="x", max_retries=0) as client:
            whole = await client.chat.completions.create(model=MODEL, messages=CHAT)
            text = ""
            async for chunk in await client.chat.completions.create(
                model=MODEL, messages=CHAT, stream=True
            ):
                text += chunk.choices[0].delta.content or ""
            return whole.choices[0].message.content or "", text

    assert asyncio.run(run()) == (TEXT, TEXT)


def test_completion_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="a", max_tokens=6, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs == [-0.5] * 6
    assert logprobs.tokens[:2] == ["n", "a"]
    assert logprobs.text_offset == [0, 1, 2, 2, 3, 4]
    assert [len(top) for top in logprobs.top_logprobs][:2] == [2, 2]
    assert logprobs.top_logprobs[0] == {"n": -0.5, "(": -1.5}


@pytest.mark.parametrize("stream", [False, True])
def test_no_likeliest_tokens_leave_the_one_of_the_answer(
    client: openai.OpenAI, stream: bool
) -> None:
    """As the API has it: up to logprobs + 1 elements, the answer's own token among them."""
    answer = client.completions.create(
        model=MODEL, prompt="a", max_tokens=2, logprobs=0, stream=stream
    )
    parts = list(answer) if stream else [answer]
    tops = [t for p in parts for t in (p.choices[0].logprobs.top_logprobs or ())]
    assert tops == [{"n": -0.5}, {"a": -0.5}]


def test_chat_logprobs_whole_and_streamed(client: openai.OpenAI) -> None:
    def ask(stream: bool):  # type: ignore[no-untyped-def]
        return client.chat.completions.create(
            model=MODEL, messages=CHAT, logprobs=True, top_logprobs=3, stream=stream
        )

    content = ask(False).choices[0].logprobs.content
    assert bytes(b for entry in content for b in entry.bytes) == TEXT.encode()
    assert all(len(entry.top_logprobs) == 3 for entry in content)
    streamed = [
        e for c in ask(True) if c.choices[0].logprobs for e in c.choices[0].logprobs.content
    ]
    assert streamed == content
    plain = client.chat.completions.create(model=MODEL, messages=CHAT, logprobs=True)
    assert plain.choices[0].logprobs.content[0].top_logprobs == []


@pytest.mark.parametrize("stop", ["🐢 text", ["zzz", "🐢 text"], "🐢"])
@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_span_tokens(
    client: openai.OpenAI, backend: ScriptBackend, stop: str | list[str], stream: bool
) -> None:
    made = client.completions.create(
        model=MODEL, prompt="a", max_tokens=100, stop=stop, stream=stream
    )
    parts = list(made) if stream else [made]
    assert "".join(p.choices[0].text for p in parts) == "naïve "
    assert parts[-1].choices[0].finish_reason == "stop"
    assert len(backend.finished) == 1
    if not stream:
        last = "naïve " + (stop if isinstance(stop, str) else stop[1])
        assert made.usage.completion_tokens == len(last.encode())


def test_half_a_stop_string_is_given_back(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="a", max_tokens=100, stop="end!")
    assert answer.choices[0].text == TEXT


def test_token_ids_extension(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="ab", max_tokens=5, extra_body={"return_token_ids": True}
    )
    choice = answer.choices[0].model_dump()
    assert choice["token_ids"] == list(TEXT.encode())[:5]
    assert choice["prompt_token_ids"] == [97, 98]


def test_models_health_metrics(url: str, client: openai.OpenAI, backend: ScriptBackend) -> None:
    assert [m.id for m in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    assert httpx.get(url + "/health").status_code == 200
    backend.is_ready = False
    assert httpx.get(url + "/health").status_code == 503
    client.completions.create(model=MODEL, prompt="a", max_tokens=5)
    text = httpx.get(url + "/metrics").text
    assert "kvcore_ttft_seconds_count 1.0" in text
    assert "kvcore_tpot_seconds_count 4.0" in text
    assert "kvcore_generated_tokens_total 5.0" in text
    assert "kvcore_cached_prompt_tokens_total 64.0" in text
    assert 'kvcore_requests_total{path="/v1/completions",status="200"} 1.0' in text
