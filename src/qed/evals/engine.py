"""Answers to many prompts by one model: batches that fill the device, the model's calls measured once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .decode import batches, greedy, measure_calls, stop_tokens
from .graph import choose_decoder
from .memory import choose_rows


class Engine:
    """``rows``: prompts in one batch, ``None`` measures what fits the device at prompts of ``length`` tokens;
    ``chunk_tokens``: tokens of each prompt in one forward pass.

    Make it where the model's settings are those to evaluate: a captured decoding step keeps them.
    """

    def __init__(self, model: Any, tokenizer: Any, *, rows: int | None, chunk_tokens: int, length: int):
        self.model, self.chunk_tokens = model, chunk_tokens
        self.calls = measure_calls(model)
        self.rows = rows or choose_rows(model, self.calls, chunk_tokens, length)
        self.stop_ids = stop_tokens(model, tokenizer)
        self.decoder = choose_decoder(model)

    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int
    ) -> Iterator[tuple[list[int], list[list[int]]]]:
        """Batch by batch, the indices of its prompts and their continuations (see ``greedy``)."""
        lengths = list(map(len, prompts))
        for batch in batches(lengths, rows=self.rows, padding=self.calls.padding, chunk_tokens=self.chunk_tokens):
            yield (
                batch,
                greedy(
                    self.model,
                    self.calls,
                    [prompts[i] for i in batch],
                    max_new_tokens=max_new_tokens,
                    stop_ids=self.stop_ids,
                    chunk_tokens=self.chunk_tokens,
                    decoder=self.decoder,
                ),
            )

    def describe(self) -> dict[str, Any]:
        """For a record: how the model was run."""
        return {
            "cache": self.calls.cache,
            "chunks": self.calls.chunks,
            "padding": self.calls.padding,
            "graph": self.decoder is not None,
            "rows": self.rows,
            "chunk_tokens": self.chunk_tokens,
        }
