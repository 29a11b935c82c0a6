"""The arrays of one forward step, filled from scheduled rows into buffers that are reused."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
import torch

from kvcore.worker.scheduler import Row


class BatchArrays:
    """Token, position and page arrays of one step, for up to ``max_rows`` rows.

    After ``fill``: ``tokens`` and ``positions`` int64 [num_tokens]; ``logits_rows`` int64 [sampling
    rows]; ``cu_seqlens_q`` int32 [rows + 1]; ``context_lens`` int32 [rows], with the new tokens;
    ``block_table`` int32 [rows, max_pages], contiguous. Valid until the next ``fill``.
    """

    def __init__(self, max_rows: int) -> None:
        self._cu = np.zeros(max_rows + 1, dtype=np.int32)
        self._context = np.zeros(max_rows, dtype=np.int32)
        self._table = np.zeros(0, dtype=np.int32)
        self._tokens = torch.empty(0, dtype=torch.int64)
        self._positions = torch.empty(0, dtype=torch.int64)

    def fill(self, rows: Rows[Row]) -> None:
        total = sum(row.count for row in rows)
        self._reserve(total)
        width = max(row.seq.num_pages for row in rows)
        if self._table.size < len(rows) * width:
            self._table = np.zeros(2 * len(rows) * width, dtype=np.int32)
        table = self._table[: len(rows) * width].reshape(len(rows), width)
        tokens, positions = self._tokens.numpy(), self._positions.numpy()
        last = []
        at = 0
        for i, row in enumerate(rows):
            end = row.start + row.count
            tokens[at : at + row.count] = row.seq.token_ids[row.start : end]
            positions[at : at + row.count] = np.arange(row.start, end)
            at += row.count
            self._cu[i + 1] = at
            self._context[i] = end
            table[i, : row.seq.num_pages] = row.seq.pages[: row.seq.num_pages]
            table[i, row.seq.num_pages :] = 0
            if row.samples:
                last.append(at - 1)
        self.tokens, self.positions = self._tokens[:total], self._positions[:total]
        self.logits_rows = torch.tensor(last, dtype=torch.int64)
        self.cu_seqlens_q = self._cu[: len(rows) + 1]
        self.context_lens = self._context[: len(rows)]
        self.block_table = table

    def _reserve(self, total: int) -> None:
        if self._tokens.numel() < total:
            self._tokens = torch.empty(total, dtype=torch.int64)
            self._positions = torch.empty(total, dtype=torch.int64)
