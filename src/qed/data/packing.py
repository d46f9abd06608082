"""Documents into rows of exactly N tokens; a row is a function of (source, seed, its index).

The classes are map-style data sets as they stand: ``len`` and rows by index, which ``qed.train`` takes, so the position
in training is one integer. Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np

from ..config import nearest
from .corpus import Documents
from .vocabulary import seeded

Boundaries = Literal["concatenate", "reset"]
Row = dict[str, np.ndarray]
IGNORED = -100


def make_row(tokens: np.ndarray, starts: Sequence[int] | np.ndarray, boundaries: Boundaries) -> Row:
    """``input_ids`` and ``labels``, int64 ``[N]``, of documents that begin at the offsets ``starts``.

    Labels are not shifted (a causal LM compares position t with label t + 1), and the first is ``IGNORED``, so that
    labels count targets. "reset" separates the documents: a document's first label is ``IGNORED`` (no target crosses
    the border) and ``cu_seqlens``, offsets from 0 to N, tells the model where to start from an empty state.
    """
    if boundaries not in ("concatenate", "reset"):
        raise ValueError(nearest("boundaries", boundaries, ("concatenate", "reset")))
    tokens = tokens.astype(np.int64)
    labels = tokens.copy()
    labels[0] = IGNORED
    if boundaries == "concatenate":
        return {"input_ids": tokens, "labels": labels}
    # a row that begins inside a document begins with the rest of it
    offsets = np.unique(np.concatenate([[0], np.asarray(starts, dtype=np.int64), [len(tokens)]]))
    labels[offsets[:-1]] = IGNORED
    return {"input_ids": tokens, "labels": labels, "cu_seqlens": offsets}


class GeneratedRows:
    """Rows of whole documents drawn from ``Documents``; the space that no document fits is filled with prose.

    Row i is drawn with a generator of (seed, i), at progress ``i / num_rows`` of the curriculum: read them in order.
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
        row = make_row(np.asarray(tokens), starts, self.boundaries)
        row["labels"][ignored] = IGNORED
        return row


class Stream(Protocol):
    """Token ids of many documents end to end: an array, or anything that has a length and can be sliced."""

    def __len__(self) -> int: ...

    def __getitem__(self, span: slice) -> np.ndarray: ...


class StreamRows:
    """Rows cut one after the other from a stream; what is left at the end is not used.

    ``separator``: the token that every document begins with, and that stands nowhere else.
    """

    def __init__(
        self, tokens: Stream, *, separator: int, row_length: int, boundaries: Boundaries = "concatenate"
    ) -> None:
        if len(tokens) < row_length:
            raise ValueError(f"{len(tokens)} tokens do not fill one row of {row_length}")
        self.tokens, self.separator, self.row_length = tokens, separator, row_length
        self.boundaries: Boundaries = boundaries

    def __len__(self) -> int:
        return len(self.tokens) // self.row_length

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        tokens = self.tokens[index * self.row_length : (index + 1) * self.row_length]
        return make_row(tokens, np.flatnonzero(tokens == self.separator), self.boundaries)
