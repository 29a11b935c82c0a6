"""torch.ops.kvcore.*: schemas, tracing, compilation, and equality with the kernels they call."""

import gc
import shutil
import time

import numpy as np
import pytest
import torch
from kvcore import kernels, ops
from kvcore import reference as ref
from kvcore.errors import InvalidArgument, NotFound
from support.batches import Batch, Sequence, Shape, bits_of, to_torch

torch_ops = torch.ops.kvcore
SHAPE = Shape(4, 2, 32, 48, 16, "f32", num_layers=2, extent_pages=2)
SEQUENCES = [Sequence(1, 20, 3), Sequence(2, 5, 1), Sequence(3, 16, 1)]


class Setting:
    """A batch with everything the operators ask for."""

    def __init__(self, shape: Shape = SHAPE, *, fill: bool = True) -> None:
        self.batch = Batch(shape, SEQUENCES, fill=fill)
        self.pool = ops.register(self.batch.pool)
        self.plan = self.batch.plan()
        self.step = ops.register(self.plan)
        self.arena = ops.arena(self.batch.pool)
        self.q = to_torch(self.batch.q(0, "f32"), "f32")
        k, v = self.batch.new_kv(0)
        self.k, self.v = to_torch(k, shape.fmt), to_torch(v, shape.fmt)
        tables = (self.batch.cu_seqlens_q, self.batch.context_lens, self.batch.block_table)
        self.tables = [torch.from_numpy(t.copy()) for t in tables]
        self.slots = torch.from_numpy(ref.slots_of(self.batch.geometry, *tables))


@pytest.fixture
def given() -> Setting:
    return Setting()


def arguments(s: Setting) -> dict[str, tuple[object, ...]]:
    """Arguments of every operator."""
    page = int(s.batch.block_table[0, 0])
    rows = torch.ones(5, 2, 32), torch.ones(5, 2, 48)
    return {
        "attend_layer": (s.q, s.k, s.v, s.arena, s.step.id, 0),
        "attend_layer_out": (s.q, s.k, s.v, s.arena, torch.zeros(5, 4, 48), s.step.id, 0),
        "append_kv": (s.k, s.v, s.arena, s.pool.id, 1, s.slots),
        "paged_attention": (s.q, s.arena, s.pool.id, 0, *s.tables, SHAPE.scale),
        "merge_states": (torch.randn(3, 4, 16), torch.randn(3, 4)) * 2,
        "pack_slice": (*rows, s.arena, s.pool.id, page, 1, 3),
        "unpack_slice": (s.arena, s.pool.id, page, 0),
        "copy_pages": (
            s.arena,
            s.pool.id,
            torch.tensor([page]),
            torch.tensor([page + 1 - 2 * (page % 2)]),
        ),
    }


@pytest.mark.parametrize("name", list(arguments(Setting())))
def test_opcheck(name: str, given: Setting) -> None:
    """Schema against behaviour, fake tensors against real ones, functionalized tracing."""
    torch.library.opcheck(getattr(torch_ops, name).default, arguments(given)[name])


def test_every_operator_is_checked() -> None:
    declared = {schema.partition("(")[0] for schema, _, _ in ops._OPERATORS}
    assert declared == set(arguments(Setting()))


def test_paged_attention_is_the_plans(given: Setting) -> None:
    out, lse = torch_ops.paged_attention(*arguments(given)["paged_attention"])
    want, want_lse = given.batch.attend(0, "f32")
    assert np.array_equal(bits_of(out), bits_of(want))
    assert np.array_equal(bits_of(lse), bits_of(want_lse))


