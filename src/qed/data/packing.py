"""Documents into rows of exactly N tokens, each row a function of (source, seed, its index)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from .corpus import Documents
from .vocabulary import seeded

Boundaries = Literal["concatenate", "reset"]
IGNORED = -100


@dataclass(frozen=True)
class Row:
    """``tokens`` and ``labels`` are int64 ``[N]``; ``starts`` are the offsets of the documents, the first one 0.

    Labels are not shifted (the model compares position t with label t + 1); ``IGNORED`` marks what is not trained on,
    the label of position 0 always, so that counting labels counts targets.
    """

    tokens: np.ndarray
    labels: np.ndarray
    starts: np.ndarray


class Rows(Protocol):
    """A fixed number of rows by index: the position in training is one integer."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...


def make_row(tokens: np.ndarray, starts: Sequence[int] | np.ndarray, boundaries: Boundaries) -> Row:
    """A row whose targets do not cross a document's start when documents are separated ("reset")."""
    labels = tokens.copy()
    labels[0] = IGNORED
    starts = np.asarray(starts, dtype=np.int64)
    if boundaries == "reset":
        labels[starts] = IGNORED
    return Row(tokens, labels, starts)


class GeneratedRows:
    """Rows of whole documents drawn from ``Documents``; the space that no document fits is filled with prose.

    Row i is drawn with a generator of (seed, i) at progress ``i / num_rows`` of the curriculum.
    """

    def __init__(
        self, documents: Documents, *, row_length: int, num_rows: int, seed: int, boundaries: Boundaries = "concatenate"
    ) -> None:
        if documents.smallest > row_length:
            raise ValueError(
                f"rows of {row_length} tokens hold no needle document; the smallest that always fits one has "
                f"{documents.smallest}"
            )
        self.documents, self.row_length, self.num_rows, self.seed = documents, row_length, num_rows, seed
        self.boundaries: Boundaries = boundaries

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < self.num_rows:
            raise IndexError(f"row {index} of {self.num_rows}")
        generator = seeded("row", self.seed, index)
        tokens: list[int] = []
        starts: list[int] = []
        ignored: list[int] = []
        while len(tokens) < self.row_length:
            start = len(tokens)
            document = self.documents.draw(generator, self.row_length - start, index / self.num_rows)
            starts.append(start)
            tokens += document.tokens
            if document.supervised is not None:
                kept = {at for first, last in document.supervised for at in range(first, last)}
                ignored += [start + at for at in range(len(document.tokens)) if at not in kept]
        row = make_row(np.asarray(tokens, dtype=np.int64), starts, self.boundaries)
        row.labels[ignored] = IGNORED
        return row


def offsets(rows: Sequence[Row]) -> np.ndarray:
    """``cu_seqlens`` of the rows laid end to end: int32, from 0 to all their tokens."""
    length = len(rows[0].tokens)
    starts = [row.starts + number * length for number, row in enumerate(rows)]
    return np.concatenate([*starts, [len(rows) * length]]).astype(np.int32)
