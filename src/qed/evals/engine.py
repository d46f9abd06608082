"""Answers to many prompts by one model: batches that fill the device, the model's calls measured once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tqdm.auto import tqdm

from .decode import batches, greedy, measure_calls, stop_tokens
from .graph import choose_decoder
from .memory import choose_rows


class Engine:
    """``rows``: prompts in one batch, ``None`` measures what fits the device at prompts of ``length`` tokens;
    ``chunk_tokens``: tokens of each prompt in one forward pass of ``rows`` prompts; fewer prompts are read in as many
    times longer chunks, so that the device stays as full.

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
        """Batch by batch, the indices of its prompts and their continuations (see ``greedy``).

        A batch that does not fit after all is halved, and so are those after it; a line says so.
        """
        waiting = self._batches(prompts, range(len(prompts)))
        while waiting:
            batch = waiting[0]
            try:
                generated = greedy(
                    self.model,
                    self.calls,
                    [prompts[i] for i in batch],
                    max_new_tokens=max_new_tokens,
                    stop_ids=self.stop_ids,
                    chunk_tokens=self.chunk_tokens * max(1, self.rows // len(batch)),
                    decoder=self.decoder,
                )
            except torch.OutOfMemoryError:
                if len(batch) == 1:
                    raise
                self.rows = len(batch) // 2
                tqdm.write(f"out of memory with {len(batch)} prompts at once; going on with {self.rows}")
                # The graphs' states and the failed batch's go with it.
                self.decoder = choose_decoder(self.model)
                waiting = self._batches(prompts, [i for left in waiting for i in left])
                continue
            yield batch, generated
            waiting = waiting[1:]

    def _batches(self, prompts: Sequence[Sequence[int]], indices: Sequence[int]) -> list[list[int]]:
        lengths = [len(prompts[i]) for i in indices]
        made = batches(lengths, rows=self.rows, padding=self.calls.padding, chunk_tokens=self.chunk_tokens)
        return [[indices[i] for i in batch] for batch in made]

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
