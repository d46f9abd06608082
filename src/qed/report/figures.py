"""Figures as plain JSON: what to draw, read alike by the static drawing (``draw.py``) and by the page's script."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import text
from .runs import Run
from .values import CONTRASTS, Needle, curve

MEAN_FROM_SEEDS = 3


def figure(
    title: str,
    caption: str,
    series: list[dict[str, Any]],
    *,
    x: dict[str, Any],
    y: dict[str, Any],
    marks: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """A figure of lines and points.

    ``x``, ``y``: ``label``, ``scale`` ("linear", "log", "category"), where fixed ``ticks``, ``tick_labels``, ``range``.
    ``series``: ``label``, ``arm``, ``seed`` (or ``None``), ``role`` ("run", "mean", "curve" or "paper"), ``x``, ``y``;
    where known ``low``, ``high`` (ends of the interval) and ``faint`` (a run that never learned the task).
    ``marks``: vertical or horizontal reference lines, ``x`` or ``y`` with a ``label``.
    """
    series = [{**one, "arm_label": text.arm_label(one["arm"])} for one in series]
    return {"title": title, "caption": caption, "x": x, "y": y, "series": series, "marks": marks or []}


def accuracy_figure(needle: Needle, task: str, paper: dict[str, Any] | None) -> dict[str, Any]:
    """Accuracy against tested length: each seed with its intervals, the mean from three seeds on.

    ``paper``: the paper's accuracies by arm and seed, given only where the runs' setting is comparable.
    """
    lengths = needle.lengths(task)
    series: list[dict[str, Any]] = []
    if paper:
        for arm in sorted({run.arm for run in needle.runs} & paper.keys()):
            for seed, values in paper[arm].items():
                known = [
                    (length, value) for length, value in zip(paper["lengths"], values, strict=True) if value is not None
                ]
                series.append(
                    {
                        "label": f"{text.arm_label(arm)}, paper, {seed.replace('seed', 'seed ')}",
                        "arm": arm,
                        "seed": None,
                        "role": "paper",
                        "x": [length for length, _ in known],
                        "y": [value for _, value in known],
                    }
                )
    for run in needle.runs:
        found = [(length, needle.estimate(run, task, length)) for length in lengths]
        points = [(length, estimate) for length, estimate in found if estimate is not None]
        if points:
            series.append(
                {
                    "label": f"{text.arm_label(run.arm)}, seed {run.seed}",
                    "arm": run.arm,
                    "seed": run.seed,
                    "role": "run",
                    "faint": needle.learned(run) is False,
                    "x": [length for length, _ in points],
                    "y": [100 * estimate[0] for _, estimate in points],
                    "low": [100 * estimate[1] for _, estimate in points],
                    "high": [100 * estimate[2] for _, estimate in points],
                }
            )
    series += _means(series)
    trained = sorted({run.train_length for run in needle.runs if run.train_length is not None})
    ticks = sorted({*lengths, *(paper["lengths"] if paper else [])})
    failed = [run.name for run in needle.runs if needle.learned(run) is False]
    caption = "Each line is one trained model; bars are 95 % Wilson intervals over examples. "
    if any(one["role"] == "mean" for one in series):
        caption += "Heavy lines are means over seeds. "
    if failed:
        caption += "Dashed: never learned the task at the training length. "
    if paper:
        caption += "Open diamonds: the paper's own numbers. "
    if trained:
        caption += "Right of the vertical line the model reads more tokens than it was trained on."
    return figure(
        f"{text.task_label(task)} accuracy against length",
        caption.strip(),
        series,
        x={
            "label": "tested length, tokens",
            "scale": "log",
            "ticks": ticks,
            "tick_labels": [text.length_label(length) for length in ticks],
        },
        y={"label": "accuracy, %", "scale": "linear", "range": [-3, 103], "ticks": [0, 25, 50, 75, 100]},
        marks=[{"x": length, "label": f"training length {text.length_label(length)}"} for length in trained],
    )


def difference_figure(needle: Needle, task: str, pooled: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    """Differences of arms in points against length, one point a seed; ``pooled`` holds the tables over seeds by "
    "contrast."""
    lengths = needle.lengths(task)
    series: list[dict[str, Any]] = []
    for arm, base in CONTRASTS:
        second = {run.seed: run for run in needle.runs if run.arm == arm}
        label = f"{text.arm_label(arm)} − {text.arm_label(base)}"
        for run in needle.runs:
            if run.arm != base or run.seed not in second:
                continue
            points = []
            for length in lengths:
                first, other = needle.paired(run, second[run.seed], task, length)
                if len(first):
                    points.append((length, 100 * float(np.mean(other) - np.mean(first))))
            if points:
                faint = needle.learned(run) is False or needle.learned(second[run.seed]) is False
                series.append(
                    {
                        "label": f"{label}, seed {run.seed}",
                        "group": label,
                        "arm": base if arm == "qed" and base != "gdn2" else arm,
                        "seed": run.seed,
                        "role": "run",
                        "faint": faint,
                        "x": [length for length, _ in points],
                        "y": [value for _, value in points],
                    }
                )
        if f"{arm}-{base}" in pooled:
            rows = pooled[f"{arm}-{base}"]["rows"]
            series.append(
                {
                    "label": f"{label}, mean",
                    "group": label,
                    "arm": base if arm == "qed" and base != "gdn2" else arm,
                    "seed": None,
                    "role": "mean",
                    "x": [row["length"] for row in rows],
                    "y": [100 * row["difference"][0] for row in rows],
                    "low": [100 * row["difference"][1] for row in rows],
                    "high": [100 * row["difference"][2] for row in rows],
                }
            )
    if not series:
        return None
    caption = "Each thin line is one seed: both models were tested on the same examples. "
    if any(one["role"] == "mean" for one in series):
        caption += "Heavy lines are means over seeds with the 95 % interval over seeds. "
    if any(one.get("faint") for one in series):
        caption += "Dashed: one of the two models never learned the task. "
    reach = max(max(map(abs, [*one["y"], *one.get("low", []), *one.get("high", [])])) for one in series)
    reach = min(max(10.0, 1.1 * reach), 105.0)
    return figure(
        f"{text.task_label(task)}: differences between arms",
        caption + "Above zero the first-named arm answers more examples.",
        series,
        x={
            "label": "tested length, tokens",
            "scale": "log",
            "ticks": lengths,
            "tick_labels": [text.length_label(length) for length in lengths],
        },
        y={"label": "difference, percentage points", "scale": "linear", "range": [-reach, reach]},
        marks=[{"y": 0, "label": ""}],
    )


