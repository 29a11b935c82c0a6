"""The default model: what it says, and how near it is to float32 on real text."""

from __future__ import annotations

import pytest
import tiny
import torch
import transformers
from kvcore.model import DEFAULT_MODEL, ModelUnavailable, load, resolve
from texts import TEXTS


@pytest.fixture(scope="module")
def files():
    try:
        return resolve(DEFAULT_MODEL)
    except ModelUnavailable as error:
        pytest.skip(f"the default model cannot be had: {error}")


def test_greedy_answer_equals_transformers_in_float32(files):
    model = load(files.path, "float32")
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = model.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    hf = transformers.AutoModelForCausalLM.from_pretrained(str(files.path), dtype=torch.float32)
    expected = hf.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0].tolist()
    runner, got = tiny.Runner(model), list(prompt)
    logits = runner.step({0: prompt})[0]
    while len(got) < len(expected):
        got.append(int(logits[-1].argmax()))
        logits = runner.step({0: got[-1:]})[0]
    assert got == expected
    assert "Paris" in model.tokenizer.decode(got[len(prompt) :])


@pytest.mark.parametrize("text", TEXTS[:4] + TEXTS[13:15])
def test_tokens_round_trip(files, text):
    from kvcore.model import load_tokenizer

    tokenizer = load_tokenizer(files.path)
    assert tokenizer.decode(tokenizer(text).input_ids) == text


@pytest.mark.nightly
def test_bfloat16_is_as_near_to_float32_as_transformers_is(files):
    model = load(files.path, "bfloat16")
    ours = theirs = same = 0.0
    for text in TEXTS:
        tokens = model.tokenizer(text).input_ids
        exact = tiny.eager(files.path, torch.float32, tokens)
        ours += tiny.kl(exact, tiny.Runner(model).whole(tokens))
        theirs += tiny.kl(exact, tiny.eager(files.path, torch.bfloat16, tokens))
        plain = tiny.Runner(load(files.path, "float32")).whole(tokens)
        same = max(same, tiny.kl(exact, plain))
    print(f"KL to float32 over {len(TEXTS)} texts: kvcore {ours:.4g}, transformers {theirs:.4g}")
    assert same <= 1e-6
    assert 0 < ours <= 1.1 * theirs


@pytest.mark.nightly
def test_every_row_has_the_same_bits_in_any_chunk(files):
    model = load(files.path, "bfloat16")
    assert model.row_invariant
    tokens = model.tokenizer(TEXTS[0]).input_ids
    whole = tiny.Runner(model).whole(tokens)
    for size in (1, 3, 16, 33):
        runner = tiny.Runner(model)
        for start in range(0, len(tokens), size):
            part = tokens[start : start + size]
            got = runner.step({0: part, 1: part[:1]})[0]
            assert torch.equal(got, whole[start : start + size]), (size, start)