def test_attend_layer_appends_then_attends() -> None:
    s, full = Setting(fill=False), Setting()
    old = [(seq, seq.context_len - seq.q_len) for seq in SEQUENCES]
    for row, (_, count) in enumerate(old):  # the tokens that were there before this step
        k, v = full.batch.new_kv(0)
        whole = Batch(SHAPE, [Sequence(SEQUENCES[row].content, count, count)])
        k, v = whole.new_kv(0)
        slots = ref.slots_of(
            s.batch.geometry, [0, count], [count], s.batch.block_table[row : row + 1]
        )
        ref.append_by_slots(s.batch.arena, s.batch.geometry, 0, k, v, slots)
    out = torch_ops.attend_layer(s.q, s.k, s.v, s.arena, s.step.id, 0)
    assert np.array_equal(bits_of(out), bits_of(full.batch.attend(0, "f32")[0]))


def test_out_may_be_the_callers_and_may_lie_apart(given: Setting) -> None:
    want = torch_ops.attend_layer(given.q, given.k, given.v, given.arena, given.step.id, 0)
    wide = torch.full((5, 4, 2 * 48), 7.0)
    for out in (torch.empty_like(want), torch.empty(9, 4, 48)[2:7], wide[:, :, :48]):
        args = (given.q, given.k, given.v, given.arena, out, given.step.id, 0)
        assert torch_ops.attend_layer_out(*args) is None
        assert torch.equal(out, want)
    assert (wide[:, :, 48:] == 7).all()


def test_append_by_slots_is_the_oracles(given: Setting) -> None:
    s = Setting(fill=False)
    torch_ops.append_kv(s.k, s.v, s.arena, s.pool.id, 1, s.slots)
    for row, seq in enumerate(SEQUENCES):
        k, v = ref.gather(
            s.batch.arena, s.batch.geometry, 1, s.batch.block_table[row], seq.context_len
        )
        rows = s.batch.rows_of(row)
        assert np.array_equal(k[-seq.q_len :], s.k[rows].double().numpy())
        assert np.array_equal(v[-seq.q_len :], s.v[rows].double().numpy())


def test_slices_come_back(given: Setting) -> None:
    page = int(given.batch.block_table[1, 0])
    k, v = torch.randn(16, 2, 32), torch.randn(16, 2, 48)
    torch_ops.pack_slice(k, v, given.arena, given.pool.id, page, 1, 0)
    got = torch_ops.unpack_slice(given.arena, given.pool.id, page, 1)
    assert torch.equal(got[0], k) and torch.equal(got[1], v)
    want = ref.read_slice(given.batch.arena, given.batch.geometry, page, 1)
    assert np.array_equal(want[0], k.numpy()) and np.array_equal(want[1], v.numpy())


def test_an_operator_works_in_the_bytes_it_was_given(given: Setting) -> None:
    """A clone of the arena is written, and read, instead of the pool's own memory."""
    before, clone = given.arena.clone(), given.arena.clone()
    k = given.k + 1
    out = torch_ops.attend_layer(given.q, k, given.v, clone, given.step.id, 0)
    assert torch.equal(given.arena, before) and not torch.equal(clone, before)
    again = torch_ops.paged_attention(given.q, clone, given.pool.id, 0, *given.tables, SHAPE.scale)[
        0
    ]
    assert np.array_equal(bits_of(out), bits_of(again))
    inside = torch_ops.attend_layer(given.q, k, given.v, given.arena, given.step.id, 0)
    assert np.array_equal(bits_of(out), bits_of(inside))


def test_strided_views_of_a_fused_projection(given: Setting) -> None:
    fused = torch.cat([given.q.flatten(1), given.k.flatten(1), given.v.flatten(1)], dim=1)
    q, k, v = fused.split([4 * 32, 2 * 32, 2 * 48], dim=1)
    views = q.unflatten(1, (4, 32)), k.unflatten(1, (2, 32)), v.unflatten(1, (2, 48))
    got = torch_ops.attend_layer(*views, given.arena, given.step.id, 0)
    want = torch_ops.attend_layer(given.q, given.k, given.v, given.arena, given.step.id, 0)
    assert np.array_equal(bits_of(got), bits_of(want))


