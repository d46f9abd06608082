"""A bar a run, drawn by the parent from the rows its workers write."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

from tqdm import tqdm


class Bars:
    """Progress of several run folders: training steps first, then evaluated examples; and how many runs still wait."""

    def __init__(self, num_steps: int, num_examples: int) -> None:
        self._num_steps, self._num_examples = num_steps, num_examples
        self._bars: dict[Path, tqdm] = {}
        self._phases: dict[Path, str] = {}
        self._waiting: tqdm | None = None
        self._seconds = 0.5 if sys.stderr.isatty() else 30.0

    def update(self, folders: Iterable[Path], *, num_waiting: int = 0) -> None:
        """``folders``: those that run now."""
        self._show_waiting(num_waiting)
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
                self._bars.pop(folder).close()

    def end(self) -> None:
        """Leave no line behind."""
        self.close(list(self._bars))
        self._show_waiting(0)

    def _show_waiting(self, num_waiting: int) -> None:
        if num_waiting:
            if self._waiting is None:
                self._waiting = tqdm(bar_format="{desc}", leave=False)
            if self._waiting.desc != (text := f"{num_waiting} more to run"):
                self._waiting.set_description_str(text)
        elif self._waiting is not None:
            self._waiting.close()
            self._waiting = None

    def _bar(self, folder: Path, phase: str, done: int) -> tqdm:
        if folder not in self._bars:
            self._bars[folder] = tqdm(mininterval=self._seconds, leave=False, dynamic_ncols=True)
            self._phases[folder] = ""
        bar = self._bars[folder]
        if self._phases[folder] != phase:
            self._phases[folder] = phase
            total, bar.unit = (self._num_steps, "step") if phase == "train" else (self._num_examples, "example")
            bar.set_description_str(f"{folder.name} {phase}", refresh=False)
            bar.initial = 0
            bar.reset(total)
            # What an earlier process did is shown as done, and does not count in the rate.
            bar.initial = bar.n = bar.last_print_n = done
            bar.refresh()
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
