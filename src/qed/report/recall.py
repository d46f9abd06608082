"""Recall tasks and validation loss: tables, figures, and the differences of two arms."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import text
from .comparisons import pairs
from .figures import figure
from .runs import Run
from .tables import table


def differences(runs: list[Run], task: str, protocol: str, arm: str, base: str) -> list[dict[str, Any]]:
    """For each seed that both arms have: outcomes paired by row of the data set, and their mean difference."""
    found = []
    for one, other in pairs(runs, arm, base):
        first, second = _outcomes(other, task, protocol), _outcomes(one, task, protocol)
        shared = sorted(first.keys() & second.keys())
        if shared:
            outcomes = [first[i] for i in shared], [second[i] for i in shared]
            mean = float(np.mean(outcomes[1]) - np.mean(outcomes[0]))
            found.append({"seed": one.seed, "outcomes": outcomes, "difference": mean})
    return found


def protocols(runs: list[Run]) -> list[str]:
    return sorted({score["protocol"] for run in runs if run.recall for score in run.recall["scores"]})


def recall_table(runs: list[Run], protocol: str) -> dict[str, Any]:
    scored = [(run, _scores(run, protocol)) for run in runs]
    tasks = sorted({task for _, scores in scored for task in scores})
    rows = []
    sources = set()
    for run, scores in scored:
        if scores:
            sources.add(str((run.recall or {}).get("source")))
            row: dict[str, Any] = {"arm": text.arm_label(run.arm), "seed": run.seed}
            rows.append(row | {task: _estimate(scores[task]) for task in scores})
    return table(
        f"Recall, {_protocol(protocol)}",
        [
            ("arm", "arm", "text"),
            ("seed", "seed", "integer"),
            *((task, text.task_label(task), "estimate") for task in tasks),
        ],
        rows,
        caption="Percent of documents whose answer comes back, with the 95 % Wilson interval. Source of the "
        f"documents: {', '.join(sorted(sources))}. Short documents: recall, not extrapolation.",
    )


def recall_figure(runs: list[Run], protocol: str, paper: dict[str, Any] | None) -> dict[str, Any]:
    """The paper's Figure 3 redrawn; ``paper``: its accuracies, given only where setting and documents are "
    "comparable."""
    scored = [(run, _scores(run, protocol)) for run in runs]
    scored = [(run, scores) for run, scores in scored if scores]
    tasks = sorted({task for _, scores in scored for task in scores})
    series: list[dict[str, Any]] = []
    for index, (run, scores) in enumerate(scored):
        shift = 0.6 * ((index + 0.5) / len(scored) - 0.5)
        present = [task for task in tasks if task in scores]
        series.append(
            {
                "label": f"{text.arm_label(run.arm)}, seed {run.seed}",
                "arm": run.arm,
                "seed": run.seed,
                "role": "points",
                "x": [tasks.index(task) + shift for task in present],
                "y": [100 * scores[task]["accuracy"] for task in present],
                "low": [100 * scores[task]["wilson"][0] for task in present],
                "high": [100 * scores[task]["wilson"][1] for task in present],
                "hover": [
                    f"{text.task_label(task)}: {text.cell(_estimate(scores[task]), 'estimate')}" for task in present
                ],
            }
        )
    for arm in ("gdn2", "qed") if paper else ():
        for seed in ("seed0", "seed1"):
            known = [task for task in tasks if task in paper]  # type: ignore[operator]
            series.append(
                {
                    "label": f"{text.arm_label(arm)}, paper, seed {seed[-1]}",
                    "arm": arm,
                    "seed": None,
                    "role": "paper",
                    "x": [tasks.index(task) + (0.38 if arm == "qed" else 0.34) for task in known],
                    "y": [paper[task][arm][seed] for task in known],  # type: ignore[index]
                    "hover": [f"{text.task_label(task)}: {paper[task][arm][seed]}" for task in known],  # type: ignore[index]
                }
            )
    return figure(
        f"Recall, {_protocol(protocol)}",
        "Each point is one trained model; bars are 95 % Wilson intervals."
        + (" Open diamonds: the paper's two seeds." if paper else ""),
        series,
        x={
            "label": "",
            "scale": "linear",
            "ticks": list(range(len(tasks))),
            "tick_labels": [text.task_label(task) for task in tasks],
            "range": [-0.5, len(tasks) - 0.5],
        },
        y={"label": "accuracy, %", "scale": "linear"},
    )


def loss_table(runs: list[Run]) -> dict[str, Any] | None:
    rows = [
        {
            "arm": text.arm_label(run.arm),
            "seed": run.seed,
            "loss": run.loss["loss"],
            "num_targets": run.loss["num_targets"],
        }
        for run in runs
        if run.loss
    ]
    if not rows:
        return None
    lengths = sorted({run.loss["config"]["length"] for run in runs if run.loss})
    return table(
        "Validation loss",
        [
            ("arm", "arm", "text"),
            ("seed", "seed", "integer"),
            ("loss", "nats a token", "loss"),
            ("num_targets", "tokens", "count"),
        ],
        rows,
        caption=f"Windows of {' or '.join(text.integer(length) for length in lengths)} tokens, every token weighing "
        "the same.",
    )


def loss_figure(runs: list[Run]) -> dict[str, Any] | None:
    """Loss by position in the window, drawn at the middle of each bucket on a log scale."""
    series = []
    for run in runs:
        buckets = [one for one in (run.loss or {}).get("buckets", []) if one["loss"] is not None]
        if buckets:
            series.append(
                {
                    "label": f"{text.arm_label(run.arm)}, seed {run.seed}",
                    "arm": run.arm,
                    "seed": run.seed,
                    "role": "run",
                    "x": [float(np.sqrt(one["start"] * one["end"])) for one in buckets],
                    "y": [one["loss"] for one in buckets],
                }
            )
    if not series:
        return None
    edges = sorted(
        {edge for run in runs for one in (run.loss or {}).get("buckets", []) for edge in (one["start"], one["end"])}
    )
    return figure(
        "Validation loss by position",
        "Mean loss of the tokens that follow so many others, by bucket of position.",
        series,
        x={
            "label": "tokens before",
            "scale": "log",
            "ticks": edges,
            "tick_labels": [text.length_label(edge) for edge in edges],
        },
        y={"label": "loss, nats", "scale": "linear"},
    )


def _scores(run: Run, protocol: str) -> dict[str, dict[str, Any]]:
    return {one["task"]: one for one in (run.recall or {}).get("scores", []) if one["protocol"] == protocol}


def _estimate(score: dict[str, Any]) -> list[float]:
    return [score["accuracy"], *score["wilson"]]


def _outcomes(run: Run, task: str, protocol: str) -> dict[int, int]:
    return {
        row["index"]: int(row["correct"])
        for row in run.recall_rows
        if (row["task"], row["protocol"]) == (task, protocol)
    }


def _protocol(name: str) -> str:
    return {"whole": "whole documents", "window": "windows centred on the answer"}.get(name, name)
