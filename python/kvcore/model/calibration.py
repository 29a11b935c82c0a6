"""Calibration: a short run of a model over built-in text, for the choice of page formats.

The text is computed exactly into pages. Its pages are compressed to see what each format makes of
them; its queries say how much that matters to a head's output (a first-order
sum over attention probabilities); noise in each layer's head outputs says how much that matters to
the next token. ``docs/profiles.md`` derives it and compares predictions with measurements.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from kvcore import kernels
from kvcore.compress import KEY_FORMATS, VALUE_FORMATS, Statistics, measure_pages, round_trip
from kvcore.errors import Corrupt, Unsupported
from kvcore.model.calibration_text import TEXT
from kvcore.model.hub import locked, make_private_dir
from kvcore.pages import PageSpec, Pool

if TYPE_CHECKING:
    from kvcore.model.loading import Model

log = logging.getLogger(__name__)
PARTS, CONTEXT, PROBES = 3, 1024, 32  # texts; tokens of each, and of its continuation
CHUNK, STRIDE = 512, 4  # of prefill; of the queries whose attention is looked at, divides CHUNK
NOISE = 1.0  # of a probed layer's head outputs, over their size
ENLARGED = 3.0  # errors of a format, where all of them are measured at once
QUIET = 0.001  # changes nothing but roundings: what it does is taken off
_PR_SET_PDEATHSIG = 1


class PagedRun:
    """One sequence of a model over pages of its own.

    Attributes:
        table: page ids; pool: whose they are. tokens: int64 of the whole sequence.
        watch: called as ``watch(layer, q, k, v, out)`` after each layer's attention; it may
            change ``out``.
    """

    def __init__(
        self,
        model: Model,
        tokens: np.ndarray[Any, Any],
        page_size: int = 64,
        spare_pages: int = 0,
    ) -> None:
        self.model = model
        self.tokens = torch.from_numpy(np.array(tokens, np.int64))
        spec = model.page_spec(page_size)
        pages = -(-len(tokens) // page_size)
        frames = -(-(pages + spare_pages) // spec.extent_pages)
        self.pool = Pool(spec, frames, huge_pages=False)
        self.table = self.pool.alloc(pages)[:pages]
        config = model.config
        self.plan = kernels.AttentionPlan(self.pool, config.num_q_heads, **config.attention_options)
        self.watch: Callable[[int, Tensor, Tensor, Tensor, Tensor], None] | None = None
        self._code = kernels.DTYPE_CODES[model.dtype]

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = q.new_empty(q.shape[0], q.shape[1] * v.shape[2])
        rows = (q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0))
        self.plan.run_ptr(layer, *rows, out.data_ptr(), 0, self._code)
        if self.watch is not None:
            self.watch(layer, q, k, v, out)
        return out

    def forward(
        self,
        first: int,
        last: int,
        table: list[int] | None = None,
        kept: int | None = None,
        logits: bool = True,
    ) -> Tensor:
        """Logits of tokens ``first`` to ``last`` over the ``kept`` tokens in pages of ``table``.

        By default those before ``first``, in the sequence's own pages.
        """
        n, kept = last - first, first if kept is None else kept
        self.plan.prepare(
            np.array([0, n], np.int32),
            np.array([kept + n], np.int32),
            np.array([table or self.table], np.int32),
        )
        positions = torch.arange(first, last)
        rows = torch.arange(n if logits else 0)
        return self.model.forward(self.tokens[first:last], positions, self._attend, rows)

    def prefill(self, length: int) -> None:
        """Compute the first ``length`` tokens."""
        for first in range(0, length, CHUNK):
            self.forward(first, min(length, first + CHUNK), logits=False)

    def read(self, pages: list[int]) -> tuple[Tensor, Tensor]:
        """K and V of pages, [layers, KV heads, pages, page_size, head_dim]."""
        spec = self.pool.spec
        shape = (spec.num_layers, len(pages), spec.page_size, spec.num_kv_heads)
        dtype = getattr(torch, self.model.dtype)
        k = torch.empty(*shape, spec.head_dim_k, dtype=dtype)
        v = torch.empty(*shape, spec.head_dim_v, dtype=dtype)
        for layer in range(spec.num_layers):
            for i, page in enumerate(pages):
                kernels.unpack_slice(self.pool, page, layer, k[layer, i], v[layer, i])
        return k.permute(0, 3, 1, 2, 4).contiguous(), v.permute(0, 3, 1, 2, 4).contiguous()

    def write(self, pages: list[int], k: Tensor, v: Tensor) -> None:
        """Put K and V, shaped as :meth:`read` gives them, into open pages."""
        for layer in range(k.shape[0]):
            rows_k, rows_v = (x[layer].permute(1, 2, 0, 3).contiguous() for x in (k, v))
            for i, page in enumerate(pages):
                kernels.pack_slice(self.pool, page, layer, rows_k[i], rows_v[i])


def calibrate(model: Model, page_size: int = 64) -> Statistics:
    """Run the model over the built-in text and say what formats would do to it.

    Raises:
        Unsupported: the model's positions do not hold three pages.
    """
    started = time.perf_counter()
    limit = (model.config.max_position - PROBES) // page_size
    length = min(CONTEXT // page_size, limit) * page_size
    if length < 3 * page_size:
        raise Unsupported(
            f"page_size={page_size}: a model of {model.config.max_position} positions holds no "
            "three pages and a continuation"
        )
    tokens = _tokens(model, PARTS * (length + PROBES)).reshape(PARTS, -1)
    parts = [_calibrate(PagedRun(model, part, page_size), length) for part in tokens]
    mean = parts[0]
    for i, part in enumerate(parts[1:], 2):
        mean = mean.blended(part, 1 / i)
    log.info("%s: calibrated on %d tokens in %.1f s", model.model_id, tokens.size,
             time.perf_counter() - started)  # fmt: skip
    return mean


def _calibrate(run: PagedRun, length: int) -> Statistics:
    """On one text: its first ``length`` tokens, and the rest as their continuation."""
    page_size = run.pool.spec.page_size
    queries = _Queries(run)
    run.prefill(length)
    exact = run.forward(length, length + PROBES)
    k, v = run.read(run.table)
    whole_k, whole_v = (x.flatten(2, 3)[:, :, : length + PROBES] for x in (k, v))
    weights = AttentionWeights(whole_k, whole_v, page_size, **run.model.config.attention_options)
    for layer, (q, positions) in enumerate(queries.sampled(length // 2)):
        weights.measure(layer, q, positions)
    gain = _gains(run, exact, length)[:, None]
    sealed = [x[:, :, 1 : length // page_size] for x in (k, v)]
    rows = [x.float().flatten(0, 1).numpy() for x in sealed]
    found = Statistics(
        **vars(measure_pages(*rows)),
        spec=run.pool.spec,
        key_weight=(weights.keys * gain[..., None]).flatten(0, 1).float().numpy(),
        value_weight=(weights.values * gain).flatten().float().numpy(),
    )
    return _levelled(found, run, exact, sealed, rows)


def _tokens(model: Model, count: int) -> np.ndarray[Any, Any]:
    """The built-in text; for a model without a tokenizer, ids from a fixed generator."""
    if model.tokenizer is None:
        log.info("%s has no tokenizer: calibrated on random tokens", model.model_id)
        return np.random.default_rng(1).integers(0, model.config.vocab_size, count)
    ids = np.array(model.tokenizer(TEXT, add_special_tokens=False)["input_ids"], np.int64)
    return np.tile(ids, -(-count // len(ids)))[:count]


class _Queries:
    """Keeps every STRIDE-th query of a run from here on."""

    def __init__(self, run: PagedRun) -> None:
        self._kept: list[list[Tensor]] = [[] for _ in range(run.pool.spec.num_layers)]
        run.watch = self._watch

    def _watch(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        self._kept[layer].append(q[::STRIDE].clone())

    def sampled(self, first: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Of each layer: queries [rows, heads, dim] and their positions, from ``first`` on."""
        for kept in self._kept:
            q = torch.cat(kept)
            positions = STRIDE * torch.arange(len(q))
            yield q[positions >= first], positions[positions >= first]


