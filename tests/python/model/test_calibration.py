"""Calibration of a small model: what it finds, and the file that it leaves."""

from __future__ import annotations

import logging
import os
import stat
import subprocess
import sys

import numpy as np
import pytest
import tiny
import torch
from kvcore import compress
from kvcore.errors import Unsupported
from kvcore.model import calibration, load
from kvcore.pages import PageClass
from support import served_model


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    fields = {"head_dim": 64, "hidden_size": 128, "num_attention_heads": 4}
    fields |= {"num_key_value_heads": 2, "max_position_embeddings": 512}
    return tiny.make(tmp_path_factory.mktemp("calibrated") / "model", "LlamaConfig", **fields)


@pytest.fixture
def model(path, tmp_path):
    return load(path, cache_dir=tmp_path)


def test_statistics_fit_the_model_and_give_both_profiles(model):
    found = calibration.calibrate(model, 32)
    spec = model.page_spec(32)
    heads = spec.num_layers * spec.num_kv_heads
    assert found.spec == spec
    assert found.key_weight.shape == (heads, 64) and (found.key_weight > 0).all()
    assert found.value_weight.shape == (heads,) and (found.value_weight > 0).all()
    for profile in ("balanced", "small"):
        table = compress.profile_class(found, profile)
        assert table.page_bytes <= compress.budget_bytes(spec, profile)


def test_the_same_model_is_calibrated_to_the_same_table(model):
    first, second = (calibration.calibrate(model) for _ in range(2))
    assert np.array_equal(first.key_weight, second.key_weight)
    tables = [compress.profile_class(s, "small") for s in (first, second)]
    assert tables[0].digest == tables[1].digest


def test_calibrated_once_then_read(model, tmp_path, monkeypatch):
    first = model.kv_statistics()
    files = list((tmp_path / "calibrations").iterdir())
    assert len(files) == 1 and stat.S_IMODE(files[0].stat().st_mode) == 0o600
    assert model.epoch[:32] in files[0].name
    monkeypatch.setattr(calibration, "calibrate", lambda *_: pytest.fail("calibrated again"))
    assert np.array_equal(model.kv_statistics().key_weight, first.key_weight)


ALONE = """
import logging, os, sys
import torch
from kvcore.model import calibration, load
logging.basicConfig(level="INFO", stream=sys.stdout)
torch.set_num_threads(1)
model = load(sys.argv[1], cache_dir=sys.argv[2])
if sys.argv[3] == "dies":
    calibrate, parent = calibration.calibrate, os.getpid()
    calibration.calibrate = lambda *a: os.abort() if os.getpid() != parent else calibrate(*a)
model.kv_statistics()
print("threads", len(os.listdir("/proc/self/task")))
"""


@pytest.mark.parametrize(("child", "forks"), [("lives", True), ("dies", False)])
def test_a_process_with_one_thread_keeps_it(tmp_path, child, forks):
    """So that the first template of a model can be forked. A child that dies costs only that."""
    path = served_model.make(tmp_path / "model")  # whose tokenizer leaves threads behind
    argv = [sys.executable, "-c", ALONE, str(path), str(tmp_path / "cache"), child]
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("tokens in") == 1
    assert (int(done.stdout.split()[-1]) == 1) == forks
    (file,) = (tmp_path / "cache" / "calibrations").iterdir()
    model = load(path, cache_dir=tmp_path)
    here = calibration.calibrate(model).to_json(model.epoch)
    assert file.read_text() == here, "the same numbers, whoever measures"


@pytest.mark.parametrize("what", ["damaged", "of another model", "a link", "unreadable"])
def test_a_file_that_is_not_right_is_replaced(model, tmp_path, monkeypatch, caplog, what):
    first = model.kv_statistics()
    file = next((tmp_path / "calibrations").iterdir())
    text = file.read_text()
    if what == "damaged":
        file.write_text(text.replace("A", "B", 1) if "A" in text else text[1:])
    elif what == "of another model":
        file.write_text(first.to_json("0" * 64))
    elif what == "a link":
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    else:
        file.write_bytes(b"\xff\xfe{")
    with caplog.at_level(logging.WARNING):
        again = model.kv_statistics()
    assert "calibrated again" in caplog.text
    assert np.array_equal(again.key_weight, first.key_weight)
    assert not file.is_symlink() and file.read_text() == text


