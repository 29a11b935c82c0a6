"""The tokenizer without torch: the same tokens and chats as transformers; text comes out whole."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvcore.errors import InvalidArgument, Unsupported
from kvcore.model import hub
from kvcore.serve.codec import ModelCodec
from kvcore.serve.errors import ApiError
from kvcore.serve.text import Detokenizer, StopFilter
from serve_fakes import ByteCodec
from support import served_model
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers

CHAT = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "naïve 🐢 <|end|>"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return served_model.make(tmp_path_factory.mktemp("codec") / "tiny")


@pytest.fixture(scope="module")
def codec(folder: Path) -> ModelCodec:
    return ModelCodec(folder)


@pytest.fixture(scope="module")
def real() -> ModelCodec:
    try:
        return ModelCodec(hub.resolve(hub.DEFAULT_MODEL).path)
    except hub.ModelUnavailable as error:
        pytest.skip(f"the default model cannot be had: {error}")


def test_facts_of_the_configuration(codec: ModelCodec) -> None:
    assert (codec.vocab_size, codec.max_context, codec.eos_ids) == (320, 2048, (257,))


def test_same_as_transformers(codec: ModelCodec, folder: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(folder))
    for text in ("hello", "naïve 🐢\n\ttabs  and spaces", "", "<|start|>user"):
        assert codec.encode(text) == theirs.encode(text)
    text = theirs.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    assert codec.chat_text(CHAT) == text
    assert codec.encode(text, special=False) == theirs.encode(text, add_special_tokens=False)


@given(st.text())
def test_bytes_of_tokens_and_back(codec: ModelCodec, text: str) -> None:
    ids = codec.encode(text)
    special = "<|start|>" in text or "<|end|>" in text
    assert special or codec.decode(ids) == text
    assert b"".join(codec.token_bytes(token) for token in ids) == text.encode()


def test_other_threads_run_while_a_long_text_is_encoded(codec: ModelCodec) -> None:
    took: list[float] = []

    def work() -> None:
        began = time.monotonic()
        assert len(codec.encode("x" * 3_000_000)) == 3_000_000
        took.append(time.monotonic() - began)

    thread = threading.Thread(target=work)
    last, gap = time.monotonic(), 0.0
    thread.start()
    while not took:
        time.sleep(0.001)
        now = time.monotonic()
        last, gap = now, max(gap, now - last)
    thread.join()
    assert gap < took[0] / 2, (gap, took)


@given(st.text() | st.text(st.sampled_from("<|start|>a\x04 é"), max_size=60))
def test_no_text_has_fewer_tokens_than_the_least(codec: ModelCodec, text: str) -> None:
    assert codec.least_tokens(text) <= len(codec.encode(text)) <= 9 * codec.least_tokens(text) * 4


@given(st.text() | st.text(st.sampled_from("\n \x04\x06é🐢"), max_size=300))
def test_nor_with_the_tokenizer_of_a_real_model(real: ModelCodec, text: str) -> None:
    """Which drops some control characters."""
    assert real.least_tokens(text) <= len(real.encode(text))


def test_the_longest_token_of_a_real_model(real: ModelCodec) -> None:
    text = "\n" + " " * 80
    assert real.least_tokens(text) == len(real.encode(text)) == 1
    assert real.least_tokens(2 * text) == 2
    assert real.least_tokens("\x04" * 1000) == len(real.encode("\x04" * 1000)) == 0


@pytest.mark.parametrize(
    ("change", "want"),
    [
        (lambda t: setattr(t, "normalizer", normalizers.NFC()), 25),
        (lambda t: setattr(t, "normalizer", normalizers.Strip()), 0),
        (lambda t: setattr(t, "normalizer", normalizers.Replace("ab", "a")), 0),
        (lambda t: setattr(t, "normalizer", normalizers.Replace(" ", "__")), 100),
        (lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.WhitespaceSplit()), 0),
        (lambda t: t.add_tokens([AddedToken("<mask>", lstrip=True)]), 0),
        (lambda t: t.add_tokens(["a token of 20 letter"]), 45),
    ],
)
def test_no_least_where_characters_may_be_lost(
    folder: Path, tmp_path: Path, change: Callable[[Tokenizer], None], want: int
) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    change(tokenizer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert ModelCodec(tmp_path).least_tokens("x" * 900) == want


def test_generation_config_has_the_last_word(folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    codec = ModelCodec(tmp_path)
    assert codec.eos_ids == (3, 4)
    with pytest.raises(ApiError, match="no chat template"):
        codec.chat_text(CHAT)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{{ messages[9].x }}", "no element"),
    ],
)
def test_a_template_that_refuses(folder: Path, tmp_path: Path, template: str, message: str) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(ApiError, match=message) as caught:
        ModelCodec(tmp_path).chat_text(CHAT)
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_a_template_cannot_reach_out(folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(ApiError):
        ModelCodec(tmp_path).chat_text(CHAT)


def test_incomplete_directories_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"config\.json"):
        ModelCodec(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 5}))
    with pytest.raises(InvalidArgument, match="max_position_embeddings"):
        ModelCodec(tmp_path)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(Unsupported, match=r"tokenizer\.json"):
        ModelCodec(tmp_path)


@given(st.text() | st.binary().map(lambda raw: raw.decode("utf-8", errors="replace")))
def test_detokenised_one_by_one(text: str) -> None:
    codec = ByteCodec()
    detok = Detokenizer(codec)
    parts = [detok.push(token) for token in codec.encode(text)]
    assert "".join(parts) + detok.flush() == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in part for part in parts)


@given(st.binary(max_size=40))
def test_broken_bytes_come_out_as_a_whole_decode_shows_them(raw: bytes) -> None:
    codec = ByteCodec()
    detok = Detokenizer(codec)
    text = "".join([detok.push(token) for token in raw]) + detok.flush()
    assert text.replace("\ufffd", "") == raw.decode("utf-8", "replace").replace("\ufffd", "")


def test_special_tokens_have_no_text() -> None:
    detok = Detokenizer(ByteCodec())
    parts = [detok.push(t) for t in (104, 256, 256, *"é".encode(), 256, 105)]
    assert "".join(parts) == "héi"


@given(
    st.text(alphabet="abc", max_size=30),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=4),
    st.integers(1, 5),
)
def test_stop_strings_whatever_the_pieces(text: str, stops: list[str], size: int) -> None:
    """Nothing of a stop string ever leaves, and nothing else is lost."""
    filter_, out, stopped = StopFilter(stops), "", False
    for at in range(0, len(text), size):
        part, stopped = filter_.push(text[at : at + size])
        out += part
        if stopped:
            break
    out += "" if stopped else filter_.flush()
    assert stopped == any(stop in text for stop in stops)
    assert text.startswith(out)
    assert not any(stop in out for stop in stops)
    if not stopped:
        assert out == text
    elif size == 1:
        ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
        first = text[: min(ends)]
        assert out == first[: min(first.find(s) for s in stops if s in first)]