class AttentionWeights:
    """What errors in K and V do to heads' outputs, from the attention of some queries.

    An error e_j in the score of token j, independent of others, moves a head's output by the sum
    of p_j e_j (v_j - out): its square is (mean square of e) times the sum of p_j^2 |v_j - out|^2.
    An error in v_j moves it by p_j times the error. A soft cap passes 1 - (capped score / cap)^2 of
    an error in a score on. Only tokens of pages that may be compressed count: not those of the
    first page, of the query's own, and behind a layer's window.

    Attributes:
        keys: [layers, heads, dim] square of outputs per mean square error of K's channel.
        values: [layers, heads] the same per square error over square of V.
    """

    def __init__(
        self,
        k: Tensor,
        v: Tensor,
        page_size: int,
        scale: float,
        window: Sequence[int] = (),
        soft_cap: float = 0.0,
    ) -> None:
        """``k``, ``v``: of the whole sequence, [layers, KV heads, tokens, head_dim].

        ``window``: of each layer, tokens, 0 or none: everything; ``soft_cap``: of scores, 0: none.
        """
        layers, heads, _, dim = k.shape
        self.k, self.v, self.page, self.scale = k, v, page_size, scale
        self.window, self.soft_cap = window or (0,) * layers, soft_cap
        self.keys = torch.zeros(layers, heads, dim)
        self.values = torch.zeros(layers, heads)

    def measure(self, layer: int, q: Tensor, positions: Tensor) -> None:
        """Set one layer's sums, from queries [rows, heads, dim] at positions [rows]."""
        for head in range(self.k.shape[1]):
            queries, p, slope, outputs = self._of_head(layer, head, q, positions)
            p, values = p.square(), self.v[layer, head].float()
            norms = values.square().sum(1)
            across = norms - 2 * outputs @ values.T + outputs.square().sum(-1, keepdim=True)
            moved = (p * slope.square() * across).sum(-1, keepdim=True)  # [group, rows, 1]
            self.keys[layer, head] = (queries.square() * moved).mean(1).sum(0)
            self.values[layer, head] = (p @ norms).mean(1).sum()

    def _of_head(
        self, layer: int, head: int, q: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of a group: scaled queries, p of tokens that may be compressed (else 0), what a score
        changes by where its product of query and key does, and outputs."""
        grouped = q.view(len(q), self.k.shape[1], -1, q.shape[2])[:, head].transpose(0, 1)
        queries = grouped.float() * self.scale  # [group, rows, dim]
        token, last = torch.arange(self.k.shape[2]), positions[:, None]
        scores, slope = queries @ self.k[layer, head].float().T, torch.ones(())
        if self.soft_cap:
            capped = torch.tanh(scores / self.soft_cap)
            scores, slope = self.soft_cap * capped, 1 - capped.square()
        hidden = token > last
        if window := self.window[layer]:
            hidden = hidden | (token <= last - window)
        p = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        outputs = p @ self.v[layer, head].float()
        own_page = last // self.page * self.page
        return queries, p * ((token >= self.page) & (token < own_page)), slope, outputs


def _divergence(exact: Tensor, logits: Tensor) -> float:
    """Mean KL of rows of logits, nats."""
    p = exact.softmax(-1)
    own = (p * exact).sum(-1) - exact.logsumexp(-1)  # sum of p log p
    across = torch.linalg.vecdot(p, logits) - logits.logsumexp(-1)
    return float((own - across).mean())


def _levelled(
    found: Statistics, run: PagedRun, exact: Tensor, sealed: list[Tensor], rows: list[Any]
) -> Statistics:
    """Scale the weights of K and of V so that all errors of one part add up to what they do.

    Errors of keys move outputs along differences of values, which later layers notice more than
    the noise of :func:`_gains`; so the two parts are measured once as wholes, each with the errors
    of its least format, enlarged to stand out from roundings.
    """
    last = len(run.tokens)
    length = last - PROBES
    pages = run.table[1 : length // found.spec.page_size]

    def divergence(changed: list[Tensor]) -> float:
        run.write(pages, *changed)
        return _divergence(exact, run.forward(length, last))

    run.watch = None
    floor = divergence([x * (1 + QUIET) for x in sealed])
    factors = []
    for part, name in (("k", KEY_FORMATS[0]), ("v", VALUE_FORMATS[0])):
        which = "kv".index(part)
        error = round_trip(name, part, rows[which]) - rows[which]
        changed = list(sealed)
        moved = torch.from_numpy(ENLARGED * error).view(sealed[which].shape)
        changed[which] = (sealed[which] + moved).to(sealed[which].dtype)
        measured = (divergence(changed) - floor) / ENLARGED**2
        if part == "k":
            predicted = float((found.key_weight * found.key_error[name]).sum())
        else:
            predicted = float((found.value_weight * found.value_error[name]).sum())
        factors.append(min(max(measured / max(predicted, 1e-30), 0.2), 5.0))
    log.debug("weights of keys times %.2f, of values times %.2f", *factors)
    return replace(
        found,
        key_weight=found.key_weight * np.float32(factors[0]),
        value_weight=found.value_weight * np.float32(factors[1]),
    )


def _gains(run: PagedRun, exact: Tensor, length: int) -> Tensor:
    """Divergence of the next token (nats) per square of a layer's head outputs, [layers]."""
    generator = torch.Generator().manual_seed(1)
    layers = run.pool.spec.num_layers
    squares = torch.zeros(layers)

    def divergence(noisy: int, size: float) -> float:
        def add(layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
            if layer == noisy:  # each head in proportion to its own size
                heads = out.float().view(len(out), q.shape[1], -1)
                rms = heads.square().mean((0, 2), keepdim=True).sqrt()
                noise = size * rms * torch.randn(heads.shape, generator=generator)
                squares[layer] = noise.square().sum((1, 2)).mean()
                out += noise.flatten(1).to(out.dtype)

        run.watch = add
        return _divergence(exact, run.forward(length, length + PROBES))

    floor = divergence(0, QUIET)
    found = torch.tensor([divergence(layer, NOISE) - floor for layer in range(layers)])
    # A layer that looks harmless on so few tokens is not taken for free.
    found = found.clamp_min(float(found.median().clamp_min(1e-12)) / 10)
    gains = torch.log(found / squares.clamp_min(1e-30))
    # Layers next to each other are alike, single measurements are noisy: a mean over three.
    around = torch.cat([gains[:1], gains, gains[-1:]])
    return torch.exp(around[:-2] / 4 + gains / 2 + around[2:] / 4)


def cached_statistics(model: Model, page_size: int, cache_dir: Path) -> Statistics:
    """The model's calibration from the cache directory, or a new one that is put there.

    Of several processes that lack it one measures, and the others wait for its file. A file that is
    damaged, of another model or geometry, or not ours is logged and replaced.
    """
    spec = model.page_spec(page_size)
    name = f"{model.epoch[:32]}-{spec.format}-{page_size}.json"
    path = cache_dir / "calibrations" / name
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(cache_dir, name))
        except OSError as error:
            log.info("calibrates by itself, there is no lock to wait on: %s", error)
        if found := _cached(path, model.epoch, spec):
            return found
        log.info("%s: calibrating for its KV profiles, once for this model ...", model.model_id)
        statistics = _calibrate_aside(model, page_size, spec)
        try:
            _write(path, statistics.to_json(model.epoch))
        except OSError as error:
            log.info("the next start calibrates again: %s", error)
    return statistics


def _calibrate_aside(model: Model, page_size: int, spec: PageSpec) -> Statistics:
    """``calibrate`` in a child, where this process has one thread and may be a template of workers:
    what computes leaves threads behind, and a process with threads is not forked any more."""
    if len(os.listdir("/proc/self/task")) > 1:
        return calibrate(model, page_size)
    told, tell = os.pipe()
    child = os.fork()
    if not child:
        os.close(told)
        _tell_calibration(model, page_size, tell)
    os.close(tell)
    with open(told, encoding="utf-8") as file:
        text = file.read()
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) == 0:
        return Statistics.from_json(text, model.epoch, spec)
    log.info("%s: calibrating again in this process, for its own error", model.model_id)
    return calibrate(model, page_size)


def _tell_calibration(model: Model, page_size: int, tell: int) -> NoReturn:
    """In the child, which does not outlive its parent."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        with open(tell, "w", encoding="utf-8") as file:
            file.write(calibrate(model, page_size).to_json(model.epoch))
        os._exit(0)
    except BaseException as error:
        log.info("%s: calibration failed: %s", model.model_id, error)
    finally:
        os._exit(1)


def _cached(path: Path, epoch: str, spec: PageSpec) -> Statistics | None:
    try:
        return Statistics.from_json(_read_own(path), epoch, spec)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (Corrupt, OSError, UnicodeDecodeError) as error:
        log.warning("%s is not used, the model is calibrated again: %s", path, error)
        return None


def _read_own(path: Path) -> str:
    """The text of a regular file of ours; no link is followed."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)) as file:
        owner = os.fstat(file.fileno()).st_uid
        if owner != os.geteuid():
            raise Corrupt(f"it belongs to user {owner}")
        return file.read()


def _write(path: Path, text: str) -> None:
    make_private_dir(path.parent)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".", delete=False) as file:
        try:  # mode 0600 from the start
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
