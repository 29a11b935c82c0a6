"""The one table of shapes and lengths that kernel tests run over."""

from __future__ import annotations

from support.batches import Sequence, Shape

# (query heads, KV heads): group sizes 1 to 71, multi-query, odd counts.
HEADS = [(28, 4), (40, 8), (12, 2), (71, 1), (32, 32), (48, 8), (24, 3), (9, 3), (1, 1), (16, 2)]
# (head_dim of K, head_dim of V)
DIMS = [(64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (256, 256), (192, 128), (16, 80)]
PAGE_SIZES = [16, 32, 64, 128]
FORMATS = ["bf16", "f16", "f32"]
DTYPES = ["bf16", "f16", "f32"]


def short_lengths(page: int) -> list[Sequence]:
    """Lengths around page boundaries, with one and with several rows, and rows that see nothing."""
    wanted = [
        (0, 0), (0, 3), (1, 1), (1, 4), (page - 1, 1), (page, 1), (page, page), (page + 1, 1),
        (page + 1, page + 1), (2 * page - 1, 3), (2 * page + 1, 7), (3 * page + 5, 2), (5, 8),
    ]  # fmt: skip
    return [Sequence(100 + i, context, q_len) for i, (context, q_len) in enumerate(wanted)]


def long_lengths() -> list[Sequence]:
    """Contexts over the kernels' 1,024-token segments, whose partial results must be merged."""
    wanted = [(1023, 1), (1024, 1), (1025, 2), (2048, 1), (2049, 3), (2700, 1)]
    return [Sequence(200 + i, context, q_len) for i, (context, q_len) in enumerate(wanted)]


def shapes() -> list[Shape]:
    """Every head pair, every pair of dims, every page size and every format, not their product."""
    found = []
    for i, (q, kv) in enumerate(HEADS):
        dk, dv = DIMS[i % len(DIMS)] if q < 32 else (64, 64)
        found.append(Shape(q, kv, dk, dv, PAGE_SIZES[i % 4], FORMATS[i % 3]))
    for i, (dk, dv) in enumerate(DIMS):
        for j, fmt in enumerate(FORMATS):
            found.append(Shape(6, 2, dk, dv, PAGE_SIZES[(i + j) % 4], fmt))
    for fmt in FORMATS:
        for page in PAGE_SIZES:
            found.append(Shape(3, 1, 64, 64, page, fmt))
        found.append(Shape(9, 3, 64, 64, 64, fmt, layout="canonical", extent_pages=2))
    return list(dict.fromkeys(found))


def name_of(shape: Shape) -> str:
    """Short id of a shape for test names."""
    dims = f"{shape.head_dim_k}x{shape.head_dim_v}"
    heads = f"{shape.num_q_heads}/{shape.num_kv_heads}"
    layout = "" if shape.layout == "packed" else "-" + shape.layout
    return f"{heads}x{dims}-p{shape.page_size}-{shape.fmt}{layout}"
