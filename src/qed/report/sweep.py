"""The strength sweep: accuracy when every trained strength is multiplied by s at inference, paired with s = 1."""

from __future__ import annotations

from typing import Any

from . import text
from .figures import crowded, figure
from .runs import Run
from .tables import table


def places(runs: list[Run]) -> list[tuple[str, int]]:
    """Tasks and lengths that some run was swept at."""
    return sorted(
        {(score["task"], score["length"]) for run in runs if run.strength for score in run.strength["scores"]}
    )


def scores(run: Run, task: str, length: int) -> list[dict[str, Any]]:
    """Scores of one run at one task and length, by rising s."""
    found = [one for one in (run.strength or {}).get("scores", []) if (one["task"], one["length"]) == (task, length)]
    return sorted(found, key=lambda one: one["strength"])


def comparisons(run: Run, task: str, length: int) -> dict[float, dict[str, Any]]:
    """Comparisons with s = 1 by s."""
    found = (run.strength or {}).get("comparisons", [])
    return {one["strength"]: one for one in found if (one["task"], one["length"]) == (task, length)}


def sweep_table(runs: list[Run], task: str, length: int) -> dict[str, Any]:
    rows = []
    families = set()
    for run in runs:
        paired = comparisons(run, task, length)
        for score in scores(run, task, length):
            test = paired.get(score["strength"], {})
            if test:
                families.add(test["family_size"])
            rows.append(
                {
                    "arm": text.arm_label(run.arm),
                    "seed": run.seed,
                    "strength": score["strength"],
                    "accuracy": [score["accuracy"], *score["wilson"]],
                    "num_examples": score["num_examples"],
                    "gained": test.get("n01"),
                    "lost": test.get("n10"),
                    "p": test.get("p"),
                    "p_holm": test.get("p_holm"),
                }
            )
    return table(
        f"Strength sweep: {text.task_label(task)} at {text.length_label(length)}",
        [
            ("arm", "arm", "text"),
            ("seed", "seed", "integer"),
            ("strength", "s", "number"),
            ("accuracy", "accuracy", "estimate"),
            ("num_examples", "examples", "integer"),
            ("gained", "right at s, wrong at 1", "integer"),
            ("lost", "wrong at s, right at 1", "integer"),
            ("p", "exact p", "p"),
            ("p_holm", "p, Holm", "p"),
        ],
        rows,
        caption="Trained strengths times s through prefill and decoding, weights fixed, the same examples for every "
        "s; exact McNemar test against s = 1, Holm-corrected over "
        f"{' or '.join(map(str, sorted(families))) or 'no'} comparisons of the run's sweep. s = 0 removes the "
        "correction from a trained model; it is not a GDN-2 that was trained as one.",
    )


def sweep_figure(runs: list[Run], task: str, length: int, paper: dict[str, Any] | None) -> dict[str, Any]:
    """Accuracy against s; ``paper``: the paper's sweep, given only where the setting is comparable."""
    series: list[dict[str, Any]] = []
    for seed in ("seed0", "seed1") if paper else ():
        series.append(
            {
                "label": f"QED, paper, seed {seed[-1]}",
                "arm": "qed",
                "seed": None,
                "role": "paper",
                "x": paper["s"],  # type: ignore[index]
                "y": paper[seed],  # type: ignore[index]
            }
        )
    for run in runs:
        found = scores(run, task, length)
        if found:
            series.append(
                {
                    "label": f"{text.arm_label(run.arm)}, seed {run.seed}",
                    "arm": run.arm,
                    "seed": run.seed,
                    "role": "run",
                    "x": [one["strength"] for one in found],
                    "y": [100 * one["accuracy"] for one in found],
                    "low": [100 * one["wilson"][0] for one in found],
                    "high": [100 * one["wilson"][1] for one in found],
                }
            )
    ticks = sorted({value for one in series for value in one["x"]})
    return figure(
        f"Strength sweep: {text.task_label(task)} at {text.length_label(length)}",
        "Accuracy of trained models when their strengths are multiplied by s at inference; "
        + ("intervals are in the table" if crowded(series) else "bars are 95 % Wilson intervals")
        + ", the trained model stands at s = 1."
        + (" Open diamonds: the paper's." if paper else ""),
        series,
        x={
            "label": "s, multiple of the trained strength",
            "scale": "linear",
            "ticks": ticks,
            "tick_labels": [text.number(tick) for tick in ticks],
        },
        y={"label": "accuracy, %", "scale": "linear", "range": [-3, 103], "ticks": [0, 25, 50, 75, 100]},
        marks=[{"x": 1, "label": "as trained"}],
    )
