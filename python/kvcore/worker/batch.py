"""The arrays of one forward step, from scheduled rows."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvcore.worker.scheduler import Row


class BatchArrays(NamedTuple):
    """What model and kernels take; ``context_lens`` counts the new tokens too."""

    tokens: torch.Tensor  # int64 [num_tokens]
    positions: torch.Tensor  # int64 [num_tokens]
    logits_rows: torch.Tensor  # int64 [sampling rows]
    cu_seqlens_q: npt.NDArray[np.int32]  # [rows + 1]
    context_lens: npt.NDArray[np.int32]  # [rows]
    block_table: npt.NDArray[np.int32]  # [rows, max_pages]

    @classmethod
    def of(cls, rows: Rows[Row]) -> BatchArrays:
        spans = [(row.seq, row.start, row.start + row.count) for row in rows]
        cu_seqlens_q = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum([row.count for row in rows], out=cu_seqlens_q[1:])
        table = np.zeros((len(rows), max(row.seq.num_pages for row in rows)), dtype=np.int32)
        for i, row in enumerate(rows):
            table[i, : row.seq.num_pages] = row.seq.pages[: row.seq.num_pages]
        tokens = np.concatenate([seq.token_ids[start:end] for seq, start, end in spans])
        positions = np.concatenate([np.arange(start, end) for _, start, end in spans])
        last = [cu_seqlens_q[i + 1] - 1 for i, row in enumerate(rows) if row.samples]
        return cls(
            torch.from_numpy(tokens.astype(np.int64)),
            torch.from_numpy(positions),
            torch.tensor(last, dtype=torch.int64),
            cu_seqlens_q,
            np.array([end for _, _, end in spans], dtype=np.int32),
            table,
        )
