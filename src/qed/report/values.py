"""From run folders to every number on the page: needle accuracy, paired comparisons, curves, usable context."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from qed import statistics

from . import text
from .runs import Run
from .tables import table

LEARNED = 0.95
THRESHOLDS = (0.5, 0.8)
CURVE_POINTS = 200


def outcomes(run: Run) -> dict[str, dict[int, dict[int, int]]]:
    """Outcomes of a run as task -> nominal length -> example index -> 0 or 1."""
    found: dict[str, dict[int, dict[int, int]]] = defaultdict(lambda: defaultdict(dict))
    for row in run.outcomes:
        found[row["task"]][row["length"]][row["index"]] = int(row["correct"])
    return {task: {length: found[task][length] for length in sorted(found[task])} for task in sorted(found)}


class Needle:
    """Needle accuracies of all runs, computed once and read by every table."""

    def __init__(self, runs: list[Run]) -> None:
        self.runs = runs
        self.by_run = {run.name: outcomes(run) for run in runs}
        self.tasks = sorted({task for tasks in self.by_run.values() for task in tasks})

    def lengths(self, task: str) -> list[int]:
        return sorted({length for tasks in self.by_run.values() for length in tasks.get(task, {})})

    def estimate(self, run: Run, task: str, length: int) -> list[float] | None:
        """Accuracy with its 95 % Wilson interval, or ``None`` where the run has no outcome."""
        scored = self.by_run[run.name].get(task, {}).get(length)
        if not scored:
            return None
        right = sum(scored.values())
        return [right / len(scored), *statistics.wilson(right, len(scored))]

    def at_training_length(self, run: Run) -> tuple[str, list[float]] | None:
        """Task and accuracy at the run's training length, for the first task tested there."""
        if run.train_length is None:
            return None
        for task in self.tasks:
            found = self.estimate(run, task, run.train_length)
            if found is not None:
                return task, found
        return None

    def learned(self, run: Run) -> bool | None:
        found = self.at_training_length(run)
        return None if found is None else found[1][0] >= LEARNED

    def extrapolation_length(self, task: str) -> int | None:
        """The tested length nearest to four times the training length (the paper's 8K to 2K), beyond the latter."""
        trained = max((run.train_length or 0 for run in self.runs), default=0)
        beyond = [length for length in self.lengths(task) if length > trained]
        return min(beyond, key=lambda length: abs(np.log2(length / (4 * trained)))) if trained and beyond else None

    def crossing(self, run: Run, task: str, threshold: float) -> float | None:
        """Length at which accuracy first falls to ``threshold``; ``None`` where that lies outside the tested "
        "lengths."""
        scored = self.by_run[run.name].get(task)
        if not scored:
            return None
        outcomes = {length: list(values.values()) for length, values in scored.items()}
        return statistics.usable_context(outcomes, threshold=threshold, seed=0, num_resamples=1).length

    def paired(self, first: Run, second: Run, task: str, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Outcomes of both runs on the examples that both have, in one order."""
        one = self.by_run[first.name].get(task, {}).get(length, {})
        two = self.by_run[second.name].get(task, {}).get(length, {})
        shared = sorted(one.keys() & two.keys())
        return np.array([one[index] for index in shared]), np.array([two[index] for index in shared])


def accuracy_table(needle: Needle, task: str) -> dict[str, Any]:
    lengths = needle.lengths(task)
    rows: list[dict[str, Any]] = []
    for run in needle.runs:
        if not needle.by_run[run.name].get(task):
            continue
        row: dict[str, Any] = {"arm": text.arm_label(run.arm), "seed": run.seed, "learned": needle.learned(run)}
        row |= {str(length): needle.estimate(run, task, length) for length in lengths}
        rows.append(row)
    counts = sorted({len(scored) for tasks in needle.by_run.values() for scored in tasks.get(task, {}).values()})
    return table(
        f"{text.task_label(task)}: accuracy by tested length",
        [
            ("arm", "arm", "text"),
            ("seed", "seed", "integer"),
            ("learned", "learned", "yes"),
            *((str(length), text.length_label(length), "estimate") for length in lengths),
        ],
        rows,
        caption=f"Percent of examples answered, with the 95 % Wilson interval; {_either(counts)} examples a length, "
        f"the same ones for every run. Learned: at least {100 * LEARNED:g} % at the training length.",
    )


def usable_context_table(needle: Needle, task: str) -> dict[str, Any] | None:
    lengths = needle.lengths(task)
    shortest, longest = text.integer(lengths[0]), text.integer(lengths[-1])

    def bound(length: float | None, status: str) -> str:
        if length is not None:
            return text.integer(length)
        return f"< {shortest}" if status == statistics.BELOW else f"> {longest}"

    rows: list[dict[str, Any]] = []
    for run in needle.runs:
        scored = needle.by_run[run.name].get(task)
        if not scored:
            continue
        row: dict[str, Any] = {"arm": text.arm_label(run.arm), "seed": run.seed}
        for threshold in THRESHOLDS:
            found = statistics.usable_context(
                {length: list(values.values()) for length, values in scored.items()}, threshold=threshold, seed=0
            )
            low, high = bound(found.low, found.low_status), bound(found.high, found.high_status)
            row[f"at_{threshold:g}"] = bound(found.length, found.status)
            row[f"interval_{threshold:g}"] = low if low == high else f"{low} to {high}"
        rows.append(row)
    if not rows:
        return None
    columns: list[tuple[str, str, str]] = [("arm", "arm", "text"), ("seed", "seed", "integer")]
    for threshold in THRESHOLDS:
        columns.append((f"at_{threshold:g}", f"falls to {100 * threshold:g} % at, tokens", "given"))
        columns.append((f"interval_{threshold:g}", "95 % interval", "given"))
    return table(
        f"{text.task_label(task)}: usable context",
        columns,
        rows,
        caption="Length at which accuracy first falls to the threshold, linear in the logarithm of length between "
        f"tested lengths; bootstrap interval over examples. < {shortest}: below the threshold at the shortest "
        f"tested length already; > {longest}: still above it at the longest.",
    )


def runs_table(needle: Needle) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for run in needle.runs:
        at = needle.at_training_length(run)
        rows.append(
            {
                "run": run.name,
                "commit": _short(run.lookup("commit")),
                "device": _device(run),
                "num_parameters": run.lookup("num_parameters"),
                "num_tokens": run.lookup("num_tokens"),
                "time_s": run.lookup("seconds"),
                "tokens_per_second": run.lookup("tokens_per_second"),
                "train_length": run.train_length,
                "final_loss": final_loss(run),
                "accuracy": at and at[1],
            }
        )
    return table(
        "The runs",
        [
            ("run", "run", "text"),
            ("accuracy", "accuracy at training length", "estimate"),
            ("final_loss", "last training loss, nats", "loss"),
            ("train_length", "training length", "integer"),
            ("num_parameters", "parameters", "count"),
            ("num_tokens", "tokens", "count"),
            ("time_s", "time", "duration"),
            ("tokens_per_second", "tokens a second", "count"),
            ("commit", "commit", "text"),
            ("device", "device", "text"),
        ],
        rows,
        caption="A dash stands where the run's records do not say.",
    )


def final_loss(run: Run) -> float | None:
    losses = [row["loss"] for row in run.log if isinstance(row.get("loss"), int | float)]
    return losses[-1] if losses else None


def thinned(count: int) -> list[int]:
    """At most ``CURVE_POINTS`` indices spread evenly over ``count``, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, CURVE_POINTS)).round().astype(int)).tolist()


def curve(run: Run, key: str) -> dict[str, list[float]] | None:
    """A logged quantity against tokens, thinned evenly to at most ``CURVE_POINTS`` and always with the last point."""
    rows = [row for row in run.log if isinstance(row.get(key), int | float)]
    if not rows:
        return None
    axis = "tokens" if all(isinstance(row.get("tokens"), int | float) for row in rows) else "step"
    chosen = thinned(len(rows))
    return {"axis": axis, "x": [rows[i].get(axis, i) for i in chosen], "y": [rows[i][key] for i in chosen]}  # type: ignore[dict-item]


def _device(run: Run) -> str | None:
    """The device's name; a CPU that is known by its architecture alone comes with the number of its cores."""
    device, platform = run.lookup("device"), run.lookup("platform")
    return platform if platform and device and device in platform else device


def _either(counts: list[int]) -> str:
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}" if counts else "no"


def _short(commit: str | None) -> str | None:
    if commit is None:
        return None
    digits, plus, changes = commit.partition("+")
    return digits[:10] + plus + changes
