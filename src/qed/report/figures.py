"""Figures as plain JSON: what to draw, read alike by the static drawing (``draw.py``) and by the page's script."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import text
from .comparisons import contrast_label, differences, pairs
from .runs import Run
from .values import Needle, curve, thinned

MEAN_FROM_SEEDS = 3
CROWDED_FROM_RUNS = 13


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
    where known ``low``, ``high`` (ends of the interval), ``faint`` (a run that never learned the task) and ``hover``
    (text for each point, where not its coordinates).
    ``marks``: vertical or horizontal reference lines, ``x`` or ``y`` with a ``label``.
    """
    series = [{**one, "arm_label": text.arm_label(one["arm"])} for one in series]
    spec = {"title": title, "caption": caption, "x": x, "y": y, "series": series, "marks": marks or []}
    return spec | {"crowded": crowded(series)}


def crowded(series: list[dict[str, Any]]) -> bool:
    """Whether so many runs are drawn that each is a faint line without its intervals."""
    return sum(one["role"] == "run" for one in series) >= CROWDED_FROM_RUNS


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
    marks = _training_marks(needle)
    ticks = sorted({*lengths, *(paper["lengths"] if paper else [])})
    failed = [run.name for run in needle.runs if needle.learned(run) is False]
    caption = "Each line is one trained model; bars are 95 % Wilson intervals over examples. "
    if crowded(series):
        caption = "Each thin line is one trained model; its intervals are in the table. "
    if any(one["role"] == "mean" for one in series):
        caption += "Heavy lines are means over seeds. "
    if failed:
        caption += "Dashed: never learned the task at the training length. "
    if paper:
        caption += "Open diamonds: the paper's own numbers. "
    if marks:
        caption += "Right of the vertical line the model reads more tokens than it was trained on."
    return figure(
        f"{text.task_label(task)} accuracy against length",
        caption.strip(),
        series,
        x=_length_axis(ticks),
        y={"label": "accuracy, %", "scale": "linear", "range": [-3, 103], "ticks": [0, 25, 50, 75, 100]},
        marks=marks,
    )


