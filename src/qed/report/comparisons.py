"""Two arms compared: example by example within a seed, and over seeds."""

from __future__ import annotations

from typing import Any

import numpy as np

from qed import statistics

from . import text
from .runs import Run
from .tables import table
from .values import Needle

CONTRASTS = (
    ("qed", "gdn2"),
    ("qed", "qed-rand"),
    ("qed", "qed-nogate"),
    ("qed", "qed-noproj"),
    ("qed-nogate", "qed-nogate-noproj"),
)


def contrast_label(arm: str, base: str) -> str:
    return f"{text.arm_label(arm)} {text.MINUS} {text.arm_label(base)}"


def pairs(runs: list[Run], arm: str, base: str) -> list[tuple[Run, Run]]:
    """Runs of ``arm`` and of ``base`` that share a seed."""
    second = {run.seed: run for run in runs if run.arm == base}
    return [(run, second[run.seed]) for run in runs if run.arm == arm and run.seed in second]


def both_learned(needle: Needle, first: Run, second: Run) -> bool | None:
    known = needle.learned(first), needle.learned(second)
    return None if None in known else all(known)


def differences(needle: Needle, task: str, length: int, arm: str, base: str) -> list[dict[str, Any]]:
    """For each seed that both arms have: the paired outcomes, their mean difference, and whether both learned."""
    found = []
    for one, other in pairs(needle.runs, arm, base):
        outcomes = needle.paired(other, one, task, length)
        if len(outcomes[0]):
            found.append(
                {
                    "seed": one.seed,
                    "outcomes": outcomes,
                    "difference": float(np.mean(outcomes[1]) - np.mean(outcomes[0])),
                    "learned": both_learned(needle, one, other),
                }
            )
    return found


def paired_table(needle: Needle, task: str, arm: str, base: str) -> dict[str, Any] | None:
    """Exact McNemar tests of two arms of one seed on the same examples, Holm-corrected over the table."""
    rows: list[dict[str, Any]] = []
    for length in needle.lengths(task):
        for found in differences(needle, task, length, arm, base):
            first, second = found["outcomes"]
            test = statistics.mcnemar(first, second)
            both = int((first & second).sum())
            rows.append(
                {
                    "length": length,
                    "seed": found["seed"],
                    "num_pairs": len(first),
                    "both": both,
                    "only_arm": test.n01,
                    "only_base": test.n10,
                    "neither": len(first) - both - test.n01 - test.n10,
                    "difference": found["difference"],
                    "p": test.p,
                    "learned": found["learned"],
                }
            )
    if not rows:
        return None
    for row, corrected in zip(rows, statistics.holm([row["p"] for row in rows]), strict=True):
        row["p_holm"] = corrected
    one, two = text.arm_label(arm), text.arm_label(base)
    return table(
        f"{text.task_label(task)}: {one} against {two}, example by example",
        [
            ("length", "length", "integer"),
            ("seed", "seed", "integer"),
            ("num_pairs", "pairs", "integer"),
            ("both", "both right", "integer"),
            ("only_arm", f"only {one}", "integer"),
            ("only_base", f"only {two}", "integer"),
            ("neither", "neither", "integer"),
            ("difference", "difference, points", "points"),
            ("p", "exact p", "p"),
            ("p_holm", "p, Holm", "p"),
            ("learned", "both learned", "yes"),
        ],
        rows,
        caption="Exact two-sided McNemar test of the examples that only one of the two answers. Holm's correction is "
        f"over the {len(rows)} tests of this table. A test compares two trained models; it says nothing about "
        "other seeds.",
    )


def pooled_table(needle: Needle, task: str, arm: str, base: str) -> dict[str, Any] | None:
    """The difference of two arms over seeds, seed as a random effect; needs two seeds that both arms have."""
    rows: list[dict[str, Any]] = []
    for length in needle.lengths(task):
        found = differences(needle, task, length, arm, base)
        if len(found) < 2:
            continue
        pooled = statistics.pool_over_seeds([one["outcomes"] for one in found])
        learned = [one["outcomes"] for one in found if one["learned"]]
        restricted = statistics.pool_over_seeds(learned) if len(learned) > 1 else None
        rows.append(
            {
                "length": length,
                "num_seeds": pooled.num_seeds,
                "ahead": sum(one["difference"] > 0 for one in found),
                "behind": sum(one["difference"] < 0 for one in found),
                "difference": [pooled.estimate, pooled.low, pooled.high],
                "p": pooled.p,
                "spread": pooled.between_seed_sd,
                "num_learned": len(learned),
                "difference_learned": restricted and [restricted.estimate, restricted.low, restricted.high],
            }
        )
    if not rows:
        return None
    for row, corrected in zip(rows, statistics.holm([row["p"] for row in rows]), strict=True):
        row["p_holm"] = corrected
    one, two = text.arm_label(arm), text.arm_label(base)
    columns = [
        ("length", "length", "integer"),
        ("num_seeds", "seeds", "integer"),
        ("ahead", f"{one} ahead", "integer"),
        ("behind", f"{two} ahead", "integer"),
        ("difference", "mean difference, points", "difference"),
        ("p", "p", "p"),
        ("p_holm", "p, Holm", "p"),
        ("spread", "spread between seeds, points", "percent"),
    ]
    caption = (
        "Mean over seeds of the paired difference with its 95 % interval, seed as a random effect (Student's t); "
        "Holm's correction is over the lengths."
    )
    if any(row["num_learned"] < row["num_seeds"] for row in rows):
        columns += [
            ("num_learned", "seeds where both learned", "integer"),
            ("difference_learned", "mean difference, both learned, points", "difference"),
        ]
        caption += (
            " All seeds count in the first columns, those that never learned the task too; the last two columns leave "
            "them out, which is a choice made after seeing the runs."
        )
    return table(f"{text.task_label(task)}: {one} minus {two}, over seeds", columns, rows, caption=caption)


def contrasts_table(needle: Needle, task: str, length: int) -> dict[str, Any] | None:
    """All contrasts at one length, each seed; ``None`` unless an arm beside gdn2 and qed took part."""
    rows = []
    for arm, base in CONTRASTS:
        for found in differences(needle, task, length, arm, base):
            row = {"contrast": contrast_label(arm, base), "arm": arm, "base": base, "seed": found["seed"]}
            rows.append(row | {"difference": found["difference"], "learned": found["learned"]})
    if not any((row["arm"], row["base"]) != CONTRASTS[0] for row in rows):
        return None
    return table(
        f"{text.task_label(task)}: contrasts at {text.length_label(length)}",
        [
            ("contrast", "contrast", "text"),
            ("seed", "seed", "integer"),
            ("difference", "difference, points", "points"),
            ("learned", "both learned", "yes"),
        ],
        rows,
        caption="Differences in points of accuracy between two arms of one seed, on the same examples.",
    )
