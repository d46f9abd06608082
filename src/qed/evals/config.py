"""What the needle evaluation asks; importing it loads neither torch nor Transformers, so presets open quickly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..config import nearest
from ..data.needle import TASKS, NeedleConfig


@dataclass(frozen=True)
class NiahConfig:
    """What is asked of a model.

    ``tasks``: any of "niah_single_1", "niah_single_2", "niah_single_3"; ``lengths``: nominal lengths in tokens, the
    ``max_new_tokens`` of the answer included; ``num_examples``: examples for each task and length;
    ``max_new_tokens``: tokens generated and reserved for the answer (RULER: 128); ``seed``, ``fill``, ``split``,
    ``longest_word`` and ``essay`` as in ``NeedleConfig``; ``rows``: prompts in one batch, ``None`` measures what fits
    the device; ``chunk_tokens``: tokens of each prompt read in one forward pass.
    """

    tasks: tuple[str, ...] = ("niah_single_1",)
    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384, 32768)
    num_examples: int = 500
    max_new_tokens: int = 128
    seed: int = 0
    fill: Literal["ruler", "unit"] = "ruler"
    split: Literal["all", "train", "eval"] = "all"
    longest_word: int | None = None
    essay: str | None = None
    rows: int | None = None
    chunk_tokens: int = 512

    def __post_init__(self) -> None:
        for task in self.tasks:
            if task not in TASKS:
                raise ValueError(nearest("needle task", task, TASKS))
        if not self.tasks or not self.lengths or len(set(self.lengths)) < len(self.lengths):
            raise ValueError(f"need one task or more and different lengths; got {self.tasks} and {self.lengths}")
        for name in ("num_examples", "max_new_tokens", "rows", "chunk_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1; got {value}")

    def needle(self, task: str, length: int) -> NeedleConfig:
        return NeedleConfig(
            task=task,  # type: ignore[arg-type]
            length=length,
            num_answer_tokens=self.max_new_tokens,
            fill=self.fill,
            split=self.split,
            longest_word=self.longest_word,
            essay=self.essay,
        )