def curve_figure(
    runs: list[Run], key: str, title: str, label: str, caption: str, scale: str = "linear"
) -> dict[str, Any] | None:
    """A logged quantity of every run against tokens (or steps, where a log has no token count)."""
    series: list[dict[str, Any]] = []
    axes = set()
    for run in runs:
        found = curve(run, key)
        if found is not None:
            axes.add(found["axis"])
            series.append(
                {
                    "label": f"{text.arm_label(run.arm)}, seed {run.seed}",
                    "arm": run.arm,
                    "seed": run.seed,
                    "role": "curve",
                    "x": found["x"],
                    "y": found["y"],
                }
            )
    if not series:
        return None
    axis = "tokens" if axes == {"tokens"} else "steps" if axes == {"step"} else "tokens or steps"
    return figure(
        title, caption, series, x={"label": f"training {axis}", "scale": "linear"}, y={"label": label, "scale": scale}
    )


def _means(series: list[dict[str, Any]]) -> list[dict[str, Any]]:
    means = []
    for arm in dict.fromkeys(one["arm"] for one in series if one["role"] == "run"):
        runs = [one for one in series if one["arm"] == arm and one["role"] == "run"]
        if len(runs) < MEAN_FROM_SEEDS or any(one["x"] != runs[0]["x"] for one in runs):
            continue
        means.append(
            {
                "label": f"{text.arm_label(arm)}, mean of {len(runs)} seeds",
                "arm": arm,
                "seed": None,
                "role": "mean",
                "x": runs[0]["x"],
                "y": np.mean([one["y"] for one in runs], axis=0).tolist(),
            }
        )
    return means