def difference_figure(
    needle: Needle, task: str, arm: str, base: str, pooled: dict[str, Any] | None
) -> dict[str, Any] | None:
    """One contrast in points against length, one line a seed; ``pooled`` is its table over seeds."""
    lengths = needle.lengths(task)
    series: list[dict[str, Any]] = []
    lines: dict[int, dict[str, Any]] = {}
    for length in lengths:
        for found in differences(needle, task, length, arm, base):
            seed = found["seed"]
            line = lines.setdefault(
                seed, {"label": f"seed {seed}", "arm": arm, "seed": seed, "role": "run", "x": [], "y": []}
            )
            line["faint"] = found["learned"] is False
            line["x"].append(length)
            line["y"].append(100 * found["difference"])
    series = [{**line, "group": "one seed"} for line in lines.values()]
    if pooled is not None:
        rows = pooled["rows"]
        series.append(
            {
                "label": f"mean of {rows[0]['num_seeds']} seeds",
                "group": "mean over seeds",
                "arm": arm,
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
    caption = f"Above zero {text.arm_label(arm)} answers more of the same examples. Thin lines: one seed each. "
    if pooled is not None:
        caption += "Heavy line: mean over seeds, bars the 95 % interval over seeds. "
    if any(one.get("faint") for one in series):
        caption += "Dashed: one of the two models never learned the task. "
    if _training_marks(needle):
        caption += "Dotted: the training length. "
    return figure(
        f"{text.task_label(task)}: {contrast_label(arm, base)}",
        caption.strip(),
        series,
        x=_length_axis(lengths),
        y={"label": "difference, points", "scale": "linear", "range": _around_zero(series)},
        marks=[{"y": 0, "label": ""}, *(mark | {"label": ""} for mark in _training_marks(needle))],
    )


def contrasts_figure(contrasts: dict[str, Any], paper: dict[str, Any] | None) -> dict[str, Any]:
    """The paper's Figure 2 redrawn: each contrast at one length, a point a seed; ``paper``: its points, if "
    "comparable."""
    names = list(dict.fromkeys((row["arm"], row["base"]) for row in contrasts["rows"]))
    series: list[dict[str, Any]] = []
    for position, (arm, base) in zip(range(len(names) - 1, -1, -1), names, strict=True):
        rows = [row for row in contrasts["rows"] if (row["arm"], row["base"]) == (arm, base)]
        label = contrast_label(arm, base)
        for index, row in enumerate(rows):
            shift = 0.4 * (0.5 - (index + 0.5) / len(rows))
            series.append(
                {
                    "label": f"{label}, seed {row['seed']}",
                    "group": "one seed",
                    "arm": arm,
                    "seed": row["seed"],
                    "role": "points",
                    "faint": row["learned"] is False,
                    "x": [100 * row["difference"]],
                    "y": [position + shift],
                    "hover": [f"{text.points(row['difference'])} points"],
                }
            )
        for value in (paper or {}).get(f"{arm.replace('-', '_')}-{base.replace('-', '_')}", []):
            series.append(
                {
                    "label": f"{label}, paper",
                    "arm": arm,
                    "seed": None,
                    "role": "paper",
                    "x": [value],
                    "y": [position - 0.3],
                    "hover": [f"{text.points(value / 100)} points"],
                }
            )
    labels = [contrast_label(arm, base).replace(f" {text.MINUS} ", f"\n{text.MINUS} ") for arm, base in reversed(names)]
    caption = "Each point is one seed. Right of zero the first-named arm answers more examples."
    if any(one.get("faint") for one in series):
        caption += " Crosses: one of the two models never learned the task."
    if paper:
        caption += " Open diamonds: the paper's two seeds."
    reach = _around_zero([{"y": one["x"]} for one in series])
    return figure(
        contrasts["title"],
        caption,
        series,
        x={"label": "difference, points", "scale": "linear", "range": reach},
        y={
            "label": "",
            "scale": "linear",
            "ticks": list(range(len(names))),
            "tick_labels": labels,
            "range": [-0.6, len(names) - 0.4],
        },
        marks=[{"x": 0, "label": "", "solid": True}],
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


def loss_difference_figure(runs: list[Run]) -> dict[str, Any] | None:
    """Logged training loss less that of GDN-2 with the same seed, at the token counts that both logs hold."""
    series: list[dict[str, Any]] = []
    for arm in dict.fromkeys(run.arm for run in runs if run.arm != "gdn2"):
        for pair in pairs(runs, arm, "gdn2"):
            losses = [{row["tokens"]: row["loss"] for row in run.log if _counted(row)} for run in pair]
            shared = sorted(losses[0].keys() & losses[1].keys())
            if len(shared) > 1:
                shared = [shared[i] for i in thinned(len(shared))]
                series.append(
                    {
                        "label": f"{text.arm_label(arm)}, seed {pair[0].seed}",
                        "arm": arm,
                        "seed": pair[0].seed,
                        "role": "curve",
                        "x": shared,
                        "y": [losses[0][x] - losses[1][x] for x in shared],
                    }
                )
    if not series:
        return None
    return figure(
        "Training loss less GDN-2's",
        "Differences of the logged steps between runs of one seed; below zero the arm's loss is the lower one.",
        series,
        x={"label": "training tokens", "scale": "linear"},
        y={"label": "difference, nats", "scale": "linear"},
        marks=[{"y": 0, "label": ""}],
    )


def _counted(row: dict[str, Any]) -> bool:
    return all(isinstance(row.get(key), int | float) for key in ("tokens", "loss"))


def _length_axis(lengths: list[int]) -> dict[str, Any]:
    labels = [text.length_label(length) for length in lengths]
    return {"label": "tested length, tokens", "scale": "log", "ticks": lengths, "tick_labels": labels}


def _training_marks(needle: Needle) -> list[dict[str, Any]]:
    lengths = sorted({run.train_length for run in needle.runs if run.train_length is not None})
    return [{"x": length, "label": f"training length {text.length_label(length)}"} for length in lengths]


def _around_zero(series: list[dict[str, Any]]) -> list[float]:
    values = [abs(value) for one in series for key in ("y", "low", "high") for value in one.get(key, [])]
    reach = min(max(10.0, 1.1 * max(values)), 105.0)
    return [-reach, reach]


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
