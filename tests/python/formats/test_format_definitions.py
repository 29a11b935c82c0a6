"""Compressed blocks as defined: sizes, order of bytes, error bounds, what is refused."""

import hashlib
import itertools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvcore import reference as ref
from kvcore.reference import codecs
from support.blocks import CODECS, DIMS, KINDS, PAGES, distance_bound, error_bound, page

NAMES = [f"{fmt}-{part}" for fmt, part in CODECS]
codec = pytest.mark.parametrize(("fmt", "part"), CODECS, ids=NAMES)


def round_trip(fmt: str, part: str, rows: np.ndarray) -> np.ndarray:
    block = ref.encode_block(fmt, part, rows)
    ref.check_block(fmt, part, block, *rows.shape)
    return ref.decode_block(fmt, part, block, *rows.shape)


def golden_page(tokens: int, dims: int) -> np.ndarray:
    """Numbers that no library version can change: small fractions, an offset, two outliers."""
    t, d = np.arange(tokens)[:, None], np.arange(dims)[None, :]
    x = ((t * 37 + d * 101 + t * d * 7) % 257 - 128) / 64 + (d % 16 == 3) * 12.5
    x[tokens // 2, dims // 2] = 300
    x[1] = 0
    return x.astype(np.float32)


# python tests/python/formats/test_format_definitions.py prints this table.
GOLDEN = {
    ("int8", "k", 16, 8): "5cd3861e2868d1fb432a1d2432e9c3481de1001a0a2a9ff4e0ecf1eeca5d4510",
    ("int8", "k", 64, 128): "b601c43fa22b9be203afd589a94a5fb295d2747e4864b74ac29b57c02599436f",
    ("int8", "k", 128, 120): "bfb9c9c859fd2fa504b40bc339bf62409b72fac7500da6ad504f0ad3757ee6cc",
    ("int8", "v", 16, 8): "43349c07e140bd81481f7c9827b0c86ae41d5dd2c9c6dd7f732dda99f537df0a",
    ("int8", "v", 64, 128): "080c6ea1f867cb67661d5ec40cb3adddf93adca89a13339f2d3029658a7d8413",
    ("int8", "v", 128, 120): "f903fa54c4eb3bb9b4607f34fa0a340d7fedbdddb20c9fd1688d23fe24688173",
    ("fp8", "k", 16, 8): "ea9b79e93de5e37f49e4d11785b74921e1919f0db17a222e1b4224e765479902",
    ("fp8", "k", 64, 128): "5384a9ed5a06ef3aa97bd375331792d0e37b9ed34ab2897d6f1010f17b3f5f23",
    ("fp8", "k", 128, 120): "7106170b2c7b9bbd2cb7f2e285e9da24206dae681c516937351d570f550773d3",
    ("fp8", "v", 16, 8): "93a1903bd1b63e5f863dd7de403762249dae08f51d631dfa871be554f7564a18",
    ("fp8", "v", 64, 128): "7a222c3e58951bbc11bc4f4e9cb6099e3e5e5fa6e6166a3565d3e15a03959289",
    ("fp8", "v", 128, 120): "930ea2371e4b70238e5c8ee340b9e66aae6f64c1517a15e7f766bae54b6d92b2",
    ("k4", "k", 16, 8): "3f43b64749a285103a119e88c769cf0db9f00db3bfe4ad6fe750e2c89e12cfeb",
    ("k4", "k", 64, 128): "9c290fc5ae6249b8859b3179f0d868424fa1f00291fb171cee9e0a85f3a52956",
    ("k4", "k", 128, 120): "ce72dcdc14b991a3912ebb4986c0f5dabcad81116dac6aaf954e681c574477a1",
    ("v4", "v", 16, 8): "cf1e3dd0222e68fc062db1a02b75dbfa44f54b119958fcab9a3d18ac34836708",
    ("v4", "v", 64, 128): "8bbcfb28fc86c6c78df59de18129a06ddad5b93b864ae8ed1d27a6bd9d96e60b",
    ("v4", "v", 128, 120): "81b002ff80337701fbd3393574f6e753711ef746e8422c76815a0625a1013efd",
    ("v3", "v", 16, 8): "199dc4743c4853550d1783c1a098cad140c663276a9804b8a8760b6d23a71734",
    ("v3", "v", 64, 128): "29a83bfedfe907995d6e5682f930db3a5bfa1b00997ca70452f0cbc89b5f9aff",
    ("v3", "v", 128, 120): "a30e26a210b68907eeabb20f329149b133d1a8203bee712c6701250df0a56e76",
}


@pytest.mark.parametrize("key", GOLDEN)
def test_golden_bytes(key: tuple[str, str, int, int]) -> None:
    fmt, part, tokens, dims = key
    assert digest(fmt, part, tokens, dims) == GOLDEN[key]


def digest(fmt: str, part: str, tokens: int, dims: int) -> str:
    block = ref.encode_block(fmt, part, golden_page(tokens, dims))
    return hashlib.sha256(block.tobytes()).hexdigest()


# Percent of bf16 at head_dim 128, page 64; the last two are whole K and V pages.
SIZES = {
    ("int8", "k"): 52.4, ("int8", "v"): 50.8, ("fp8", "k"): 52.0, ("fp8", "v"): 50.4,
    ("k4", "k"): 27.0, ("v4", "v"): 25.8, ("v3", "v"): 19.6,
}  # fmt: skip


def percent(fmt: str, part: str, tokens: int = 64, dims: int = 128) -> float:
    return 100 * ref.block_bytes(fmt, part, tokens, dims) / (2 * tokens * dims)


def test_sizes_with_all_metadata() -> None:
    for (fmt, part), most in SIZES.items():
        assert most - 0.5 < percent(fmt, part) <= most, (fmt, part)
    assert percent("k4", "k") + percent("v4", "v") <= 2 * 27.5
    assert percent("k4", "k") + percent("v3", "v") <= 2 * 24.5


@codec
def test_sizes_are_what_encoders_write(fmt: str, part: str) -> None:
    for tokens, dims in itertools.product(PAGES, DIMS):
        block = ref.encode_block(fmt, part, page("normal", tokens, dims))
        assert len(block) == ref.block_bytes(fmt, part, tokens, dims)
        assert len(block) % 64 == 0
        arrays = ref.split_block(fmt, part, block, tokens, dims)
        used = sum(array.nbytes for array in arrays.values())
        assert len(block) - used < 64 * len(arrays)


@codec
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dims", DIMS)
def test_errors_stay_within_their_bounds(fmt: str, part: str, kind: str, dims: int) -> None:
    for tokens in PAGES:
        rows = page(kind, tokens, dims, seed=tokens + dims)
        got = round_trip(fmt, part, rows).astype(np.float64)
        assert np.isfinite(got).all()
        if fmt in ("v4", "v3"):
            check_rotated(fmt, rows, got)
        else:
            excess = np.abs(got - rows) / error_bound(fmt, part, rows)
            assert excess.max() <= 1, (tokens, np.argwhere(excess > 1)[:3])
            if kind == "normal" and dims >= 64:
                assert excess.max() > 0.5, "the bound is too wide to notice anything"


def check_rotated(fmt: str, rows: np.ndarray, got: np.ndarray) -> None:
    """Norms are kept; rows of normal numbers come close, and no row goes too far."""
    want = rows.astype(np.float64)
    norm, dims = np.linalg.norm(want, axis=1), rows.shape[1]
    tiny = 2.0**-24 * 127 * np.sqrt(dims)  # one step of the norm's f16 below its normal range
    assert (np.abs(np.linalg.norm(got, axis=1) - norm) <= 2.0**-10 * norm + tiny).all()
    distance = np.linalg.norm(got - want, axis=1)
    assert (distance <= distance_bound(fmt, dims) * norm + 2 * tiny).all()


@codec
def test_zeros_stay_invisible(fmt: str, part: str) -> None:
    got = round_trip(fmt, part, np.zeros((64, 256), np.float32))
    assert np.abs(got).max() <= (2e-5 if fmt in ("v4", "v3") else 0)


@pytest.mark.parametrize(("fmt", "most"), [("v4", 0.102), ("v3", 0.192)])
def test_rows_of_normal_numbers_come_as_close_as_the_codebook_allows(fmt: str, most: float) -> None:
    """sqrt of Lloyd-Max's 0.0095 and 0.0345, and a little for the norm that is kept."""
    rows = page("normal", 128, 128)
    error = np.linalg.norm(round_trip(fmt, "v", rows) - rows) / np.linalg.norm(rows)
    assert 0.9 * most < error < most


def test_v_outliers_cost_no_more_than_their_rows() -> None:
    rows = page("normal", 64, 128)
    rows[5, 7] = 6e4
    got = round_trip("v4", "v", rows)
    others = np.arange(64) != 5
    assert np.array_equal(got[others], round_trip("v4", "v", page("normal", 64, 128))[others])


def test_constant_channels_cost_k_nothing() -> None:
    """A bias of the keys, 100 times the rest, leaves the others' error as it was (int8, fp8)."""
    plain, biased = page("normal", 64, 128), page("normal", 64, 128)
    biased[:, 9] = 128.0
    others = np.arange(128) != 9
    for fmt in ("int8", "fp8"):
        errors = [
            np.abs(round_trip(fmt, "k", rows) - rows)[:, others].mean() for rows in (plain, biased)
        ]
        assert errors[1] < 1.1 * errors[0]
        assert np.array_equal(round_trip(fmt, "k", biased)[:, 9], biased[:, 9])


def test_k4_bounds_hold_every_key() -> None:
    for kind, dims in itertools.product(KINDS, DIMS):
        rows = page(kind, 64, dims).astype(np.float64)
        block = ref.encode_block("k4", "k", rows)
        z, step = codecs.k4_channels(ref.split_block("k4", "k", block, 64, dims))
        low, high = z.astype(np.float64), z + 15 * step.astype(np.float64)
        slack = 2.0**-20 * (np.abs(rows).max(axis=0) + np.abs(low) + 15 * step)
        assert (rows >= low).all() and (rows <= high + slack).all()


def test_e4m3_is_that_of_ml_dtypes() -> None:
    rng = np.random.default_rng(3)
    x = np.concatenate([
        rng.normal(size=5000) * np.exp2(rng.integers(-12, 8, 5000)),
        codecs.E4M3, (codecs.E4M3[1:] + codecs.E4M3[:-1]) / 2, [0.0, -0.0, 448, -448],
    ])  # fmt: skip
    x = np.clip(x, -448, 448).astype(np.float32)
    want = x.astype(ml_dtypes.float8_e4m3fn)
    assert np.array_equal(codecs.to_e4m3(x), want.view(np.uint8))
    assert np.array_equal(codecs.from_e4m3(want.view(np.uint8)), want.astype(np.float32))


def test_f16_up_is_the_least_f16_not_below() -> None:
    x = np.abs(page("wide", 64, 64)).reshape(-1)
    up = codecs.f16_up(x).astype(np.float64)
    below = np.nextafter(codecs.f16_up(x), np.float16(0)).astype(np.float64)
    assert (up >= x).all() and ((below < x) | (up == 2.0**-24)).all() and (up > 0).all()


def test_hadamard_is_orthogonal_and_signs_are_balanced() -> None:
    for dims in DIMS:
        width = codecs.hadamard_width(dims)
        matrix = codecs.hadamard(np.eye(dims, dtype=np.float32))
        assert np.array_equal(matrix @ matrix, width * np.eye(dims))
    assert abs(codecs.sign_of_dims(256).sum()) <= 48


@codec
def test_codes_stand_where_the_formula_says(fmt: str, part: str) -> None:
    """One value changes: only its own code does, at the place the layout's formula names."""
    tokens, dims = 128, 120
    base = np.zeros((tokens, dims), np.uint8)
    order = {
        "int8": lambda c: (codecs._order_k if part == "k" else codecs._order_v)(c, 4),
        "fp8": lambda c: (codecs._order_k if part == "k" else codecs._order_v)(c, 2),
        "k4": codecs._order_k4, "v4": codecs._order_v4, "v3": codecs._order_v3,
    }[fmt]  # fmt: skip
    for t, d in [(0, 0), (1, 0), (0, 1), (63, 119), (64, 0), (127, 64), (77, 63), (90, 115)]:
        codes = base.copy()
        codes[t, d] = top = 7 if fmt == "v3" else 15
        found = {int(i): int(v) for i, v in enumerate(order(codes)) if v}
        assert found == places(fmt, part, t, d, dims, tokens, top)


def places(fmt: str, part: str, t: int, d: int, dims: int, tokens: int, code: int) -> dict:
    """Bytes that are not 0 when only the code of (t, d) is not."""
    tb, lane = t // 64, t % 64
    first = d // 64 * 64
    width = min(dims - first, 64)
    if fmt in ("int8", "fp8"):
        n = 4 if fmt == "int8" else 2
        if part == "k":
            return {((tb * (dims // n) + d // n) * 64 + lane) * n + d % n: code}
        return {first * tokens + (t // n * width + d - first) * n + t % n: code}
    if fmt == "k4":
        at = ((tb * (dims // 8) + d // 8) * 64 + lane) * 4 + d % 4
        return {at: code << (4 if d % 8 >= 4 else 0)}
    if fmt == "v4":
        at = first * tokens // 2 + (t // 8 * width + d - first) * 4 + t % 4
        return {at: code << (4 if t % 8 >= 4 else 0)}
    group = 4 * width + 32 * -(-width // 16)
    start = (tokens // 16) * (4 * 64 + 128) * (first // 64) + t // 16 * group
    j, b = t % 16 // 4, t % 4
    bit = 4 * ((d - first) % 16) + b
    mask = start + 4 * width + (d - first) // 16 * 32 + 8 * j + bit // 8
    return {start + 4 * (d - first) + b: (code & 3) << 2 * j, mask: (code >> 2) << bit % 8}


@codec
@given(data=st.data())
def test_orders_have_inverses(fmt: str, part: str, data: st.DataObject) -> None:
    tokens, dims = data.draw(st.sampled_from(PAGES)), 8 * data.draw(st.integers(1, 32))
    most = {"k4": 16, "v4": 16, "v3": 8}.get(fmt, 256)
    codes = np.random.default_rng(tokens + dims).integers(0, most, (tokens, dims), np.uint8)
    if fmt in ("int8", "fp8"):
        n = 4 if fmt == "int8" else 2
        there, back = (
            (codecs._order_k, codecs._unorder_k) if part == "k" else
            (codecs._order_v, codecs._unorder_v)
        )  # fmt: skip
        assert np.array_equal(back(there(codes, n), n, tokens, dims), codes)
    else:
        there, back = getattr(codecs, f"_order_{fmt}"), getattr(codecs, f"_unorder_{fmt}")
        assert np.array_equal(back(there(codes), tokens, dims), codes)


@codec
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 65505, -1e5])
def test_numbers_out_of_range_are_refused_by_place(fmt: str, part: str, value: float) -> None:
    rows = page("normal", 32, 64)
    rows[7, 33] = value
    with pytest.raises(ValueError, match=rf"{part}\[7, 33\]"):
        ref.encode_block(fmt, part, rows)


@codec
def test_damage_is_refused(fmt: str, part: str) -> None:
    block = ref.encode_block(fmt, part, page("normal", 32, 64))
    for name, array in ref.split_block(fmt, part, block, 32, 64).items():
        if name in ("minimum", "codes") and fmt != "fp8":
            continue
        for bad in (0, -1.0, np.nan) if array.dtype == np.float16 else (0x7F,):
            if name == "mean":
                bad = 0x7F80
            kept = array[1 % len(array)]
            array[1 % len(array)] = bad
            with pytest.raises(ValueError, match=name):
                ref.check_block(fmt, part, block, 32, 64)
            array[1 % len(array)] = kept
    ref.check_block(fmt, part, block, 32, 64)


@pytest.mark.parametrize(
    ("fmt", "part", "tokens", "dims"),
    [("k4", "v", 64, 64), ("v3", "k", 64, 64), ("bf16", "k", 64, 64), ("int8", "k", 48, 64),
     ("int8", "v", 64, 60), ("v4", "v", 64, 264), ("int8", "x", 64, 64)],
)  # fmt: skip
def test_shapes_that_do_not_exist_are_refused(fmt: str, part: str, tokens: int, dims: int) -> None:
    with pytest.raises(ValueError, match="allowed"):
        ref.block_bytes(fmt, part, tokens, dims)


if __name__ == "__main__":
    for (fmt, part), shape in itertools.product(CODECS, [(16, 8), (64, 128), (128, 120)]):
        print(f'    ("{fmt}", "{part}", {shape[0]}, {shape[1]}): "{digest(fmt, part, *shape)}",')
