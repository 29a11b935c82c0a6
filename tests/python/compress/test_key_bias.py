"""A model with a strong key bias: the table passes where every single format of its bytes fails."""

from __future__ import annotations

from collections.abc import Callable

import key_bias
import numpy as np
import pytest
import torch
from key_bias import DIM, HEADS, LAYERS, PAGE, Tensors
from kvcore import compress, kernels
from kvcore.model.calibration import AttentionWeights
from kvcore.pages import PageClass, PageSpec

# Of the worst head: square error of attention's output over its square, and of the keys over
# their variation about the page's means.
OUTPUT_GATE, KEY_GATE = 0.02, 0.02
SPEC = PageSpec(LAYERS, HEADS, DIM)
Change = Callable[[np.ndarray], np.ndarray]


@pytest.fixture(scope="module")
def tensors() -> Tensors:
    return key_bias.make()


@pytest.fixture(scope="module")
def statistics(tensors: Tensors) -> compress.Statistics:
    whole = (torch.from_numpy(x).flatten(2, 3) for x in (tensors.k, tensors.v))
    weights = AttentionWeights(*whole, PAGE, key_bias.SCALE)
    after = torch.full((key_bias.ROWS,), key_bias.PAGES * PAGE)
    energy = np.empty((LAYERS, HEADS))
    for layer in range(LAYERS):
        q = torch.from_numpy(tensors.q[layer]).permute(2, 0, 1, 3).flatten(1, 2)
        weights.measure(layer, q, after)
        for head in range(HEADS):
            energy[layer, head] = np.square(exact(tensors, layer, head)).sum(-1).mean(1).sum()
    k, v = (x[:, :, 1:].reshape(LAYERS * HEADS, -1, PAGE, DIM) for x in (tensors.k, tensors.v))
    pages = compress.measure_pages(k, v)
    return compress.Statistics(
        **vars(pages),
        spec=SPEC,
        key_weight=(weights.keys.numpy() / energy[..., None]).reshape(LAYERS * HEADS, DIM),
        value_weight=(weights.values.numpy() / energy).reshape(-1),
    )


def exact(t: Tensors, layer: int, head: int) -> np.ndarray:
    k, v = t.k[layer, head].reshape(-1, DIM), t.v[layer, head].reshape(-1, DIM)
    return key_bias.outputs(t, layer, head, k, v)


def codec(name: str, part: str) -> Change:
    def change(pages: np.ndarray) -> np.ndarray:
        blocks = [kernels.encode_block(name, part, page) for page in pages]
        return np.stack([kernels.decode_block(name, part, b, PAGE, DIM) for b in blocks])

    return change


def worst(t: Tensors, k_of: Callable, v_of: Callable) -> tuple[float, float]:
    """Output error and key error of the worst head; ``x_of(layer, head)`` changes pages."""
    output = key = 0.0
    for layer in range(LAYERS):
        for head in range(HEADS):
            k, v = t.k[layer, head].copy(), t.v[layer, head].copy()
            k[1:], v[1:] = k_of(layer, head)(k[1:]), v_of(layer, head)(v[1:])
            want = exact(t, layer, head)
            got = key_bias.outputs(t, layer, head, k.reshape(-1, DIM), v.reshape(-1, DIM))
            output = max(output, np.square(got - want).sum() / np.square(want).sum())
            original = t.k[layer, head, 1:]
            variation = original - original.mean(1, keepdims=True)
            key = max(key, np.square(k[1:] - original).sum() / np.square(variation).sum())
    return output, key


def of_table(t: Tensors, table: PageClass) -> tuple[float, float]:
    formats = table.formats
    return worst(
        t,
        lambda layer, head: codec(formats[layer][head][0], "k"),
        lambda layer, head: codec(formats[layer][head][1], "v"),
    )


def uncentred_int4(pages: np.ndarray) -> np.ndarray:
    """4 bits per token with a scale and a zero, nothing taken off first."""
    low, high = pages.min(-1, keepdims=True), pages.max(-1, keepdims=True)
    step = (high - low) / 15
    return np.rint((pages - low) / step) * step + low


def uncentred_fp8(pages: np.ndarray) -> np.ndarray:
    """e4m3 with one scale per head, nothing taken off first."""
    scale = np.abs(pages).max() / 448
    codes = torch.from_numpy(pages / scale).to(torch.float8_e4m3fn)
    return codes.float().numpy() * scale


def test_the_keys_are_what_the_fixture_says(statistics: compress.Statistics) -> None:
    share = statistics.constant_share.reshape(LAYERS, HEADS)
    rest = [layer for layer in range(LAYERS) if layer not in key_bias.BIASED]
    assert share[list(key_bias.BIASED)].min() > 0.9
    assert share[rest].max() < 0.7


def test_the_table_passes_where_equal_bytes_in_one_format_fail(
    tensors: Tensors, statistics: compress.Statistics
) -> None:
    table = compress.profile_class(statistics, "balanced")
    assert table is not None
    formats = table.formats
    assert len({tuple(layer) for layer in formats}) > 1
    assert any(layer[0] != layer[1] for layer in formats)
    output, key = of_table(tensors, table)
    assert output <= OUTPUT_GATE and key <= KEY_GATE, (output, key)
    single = [
        PageClass(SPEC, [[(k, v)] * HEADS] * LAYERS)
        for k in compress.KEY_FORMATS
        for v in compress.VALUE_FORMATS
    ]
    affordable = [c for c in single if c.page_bytes <= table.page_bytes]
    assert len(affordable) >= 2
    for fixed in affordable:
        assert of_table(tensors, fixed)[0] > OUTPUT_GATE, fixed.formats[0][0]


@pytest.mark.parametrize("control", [uncentred_int4, uncentred_fp8])
def test_uncentred_controls_fail_by_their_keys(tensors: Tensors, control: Change) -> None:
    output, key = worst(tensors, lambda *_: control, lambda *_: lambda v: v)
    assert key > KEY_GATE
    assert output > OUTPUT_GATE or control is uncentred_fp8


def test_the_prediction_is_what_happens(tensors: Tensors, statistics: compress.Statistics) -> None:
    """Predicted square error of each head's output by its keys, against the measured one."""
    fixed = PageClass(SPEC, [[("k4", "v3")] * HEADS] * LAYERS)
    predicted = compress.predicted_error(fixed, statistics)[..., 0]
    measured = np.empty_like(predicted)
    for layer in range(LAYERS):
        for head in range(HEADS):
            k, v = tensors.k[layer, head].copy(), tensors.v[layer, head]
            k[1:] = codec("k4", "k")(k[1:])
            want = exact(tensors, layer, head)
            rows = k.reshape(-1, DIM), v.reshape(-1, DIM)
            got = key_bias.outputs(tensors, layer, head, *rows)
            measured[layer, head] = np.square(got - want).sum() / np.square(want).sum()
    logs = np.log(predicted).ravel(), np.log(measured).ravel()
    assert np.corrcoef(*logs)[0, 1] > 0.8
    # Where scores err by whole nats a first order sees more than there is: not in sharp heads.
    flat = np.ones((LAYERS, HEADS), bool)
    flat[tuple(zip(*key_bias.SHARP, strict=True))] = False
    assert 0.7 < predicted[flat].sum() / measured[flat].sum() < 1.4
