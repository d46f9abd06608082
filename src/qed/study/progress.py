"""A bar a run, drawn by the parent from the rows its workers write."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

from tqdm import tqdm


class Bars:
    """Progress of several run folders: training steps first, then evaluated examples."""

    def __init__(self, num_steps: int, num_examples: int) -> None:
        self._num_steps, self._num_examples = num_steps, num_examples
        self._bars: dict[Path, tuple[str, tqdm]] = {}
        self._seconds = 0.5 if sys.stderr.isatty() else 30.0

    def update(self, folders: Iterable[Path]) -> None:
        for folder in folders:
            if (folder / "train.json").exists():
                phase, done = "evaluate", _count_lines(folder / "niah.jsonl")
            else:
                phase, done = "train", _last_step(folder / "train.jsonl")
            bar = self._bar(folder, phase, done)
            bar.update(done - bar.n)

    def close(self, folders: Iterable[Path]) -> None:
        for folder in folders:
            if folder in self._bars:
                self._bars.pop(folder)[1].close()

    def _bar(self, folder: Path, phase: str, done: int) -> tqdm:
        shown, bar = self._bars.get(folder, ("", None))
        if bar is None or shown != phase:
            position = None
            if bar is not None:
                position = abs(bar.pos)
                bar.close()
            total, unit = (self._num_steps, "step") if phase == "train" else (self._num_examples, "example")
            bar = tqdm(
                total=total,
                initial=done,
                unit=unit,
                desc=f"{folder.name} {phase}",
                position=position,
                mininterval=self._seconds,
                leave=False,
                dynamic_ncols=True,
            )
            self._bars[folder] = phase, bar
        return bar


def _count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _last_step(path: Path) -> int:
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    for line in reversed(lines):
        row = json.loads(line)
        if "step" in row:
            return int(row["step"])
    return 0
