"""Which rows make which step, and how rows become a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from qed.train.config import TrainConfig

IGNORED = -100


class RowOrder:
    """Row index at every position of a run: a pure function of the seed, endless, one permutation a pass."""

    def __init__(self, num_rows: int, config: TrainConfig) -> None:
        if num_rows < 1:
            raise ValueError("the data set has no rows")
        self.num_rows, self.config = num_rows, config
        self._epoch, self._permutation = -1, torch.empty(0, dtype=torch.int64)

    def __getitem__(self, position: int) -> int:
        epoch, row = divmod(position, self.num_rows)
        if self.config.order == "sequential":
            return row
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + epoch)
            self._epoch, self._permutation = epoch, torch.randperm(self.num_rows, generator=generator)
        return int(self._permutation[row])


class MicroBatches(Sampler[list[int]]):
    """Row indices of this process's micro-batches, from step ``first_step`` to the last step of the run."""

    def __init__(
        self, num_rows: int, config: TrainConfig, *, rank: int = 0, num_processes: int = 1, first_step: int = 0
    ) -> None:
        self.order = RowOrder(num_rows, config)
        self.config, self.rank, self.num_processes, self.first_step = config, rank, num_processes, first_step
        self.accumulation = config.accumulation_steps(num_processes)

    def __len__(self) -> int:
        # The whole run's, whatever the first step: Trainer derives the number of steps from it.
        return self.config.num_steps * self.accumulation

    def __iter__(self) -> Iterator[list[int]]:
        rows = self.config.micro_batch_rows
        for step in range(self.first_step, self.config.num_steps):
            for micro in range(self.accumulation):
                start = step * self.config.batch_rows + (micro * self.num_processes + self.rank) * rows
                yield [self.order[position] for position in range(start, start + rows)]


def collate(rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Stack rows; rows with ``cu_seqlens`` are laid end to end in a batch of one, as the model wants packed documents.

    A packed document's first token is never a target: no position is trained to predict it from another document.
    """
    batch = {name: [torch.as_tensor(row[name], dtype=torch.int64) for row in rows] for name in ("input_ids", "labels")}
    if "cu_seqlens" not in rows[0]:
        return {name: torch.stack(tensors) for name, tensors in batch.items()}
    input_ids, labels = (torch.cat(batch[name])[None] for name in ("input_ids", "labels"))
    offsets, start = [torch.zeros(1, dtype=torch.int64)], 0
    for row, tokens in zip(rows, batch["input_ids"], strict=True):
        offsets.append(torch.as_tensor(row["cu_seqlens"], dtype=torch.int64)[1:] + start)
        start += len(tokens)
    cu_seqlens = torch.cat(offsets)
    labels[0, cu_seqlens[:-1]] = IGNORED
    return {"input_ids": input_ids, "labels": labels, "cu_seqlens": cu_seqlens}


def count_targets(labels: torch.Tensor) -> torch.Tensor:
    """Positions that carry a loss once labels are shifted by one."""
    return (labels[..., 1:] != IGNORED).sum()


def make_loader(dataset: Any, sampler: MicroBatches, *, pin_memory: bool) -> DataLoader:
    """A loader that reads ahead in workers and hands out pinned micro-batches."""
    config = sampler.config
    return DataLoader(
        dataset,
        batch_sampler=sampler,
        collate_fn=collate,
        num_workers=config.num_workers,
        prefetch_factor=config.prefetch_factor if config.num_workers else None,
        persistent_workers=False,
        pin_memory=pin_memory,
        # Its own generator: starting to read must not move the run's random state.
        generator=torch.Generator().manual_seed(config.seed),
    )