def test_a_cache_that_cannot_be_written_costs_time_only(model, tmp_path):
    (tmp_path / "calibrations").write_text("in the way")
    assert model.kv_statistics().key_weight.size


def test_a_model_without_room_for_three_pages_is_refused(model):
    with pytest.raises(Unsupported, match="512 positions"):
        calibration.calibrate(model, 512)


@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (100, 0.0), (0, 1.5), (150, 1.5)])
def test_attention_weights_are_what_noise_does(window, cap):
    """First-order sums, against outputs under small random errors."""
    generator = torch.Generator().manual_seed(3)
    tokens, rows, dim, page = 256, 8, 32, 64
    k, v = (torch.randn(1, 1, tokens, dim, generator=generator) for _ in range(2))
    q = 2 * torch.randn(rows, 2, dim, generator=generator)
    weights = calibration.AttentionWeights(k, v, page, dim**-0.5, (window,), cap)
    positions = torch.full((rows,), tokens)
    weights.measure(0, q, positions)
    first = tokens - window + 1 if window else 0

    def outputs(keys, values):
        scores = q.transpose(0, 1) @ keys[0, 0, first:].T * dim**-0.5
        p = (cap * torch.tanh(scores / cap) if cap else scores).softmax(-1)
        return p @ values[0, 0, first:]

    exact, size = outputs(k, v), 1e-3
    moved = {"k": 0.0, "v": 0.0}
    for _ in range(200):
        noise = size * torch.randn(1, 1, tokens, dim, generator=generator)
        noise[:, :, :page] = 0
        moved["k"] += float((outputs(k + noise, v) - exact).square().sum(-1).mean(1).sum()) / 200
        relative = noise * v.square().mean(-1, keepdim=True).sqrt()
        moved["v"] += float((outputs(k, v + relative) - exact).square().sum(-1).mean(1).sum()) / 200
    assert float(weights.keys.sum()) * size**2 == pytest.approx(moved["k"], rel=0.1)
    assert float(weights.values) * size**2 == pytest.approx(moved["v"], rel=0.1)


WINDOWED = {  # Gemma's layers see a window and everything by turns
    "Gemma2Config": {"sliding_window": 70, "attn_logit_softcapping": 2.0},
    "Gemma3TextConfig": {"sliding_window": 70, "sliding_window_pattern": 2},
    "MistralConfig": {"sliding_window": 70},
    "Qwen2Config": {"sliding_window": 70, "use_sliding_window": True, "max_window_layers": 1},
}


@pytest.mark.parametrize("name", WINDOWED)
def test_a_model_is_calibrated_with_its_own_attention(name, tmp_path, monkeypatch):
    fields = WINDOWED[name] | {"head_dim": 64, "hidden_size": 256, "num_key_value_heads": 2}
    path = tiny.make(tmp_path / "model", name, **fields)
    model = load(path, cache_dir=tmp_path)
    assert 70 in model.config.windows and bool(model.config.soft_cap) == (name == "Gemma2Config")
    seen = []
    measure, attend = calibration.AttentionWeights.measure, calibration.PagedRun._attend
    outputs: dict[int, list[torch.Tensor]] = {}  # of one text
    runs = []

    def attended(run, layer, q, k, v):
        out = attend(run, layer, q, k, v)
        if run not in runs:
            runs.append(run)
            outputs.clear()
        outputs.setdefault(layer, []).append(out.clone())
        return out

    def measured(weights, layer, q, positions):
        """Outputs that the weights are made from, beside those of the model's own kernels."""
        own = torch.cat(outputs[layer])[positions].float().view(len(q), 2, -1, 64)
        for head in range(2):
            found = weights._of_head(layer, head, q, positions)[-1].transpose(0, 1)
            seen.append(float((found - own[:, head]).abs().max() / own.abs().max()))
        measure(weights, layer, q, positions)

    monkeypatch.setattr(calibration.PagedRun, "_attend", attended)
    monkeypatch.setattr(calibration.AttentionWeights, "measure", measured)
    found = calibration.calibrate(model, 32)
    assert len(seen) == calibration.PARTS * model.config.num_layers * 2 and max(seen) < 0.02
    assert (found.key_weight > 0).all() and (found.value_weight > 0).all()
    assert compress.profile_class(found, "small") is not None


def test_predicted_error_is_zero_where_nothing_is_compressed(model):
    found = calibration.calibrate(model)
    assert compress.predicted_error(PageClass.open(found.spec), found).sum() == 0
