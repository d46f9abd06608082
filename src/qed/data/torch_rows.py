"""Rows as PyTorch batches: the only module of the room that needs torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from .packing import Boundaries, Row, Rows, offsets


class RowDataset(Dataset[Row]):
    """Rows by index, for a ``DataLoader`` whose ``collate_fn`` is a ``Collator``."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self.rows[index]


class Collator:
    """Batches for a causal LM: ``input_ids`` and unshifted ``labels``.

    "concatenate" gives ``[B, N]``. "reset" lays the rows end to end, ``[1, B * N]``, and adds ``cu_seqlens``, at whose
    offsets the model starts from an empty state.
    """

    def __init__(self, boundaries: Boundaries = "concatenate") -> None:
        self.boundaries = boundaries

    def __call__(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        tokens = torch.from_numpy(np.stack([row.tokens for row in rows]))
        labels = torch.from_numpy(np.stack([row.labels for row in rows]))
        if self.boundaries == "concatenate":
            return {"input_ids": tokens, "labels": labels}
        cu_seqlens = torch.from_numpy(offsets(rows))
        return {"input_ids": tokens.view(1, -1), "labels": labels.view(1, -1), "cu_seqlens": cu_seqlens}