class Decoder(torch.nn.Module):
    """Two layers of attention between linear maps, shaped like a decode step."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.step = setting.step.id
        self.qkv = torch.nn.ModuleList(
            torch.nn.Linear(64, 4 * 32 + 2 * 32 + 2 * 48) for _ in range(2)
        )
        self.out = torch.nn.ModuleList(torch.nn.Linear(4 * 48, 64) for _ in range(2))

    def forward(self, x: torch.Tensor, arena: torch.Tensor) -> torch.Tensor:
        for layer in range(2):
            q, k, v = self.qkv[layer](x).split([128, 64, 96], dim=1)
            y = torch_ops.attend_layer(
                q.unflatten(1, (4, 32)), k.unflatten(1, (2, 32)), v.unflatten(1, (2, 48)),
                arena, self.step, layer,
            )  # fmt: skip
            x = x + self.out[layer](y.flatten(1))
        return x


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_decode_step_compiles_into_one_graph(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "inductor" and shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("inductor needs a C++ compiler")
    eager, traced = Setting(), Setting()
    clones = []
    plain = ops._clone_of
    monkeypatch.setattr(ops, "_clone_of", lambda *a: clones.append(a) or plain(*a))
    x = torch.randn(5, 64)
    with torch.no_grad():
        want = Decoder(eager)(x, eager.arena)
        torch._dynamo.reset()
        model = torch.compile(Decoder(traced), fullgraph=True, backend=backend)
        got = model(x, traced.arena)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(kv_of(traced), kv_of(eager), rtol=1e-4, atol=1e-5)
    # Copying the arena would cost gigabytes a step: only aot_eager, a tool for debugging, may.
    assert backend == "aot_eager" or not clones


def kv_of(s: Setting) -> torch.Tensor:
    """All appended K and V, as the pool's own memory has them now."""
    found = []
    for layer in range(2):
        for row, seq in enumerate(SEQUENCES):
            k, v = ref.gather(
                s.batch.arena, s.batch.geometry, layer, s.batch.block_table[row], seq.context_len
            )
            found += [k.reshape(-1), v.reshape(-1)]
    return torch.from_numpy(np.concatenate(found))


def test_the_arena_keeps_its_pool_alive() -> None:
    batch = Batch(SHAPE, SEQUENCES)
    tensor = ops.arena(batch.pool)
    assert (
        tensor.data_ptr() == batch.pool.arena.address and tensor.numel() == batch.pool.arena.bytes
    )
    want = tensor.clone()
    del batch
    gc.collect()
    assert torch.equal(tensor, want)


def test_a_handle_ends_with_its_object(given: Setting) -> None:
    number = ops.register(given.batch.pool).id
    gc.collect()
    with pytest.raises(NotFound, match=f"pool={number}"):
        torch_ops.unpack_slice(given.arena, number, 0, 0)


@pytest.mark.parametrize(
    ("name", "index", "value", "message"),
    [
        ("attend_layer", 0, torch.ones(5, 4, 16), r"q has shape \[5, 4, 16\]: expected"),
        ("attend_layer", 0, torch.ones(4, 4, 32), "q has 4 tokens.*expected 5"),
        ("attend_layer", 1, torch.ones(5, 2, 32).double(), "k is torch.float64"),
        ("attend_layer", 2, torch.ones(5, 2, 48).half(), "v is torch.float16"),
        ("attend_layer", 3, torch.zeros(64, dtype=torch.uint8), r"arena is torch.uint8 \[64\]"),
        ("attend_layer", 5, 2, "layer=2"),
        ("attend_layer_out", 4, torch.ones(5, 4, 32), r"out is torch.float32 \[5, 4, 32\]"),
        ("attend_layer_out", 4, torch.ones(5, 4, 48).half(), "out is torch.float16"),
        ("append_kv", 5, torch.zeros(4, dtype=torch.int64), r"slot_mapping is torch.int64 \[4\]"),
        ("append_kv", 5, torch.full((5,), 1 << 40), "slot_mapping"),
        ("append_kv", 4, -1, "layer=-1"),
        ("paged_attention", 4, torch.tensor([0, 3, 4, 6]).int(), "q has 5 tokens: expected 6"),
        ("paged_attention", 5, torch.tensor([20, 5, 999], dtype=torch.int32), "context_lens"),
        ("paged_attention", 7, -1.0, "scale=-1"),
        ("unpack_slice", 2, 1 << 20, "page"),
        ("copy_pages", 3, torch.tensor([1 << 20]), "to=1048576"),
    ],
)  # fmt: skip
def test_errors_name_field_value_and_what_is_allowed(
    name: str, index: int, value: object, message: str, given: Setting
) -> None:
    args = list(arguments(given)[name])
    args[index] = value
    with pytest.raises(InvalidArgument, match=message):
        getattr(torch_ops, name)(*args)


