"""A model over one sequence whose sealed pages may be compressed: what accuracy is measured with.

The context is computed exactly, once. Then its full pages but the first are replaced by what a
table of formats makes of them, and a continuation is read over them, teacher-forced.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from kvcore import compress, kernels
from kvcore.model.calibration import PagedRun
from kvcore.model.loading import Model
from kvcore.pages import PageClass
from torch import Tensor

PAGE = 64
CODES = {
    torch.bfloat16: kernels.DTYPE_CODES["bfloat16"],
    torch.float32: kernels.DTYPE_CODES["float32"],
}
Table = Sequence[Sequence[tuple[str, str]]]


def decoded(fmt: str, part: str, rows: Tensor) -> Tensor:
    """``rows`` [..., page, dim] (contiguous), each page compressed and back; plain: as is."""
    if fmt in ("bf16", "f32"):
        return rows
    page, dim = rows.shape[-2:]
    count = rows.numel() // (page * dim)
    size = kernels.block_bytes(fmt, part, page, dim)
    blocks = np.empty(count * size, np.uint8)
    at, out = blocks.__array_interface__["data"][0], torch.empty_like(rows)
    step, code = page * dim, CODES[rows.dtype]
    kernels.encode_block_ptr(
        fmt, part, page, dim, rows.data_ptr(), dim, code, at, size, count, step, size
    )
    kernels.decode_block_ptr(
        fmt, part, page, dim, at, size, out.data_ptr(), dim, code, count, step, size
    )
    return out


class Context(PagedRun):
    """One context in pages, and the logits of its continuation over any version of them.

    Attributes:
        k, v: [layers, heads, pages, page, dim] of the compressible pages: full, not the first.
    """

    def __init__(
        self, model: Model, tokens: np.ndarray, length: int, path: str = "simulate"
    ) -> None:
        spare = 2 * (length // PAGE) if path == "kernel" else 0
        super().__init__(model, tokens, PAGE, spare)
        self.length, self.path = length, path
        self.prefill(length)
        self.pages = self.table[1 : length // PAGE]
        self.k, self.v = self.read(self.pages)
        self._made: dict[tuple[str, str], Tensor] = {}

    def _version(self, fmt: str, part: str) -> Tensor:
        if (fmt, part) not in self._made:
            self._made[fmt, part] = decoded(fmt, part, self.k if part == "k" else self.v)
        return self._made[fmt, part]

    def logits(self) -> Tensor:
        """float32 [continuation, vocabulary] over the pages as they are."""
        return self.forward(self.length, len(self.tokens))

    def over(self, table: Table) -> Tensor:
        """The continuation's logits when the pages hold what ``table`` keeps of them."""
        if self.path == "kernel":
            return self._over_sealed(table)
        k, v = torch.empty_like(self.k), torch.empty_like(self.v)
        for layer, heads in enumerate(table):
            for head, (k_format, v_format) in enumerate(heads):
                k[layer, head] = self._version(k_format, "k")[layer, head]
                v[layer, head] = self._version(v_format, "v")[layer, head]
        return self.over_values(k, v)

    def over_values(self, k: Tensor, v: Tensor) -> Tensor:
        """The same over given K and V, shaped as the attributes; over the exact ones later on."""
        self.write(self.pages, k, v)
        try:
            return self.logits()
        finally:
            self.write(self.pages, self.k, self.v)

    def _over_sealed(self, table: Table) -> Tensor:
        """The same by the attention kernels over pages that are sealed into the table's class."""
        sealed = self.pool.alloc(len(self.pages), run_pages=1)[: len(self.pages)]
        self.write(sealed, self.k, self.v)
        number = self.pool.add_class(PageClass(self.pool.spec, table))
        compress.seal_pages(self.pool, sealed, number)
        rest = self.table[self.length // PAGE :]
        try:
            return self.forward(self.length, len(self.tokens), [self.table[0], *sealed, *rest])
        finally:
            self.pool.decref(sealed)

    def over_pages(self, keep: Sequence[int]) -> Tensor:
        """The same with only the compressible pages ``keep`` (indexes), exact, and the first."""
        held = [self.table[0], *(self.pages[i] for i in keep)]
        rest = self.table[self.length // PAGE :]
        return self.forward(self.length, len(self.tokens), [*held, *rest], len(held) * PAGE)


def int4_per_token(rows: Tensor) -> Tensor:
    """The control: 4 bits, one scale and zero (f16) per token, nothing centred."""
    x = rows.float()
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    step = ((high - low) / 15).clamp_min(1e-6).half().float()
    low = low.half().float()
    return (((x - low) / step).round().clamp(0, 15) * step + low).to(rows.dtype)


@dataclass(frozen=True)
class Difference:
    """One context: mean KL (nats) to the exact run, difference of NLL, share of equal top-1."""

    kl: float
    dnll: float
    agreement: float


def difference(exact: Tensor, other: Tensor, labels: np.ndarray) -> Difference:
    """Of logits [rows, vocabulary]."""
    p, q = torch.log_softmax(exact.double(), -1), torch.log_softmax(other.double(), -1)
    index = torch.from_numpy(np.ascontiguousarray(labels))[:, None]
    return Difference(
        kl=float((p.exp() * (p - q)).sum(-1).mean()),
        dnll=float((p.gather(1, index) - q.gather(1, index)).mean()),
        agreement=float((p.argmax(-1) == q.argmax(-1)).double().mean()),
    )


# Student's t, 97.5 %, by degrees of freedom: two-sided 95 %, the stricter reading of a bound.
_T = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 15: 2.131}


def summary(found: Sequence[Difference]) -> dict[str, Any]:
    """Means over contexts, and the upper end of the 95 % interval of the mean dNLL."""
    dnll = np.array([d.dnll for d in found])
    n = len(found)
    spread = float(dnll.std(ddof=1)) / math.sqrt(n) if n > 1 else math.inf
    return {
        "kl": float(np.mean([d.kl for d in found])),
        "dnll": float(dnll.mean()),
        "dnll_upper": float(dnll.mean()) + _T.get(n - 1, 2.365 if n < 15 else 2.131) * spread,
        "agreement": float(np.mean([d.agreement for d in found])),
        "contexts": n,
    }
