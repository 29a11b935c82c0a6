"""Which format each (layer, KV head, K or V) of sealed pages gets, and sealing full pages.

``profile_classes(model, "small")`` is what engines call. Underneath: statistics of a model's keys,
values and queries (``kvcore.model.calibration`` makes them) and a budget of bytes give a table
(``csrc/compress/chooser.h``); :func:`drift` says when the text of the day wants another one.

A sealed page keeps its id and holds rounded K and V of its tokens in fewer bytes; its open bytes
come free. See ``csrc/compress``, ``docs/formats.md`` and ``docs/profiles.md``.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from kvcore import _core, kernels
from kvcore.errors import Corrupt, InvalidArgument, Unsupported
from kvcore.pages import PageClass, PageSpec, Pool

__all__ = [
    "PROFILES",
    "REBUILD_ABOVE",
    "Calibrated",
    "Drift",
    "PageStatistics",
    "Sealer",
    "Statistics",
    "budget_bytes",
    "choose",
    "described",
    "drift",
    "measure_pages",
    "page_share",
    "predicted_error",
    "profile_class",
    "profile_classes",
    "read_calibration",
    "round_trip",
    "seal_pages",
]

log = logging.getLogger(__name__)
seal_pages = _core.compress.seal_pages

Array: TypeAlias = npt.NDArray[np.float32]
PROFILES = ("exact", "balanced", "small")
KEY_FORMATS, VALUE_FORMATS = ("k4", "int8"), ("v3", "v4", "int8")
REBUILD_ABOVE = 1.25
"""``Drift.regret`` above which the table is rebuilt for later requests."""
MAX_KEY_ERROR = 0.05
_FIXED = {"balanced": ("k4", "v4"), "small": ("k4", "v3")}
_VERSION = 2  # 1: calibrated without windows and soft caps
_S = TypeVar("_S", bound="PageStatistics")


@dataclass(frozen=True)
class PageStatistics:
    """What pages tell of their keys and values; heads = layers x KV heads, layer-major.

    Attributes:
        key_energy: [heads, head_dim_k] mean square about the page's mean of the channel.
        key_error: format -> [heads, head_dim_k] mean square error.
        constant_share: [heads] part of the keys' energy that is the channels' page means.
        value_energy: [heads] mean square norm of a value row.
        value_error: format -> [heads] square error over square of the values.
    """

    key_energy: Array
    key_error: Mapping[str, Array]
    constant_share: Array
    value_energy: Array
    value_error: Mapping[str, Array]

    def blended(self: _S, newer: _S, share: float) -> _S:
        """A running mean: ``share`` of ``newer``, the rest of these."""

        def mix(a: Any, b: Any) -> Any:
            if isinstance(a, PageSpec):
                return a
            if isinstance(a, Mapping):
                return {name: mix(a[name], b[name]) for name in a}
            return ((1 - share) * a + share * b).astype(np.float32)

        mixed = {f.name: mix(getattr(self, f.name), getattr(newer, f.name)) for f in fields(self)}
        return replace(self, **mixed)


@dataclass(frozen=True)
class Statistics(PageStatistics):
    """What a calibration knows of a model: its pages, and what its queries make of errors.

    Attributes:
        spec: geometry of the pages.
        key_weight: [heads, head_dim_k] divergence of the next token (nats) per mean square error
            of the channel: the energy that queries have there, by what score noise does.
        value_weight: [heads] the same per square error over square of the values.
    """

    spec: PageSpec
    key_weight: Array
    value_weight: Array

    def with_pages(self, pages: PageStatistics) -> Statistics:
        """The same queries over other pages."""
        return replace(self, **{f.name: getattr(pages, f.name) for f in fields(PageStatistics)})

    def to_json(self, identity: str) -> str:
        """Text that :meth:`from_json` reads; arrays are base64 of little-endian float32."""
        arrays = {
            f.name: _packed(getattr(self, f.name)) for f in fields(Statistics) if f.name != "spec"
        }
        body = {"version": _VERSION, "identity": identity, "spec": self.spec.describe(), **arrays}
        return json.dumps({**body, "digest": _digest(body)}, indent=1)

    @staticmethod
    def from_json(text: str, identity: str, spec: PageSpec) -> Statistics:
        """Read what :meth:`to_json` wrote for the same identity and geometry.

        Raises:
            Corrupt: damaged, or of another version, identity or geometry (the message says which).
        """
        try:
            body = json.loads(text)
            digest = body.pop("digest")
        except (ValueError, KeyError, AttributeError) as error:
            raise Corrupt(f"not a calibration: {error!r}") from error
        wanted = {"version": _VERSION, "identity": identity, "spec": spec.describe()}
        for name, value in wanted.items():
            if body.get(name) != value:
                raise Corrupt(f"{name} is {body.get(name)!r}: wanted {value!r}")
        if digest != _digest(body):
            raise Corrupt("its digest does not match")
        arrays = {f.name: body[f.name] for f in fields(Statistics) if f.name != "spec"}
        return Statistics(spec=spec, **{name: _unpacked(a) for name, a in arrays.items()})


def _packed(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _packed(array) for name, array in value.items()}
    data = np.ascontiguousarray(value, "<f4")
    return {"shape": list(data.shape), "data": base64.b64encode(data.tobytes()).decode()}


def _unpacked(value: Any) -> Any:
    if "data" not in value:
        return {name: _unpacked(array) for name, array in value.items()}
    data = np.frombuffer(base64.b64decode(value["data"]), "<f4")
    return data.reshape(value["shape"]).astype(np.float32)


def _digest(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True).encode()
    return hashlib.blake2b(text, digest_size=32).hexdigest()


def read_calibration(text: str) -> tuple[str, Statistics]:
    """What :meth:`Statistics.to_json` wrote, whosever it is: the identity and the statistics.

    Raises:
        Corrupt: damaged, or of another version.
    """
    try:
        body = json.loads(text)
        fields = dict(part.split("=") for part in str(body["spec"]).split())
        names = ("head_dim_k", "head_dim_v", "page_size", "extent_pages")
        sizes: dict[str, Any] = {name: int(fields[name]) for name in names}
        layers, heads = int(fields["layers"]), int(fields["kv_heads"])
        spec = PageSpec(layers, heads, format=fields["format"], **sizes)
        identity = str(body["identity"])
    except (ValueError, KeyError, TypeError, InvalidArgument) as error:
        raise Corrupt(f"not a calibration: {error!r}") from error
    return identity, Statistics.from_json(text, identity, spec)


class Calibrated(Protocol):
    """What has statistics: a loaded model (``kvcore.model.Model``)."""

    def kv_statistics(self, page_size: int = 64) -> Statistics:
        """What a calibration measured of its KV, for pages of ``page_size`` tokens."""
        ...


class Profiled(Calibrated, Protocol):
    """What engines keep pages of: also says what an open one looks like."""

    def page_spec(self, page_size: int = 64) -> PageSpec:
        """The geometry of its pages."""
        ...


def profile_classes(
    model: Profiled, profile: str, page_size: int = 64
) -> tuple[dict[str, PageClass], Statistics | None]:
    """The tables that a worker of ``profile`` offers, and the statistics they were chosen by.

    Tables are by profile, the most faithful first: the profile itself and all that are more
    faithful; "exact" has none, and then there are no statistics. A worker's pages stay as they are
    when there is no table.

    Raises:
        InvalidArgument: an unknown profile. Unsupported: a model that the profile does not fit; one
            whose pages have no codec is told so before it is calibrated.
    """
    spec = model.page_spec(page_size)
    if profile_class(spec, profile) is None:
        return {}, None
    statistics = model.kv_statistics(page_size)
    tables = {}
    for name in PROFILES[1 : PROFILES.index(profile) + 1]:
        table = profile_class(statistics, name, page_size)
        assert table is not None
        tables[name] = table
    return tables, statistics


def page_share(table: PageClass | None) -> float:
    """Bytes of a page of ``table``, metadata and padding counted, over those of an open one."""
    return table.run_bytes(1) / PageClass.open(table.spec).run_bytes(1) if table else 1.0


def described(profile: str, table: PageClass | None) -> str:
    """A profile in use, for people: its table and what a page takes."""
    if table is None:
        return f"kv_profile {profile}: pages stay as they are"
    share = 100 * page_share(table)
    return (
        f"kv_profile {profile}: table {table.digest.hex()[:16]}, {table.run_bytes(1)} bytes a page,"
        f" {share:.1f} % of {table.spec.format}"
    )


def profile_class(
    source: Calibrated | Statistics | PageSpec, profile: str, page_size: int = 64
) -> PageClass | None:
    """The formats of a profile's sealed pages; None for "exact", whose pages stay as they are.

    Args:
        source: a model (calibrated once, then from its cache), statistics, or a geometry, whose
            table then is the same format everywhere.
        profile: "exact", "balanced" or "small".
        page_size: of the model's pages; the others have theirs.

    Raises:
        InvalidArgument: an unknown profile. Unsupported: pages of another format than bf16, a
            geometry that codecs do not have, or keys that the budget cannot hold.
    """
    if profile not in PROFILES:
        raise InvalidArgument(f"kv_profile is {profile!r}; allowed: {', '.join(PROFILES)}")
    if profile == "exact":
        return None
    statistics = None
    if isinstance(source, PageSpec):
        spec = source
    else:
        statistics = source if isinstance(source, Statistics) else source.kv_statistics(page_size)
        spec = statistics.spec
    if spec.format != "bf16":
        raise Unsupported(f"kv_profile {profile!r} compresses bf16 pages; these are {spec.format}")
    try:
        if statistics is not None:
            return choose(statistics, budget_bytes(spec, profile))
        return PageClass(spec, [[_FIXED[profile]] * spec.num_kv_heads] * spec.num_layers)
    except InvalidArgument as error:
        raise Unsupported(f"kv_profile {profile!r} does not fit this model: {error}") from error


def budget_bytes(spec: PageSpec, profile: str) -> int:
    """Most bytes of a sealed page of "balanced" or "small", all metadata counted."""
    return _core.compress.budget_bytes(spec, profile)


def choose(statistics: Statistics, budget: int, max_key_error: float = MAX_KEY_ERROR) -> PageClass:
    """The table of least predicted error within ``budget`` bytes a page.

    Args:
        max_key_error: heads whose keys 4 bits would change by more than this part of their
            variation get 8 bits first, whatever the rest.

    Raises:
        InvalidArgument: statistics that do not fit together. Unsupported: too small a budget.
    """
    return _core.compress.choose(statistics.spec, statistics, budget, max_key_error)


def predicted_error(table: PageClass, statistics: Statistics) -> npt.NDArray[np.float64]:
    """Divergence (nats) that each part is expected to add: [layers, KV heads, 2], K then V."""
    return _core.compress.predicted_error(table, statistics)


def measure_pages(k: Array, v: Array) -> PageStatistics:
    """Statistics of pages, by compressing them.

    Args:
        k, v: float32 [heads, pages, page_size, head_dim], heads = layers x KV heads; whole pages
            and not a sequence's first, which is never compressed.
    """
    k, v = np.ascontiguousarray(k, np.float32), np.ascontiguousarray(v, np.float32)
    mean = k.mean(axis=2, keepdims=True)
    energy = np.square(k - mean).mean(axis=(1, 2))
    whole = np.square(k).mean(axis=(1, 2, 3))
    values = np.square(v).sum(axis=3).mean(axis=(1, 2))

    def value_error(name: str) -> Array:
        lost = np.square(round_trip(name, "v", v) - v).sum(axis=3).mean(axis=(1, 2))
        return np.asarray(lost / np.maximum(values, 1e-30), np.float32)

    return PageStatistics(
        key_energy=energy,
        key_error={
            name: np.square(round_trip(name, "k", k) - k).mean(axis=(1, 2)) for name in KEY_FORMATS
        },
        constant_share=1 - energy.mean(axis=1) / np.maximum(whole, 1e-30),
        value_energy=values,
        value_error={name: value_error(name) for name in VALUE_FORMATS},
    )


def round_trip(name: str, part: str, rows: Array) -> Array:
    """What a format makes of float32 ``rows`` [..., page_size, head_dim], page by page."""
    page, dim = rows.shape[-2:]
    count, step = rows.size // (page * dim), page * dim
    size = kernels.block_bytes(name, part, page, dim)
    blocks, out = np.empty(count * size, np.uint8), np.empty_like(rows)
    code = kernels.DTYPE_CODES["float32"]
    shape = (name, part, page, dim)
    kernels.encode_block_ptr(
        *shape, rows.ctypes.data, dim, code, blocks.ctypes.data, size, count, step, size
    )
    kernels.decode_block_ptr(
        *shape, blocks.ctypes.data, size, out.ctypes.data, dim, code, count, step, size
    )
    return out


@dataclass(frozen=True)
class Drift:
    """How far pages have moved from those that a table was made for.

    Attributes:
        level: predicted error of the table on these pages, over that on the calibration's.
        regret: that error over the one of the table that these pages would get for the same
            bytes; 1 = the best.
        refused: heads whose keys the table's format does not carry any more (``max_key_error``).
    """

    level: float
    regret: float
    refused: int

    @property
    def rebuild(self) -> bool:
        """Whether later requests should get another table."""
        return self.regret > REBUILD_ABOVE or self.refused > 0


def drift(
    statistics: Statistics,
    observed: PageStatistics,
    table: PageClass,
    max_key_error: float = MAX_KEY_ERROR,
) -> Drift:
    """Compare the pages of late with the calibration that ``table`` was made from.

    A new table for later requests is ``choose(statistics.with_pages(observed), budget)``;
    :class:`Sealer` makes them.
    """
    now = statistics.with_pages(observed)
    error = float(predicted_error(table, now).sum())
    best = choose(now, table.page_bytes, max_key_error=1e30)  # the guard has its own figure
    before = float(predicted_error(table, statistics).sum())
    least = float(predicted_error(best, now).sum())
    weight = statistics.key_weight
    variation = (observed.key_energy * weight).sum(axis=1)
    refused = 0
    for i, (name, _) in enumerate(pair for layer in table.formats for pair in layer):
        lost = float((observed.key_error[name][i] * weight[i]).sum())
        refused += name == KEY_FORMATS[0] and lost > max_key_error * float(variation[i])
    return Drift(error / max(before, 1e-30), error / max(least, 1e-30), refused)


class Sealer(_core.compress.Sealer):
    """Full pages that wait to be sealed, first come, first sealed, and how faithful pages are.

    ``Sealer(pool, balanced, small)``: the classes that pages may be sealed into, the most faithful
    first. A page counts as what it will be from ``add`` on, and as the least faithful one that it
    was computed over.

    With the ``statistics`` that the classes were chosen by, a sample of the pages is measured as
    they are sealed, and :meth:`step` offers later sequences new tables where the pages have moved
    (:func:`drift`) twice in succession, each time over ``WINDOW_ROUNDS`` rounds: the second time
    nothing from before is among them. No table takes more bytes than the first of its profile.

    A page freed or sealed meanwhile is passed over; one that holds a number which cannot be encoded
    stays open for good (``refused`` counts it). Not thread-safe; no kernel may read the pages while
    ``step`` or ``run`` does. See ``csrc/compress/sealer.h``.

    Attributes:
        classes: of the tables that new sequences get, the most faithful first.
        page_bytes: of a sealed page of the least faithful class, at most.
        regret: the worst ``Drift.regret`` of those tables when last judged; 1 before that.
    """

    WINDOW_ROUNDS = 8

    def __init__(
        self, pool: Pool, *classes: PageClass, statistics: Statistics | None = None
    ) -> None:
        super().__init__(pool, classes, statistics is not None)
        self.pool = pool
        self.classes = list(classes)
        self.page_bytes = classes[-1].run_bytes(1)
        self.regret = 1.0
        self._budgets = [page_class.page_bytes for page_class in classes]
        self._statistics = statistics
        self._drifted = False

    def step(self, busy: bool) -> None:
        """A step's share of the queue; ``busy``: sequences decode, so keep it short."""
        super().step(busy)
        if self._statistics is not None and self.rounds >= self.WINDOW_ROUNDS:
            self._judge(self._statistics, PageStatistics(**self.observed()))
            self.restart()

    def _judge(self, statistics: Statistics, observed: PageStatistics) -> None:
        found = [drift(statistics, observed, page_class) for page_class in self.classes]
        self.regret = max(each.regret for each in found)
        before, self._drifted = self._drifted, any(each.rebuild for each in found)
        if before and self._drifted:
            self._rebuild(statistics.with_pages(observed))
            self._drifted = False

    def _rebuild(self, statistics: Statistics) -> None:
        try:
            classes = [choose(statistics, budget) for budget in self._budgets]
            self.offer(classes)
        except (InvalidArgument, Unsupported) as error:
            log.warning("pages have drifted (regret %.2f), tables stay: %s", self.regret, error)
            return
        self._statistics, self.classes = statistics, classes
        log.info(
            "pages have drifted (regret %.2f): later requests get table %s",
            self.regret, classes[-1].digest.hex()[:16],
        )  # fmt: skip