def test_a_step_that_streams_refuses_a_copied_arena(given: Setting) -> None:
    class Streaming:
        pool, num_q_heads, num_tokens = given.batch.pool, 4, 5

        def run_ptr(self, *args: object) -> None:
            raise AssertionError("must not run")

    step = ops.register(Streaming())
    with pytest.raises(InvalidArgument, match="arena is a copy"):
        torch_ops.attend_layer(given.q, given.k, given.v, given.arena.clone(), step.id, 0)


def test_other_objects_cannot_be_registered() -> None:
    with pytest.raises(InvalidArgument, match="target is a dict"):
        ops.register({})


def test_call_overhead_stays_small() -> None:
    """One operator call around a tiny plan against the same plan called directly, the difference
    against an operator of the same schema that does nothing: what the dispatcher takes for itself.
    """
    shape = Shape(1, 1, 16, 16, 16, "f32", num_layers=1)
    batch = Batch(shape, [Sequence(1, 2, 1)])
    plan, arena = batch.plan(), ops.arena(batch.pool)
    step = ops.register(plan)
    q = torch.ones(1, 1, 16)
    out = torch.empty(1, 1, 16)
    p, o = q.data_ptr(), out.data_ptr()

    def fastest(call: object, rounds: int = 30) -> float:
        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            for _ in range(100):
                call()  # type: ignore[operator]
            times.append((time.perf_counter() - start) / 100)
        return min(times)

    library = torch.library.Library("kvcore_test", "DEF")
    schema = "(Tensor q, Tensor k, Tensor v, Tensor(a!) arena, int step, int layer) -> Tensor"
    library.define("nothing" + schema)
    library.impl("nothing", lambda q, *_: torch.empty_like(q), "CPU")
    nothing = torch.ops.kvcore_test.nothing
    calls = {
        "direct": lambda: plan.run_ptr(0, p, 16, p, 16, p, 16, o, 0, 0),
        "nothing": lambda: nothing(q, q, q, arena, step.id, 0),
        "through": lambda: torch_ops.attend_layer(q, q, q, arena, step.id, 0),
    }
    took = {name: fastest(call) for name, call in calls.items()}
    assert took["through"] - took["direct"] < 2 * took["nothing"], took


def test_dlpack_objects_go_into_kernels(given: Setting) -> None:
    """Anything with __dlpack__: here numpy arrays behind a wrapper that hides their type."""

    class Foreign:
        def __init__(self, array: np.ndarray) -> None:
            self.array, self.shape = array, array.shape

        def __dlpack__(self, **_: object) -> object:
            return self.array.__dlpack__()

        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

    out = np.empty((5, 4, 48), np.float32)
    given.plan.attend(0, Foreign(given.q.numpy()), Foreign(out))
    assert np.array_equal(bits_of(torch.from_numpy(out)), bits_of(given.batch.attend(0, "f32")[0]))
    kernels.append_kv(
        given.batch.pool, 1, Foreign(given.k.numpy()), Foreign(given.v.numpy()), given.slots
    )
