"""Each claim of the paper as a sentence, the test that decides it, and what these runs say."""

from __future__ import annotations

import math
from typing import Any

from qed import statistics

from . import diagnostics, recall, sweep, text
from .comparisons import differences, pairs
from .runs import Run
from .tables import table
from .values import THRESHOLDS, Needle

SUPPORTED, CONTRADICTED, UNDECIDED = "supported", "contradicted", "not decided"
SAME_ACCURACY = 0.05
SAME_RECALL = 0.02
SAME_LOSS = 0.005
SMALL_CHANGE = 1e-3
MIN_SEEDS = 2


def claims_table(needle: Needle, comparable: bool) -> dict[str, Any]:
    """All claims, decided where the runs can decide them and otherwise with the reason why not."""
    task = needle.tasks[0] if needle.tasks else None
    rows = [
        *_needle_claims(needle, task),
        _usable_context(needle, task),
        *_recall_claims(needle.runs),
        _loss_claim(needle.runs),
        _strength_matters(needle.runs),
        _strength_grows(needle.runs),
        _projection_barely_matters(needle.runs),
    ]
    setting = (
        "The runs share the paper's model size, tokens and training length."
        if comparable
        else "The verdicts hold for the setting of these runs, which is not the paper's."
    )
    return table(
        "The paper's claims",
        [
            ("claim", "claim", "prose"),
            ("verdict", "verdict", "text"),
            ("result", "these runs", "prose"),
            ("paper", "in the paper", "prose"),
            ("test", "decided by", "prose"),
        ],
        rows,
        caption=f"{setting} Supported or contradicted only where a 95 % interval over at least {MIN_SEEDS} seeds, or "
        "an exact paired test in every swept model, says so. Pairs with a model that never learned the task "
        "are left out: they say nothing about extrapolation. Intervals are not corrected for the number of "
        "claims.",
    )


def _needle_claims(needle: Needle, task: str | None) -> list[dict[str, Any]]:
    length = needle.extrapolation_length(task) if task else None
    trained = max((run.train_length or 0 for run in needle.runs), default=0)
    at = f"at {text.length_label(length)}" if length else "past the training length"
    greater = "interval of the mean paired difference over seeds lies above zero; contradicted below zero"
    rows = [
        _interval_claim(
            needle,
            task,
            length,
            ("qed", "gdn2"),
            claim=f"QED finds the needle more often than GDN-2 past the training length ({at})",
            paper="+27.2 and +33.6 points at 8K, four times the training length",
            test=greater,
        ),
        _interval_claim(
            needle,
            task,
            trained or None,
            ("qed", "gdn2"),
            claim="At the training length QED costs nothing",
            paper="100.0 against 99.0, 99.6 against 95.6 % at 2K",
            test=f"interval of the mean paired difference over seeds lies above −{100 * SAME_ACCURACY:g} points; "
            "contradicted below it",
            margin=SAME_ACCURACY,
        ),
    ]
    for pair, claim, paper in (
        (("qed", "qed-rand"), "The query's direction matters: a random one does less", "+25.6 and +2.2 points at 8K"),
        (("qed", "qed-nogate"), "Gating the added direction helps", "+40.4 and −3.4 points at 8K"),
        (("qed-nogate", "qed-nogate-noproj"), "Projecting the ungated direction helps", "−39.8 and +70.4 points at 8K"),
        (("qed", "qed-noproj"), "Projecting the gated direction helps", "not tested"),
    ):
        rows.append(_interval_claim(needle, task, length, pair, claim=f"{claim} ({at})", paper=paper, test=greater))
    return rows


def _interval_claim(
    needle: Needle,
    task: str | None,
    length: int | None,
    pair: tuple[str, str],
    *,
    claim: str,
    paper: str,
    test: str,
    margin: float = 0.0,
) -> dict[str, Any]:
    arm, base = pair
    row = {"claim": claim, "paper": paper, "test": test, "verdict": UNDECIDED}
    found = differences(needle, task, length, arm, base) if task and length else []
    learned = [one for one in found if one["learned"] is not False]
    left_out = f"; {len(found) - len(learned)} left out, never learned" if len(learned) < len(found) else ""
    if not learned:
        names = f"{text.arm_label(arm)} and {text.arm_label(base)}"
        why = "both learned" if found else "were tested"
        return row | {"result": f"no seed in which {names} {why}"}
    return row | _decide(learned, margin, left_out)


def _decide(found: list[dict[str, Any]], margin: float, left_out: str = "") -> dict[str, Any]:
    """Result and verdict from paired differences, one a seed; with a ``margin`` the claim is "no worse than that"."""
    if len(found) < MIN_SEEDS:
        return {"result": f"{text.points(found[0]['difference'])} points in one seed{left_out}: an illustration"}
    pooled = statistics.pool_over_seeds([one["outcomes"] for one in found])
    low, high = pooled.low, pooled.high
    if low is None or high is None:
        raise AssertionError("pooling two seeds or more gives an interval")
    shown = text.cell([pooled.estimate, low, high], "difference")
    verdict = SUPPORTED if low > -margin else CONTRADICTED if high < -margin else UNDECIDED
    return {"result": f"{shown} points over {pooled.num_seeds} seeds{left_out}", "verdict": verdict}


def _usable_context(needle: Needle, task: str | None) -> dict[str, Any]:
    threshold = THRESHOLDS[0]
    row = {
        "claim": f"Usable context about doubles (length where accuracy falls to {100 * threshold:g} %)",
        "paper": "about two times, no threshold stated",
        "test": "interval over seeds of the ratio QED / GDN-2 (geometric mean, Student's t) holds 2 and lies above "
        "1; contradicted where it excludes 2",
        "verdict": UNDECIDED,
    }
    ratios, open_ended = [], 0
    by_seed = {(run.arm, run.seed): run for run in needle.runs}
    for (arm, seed), run in by_seed.items():
        base = by_seed.get(("gdn2", seed))
        if arm != "qed" or base is None or task is None:
            continue
        if needle.learned(run) is False or needle.learned(base) is False:
            continue
        lengths = [needle.crossing(one, task, threshold) for one in (run, base)]
        if any(length is None for length in lengths):
            open_ended += 1
        else:
            ratios.append(math.log(lengths[0] / lengths[1]))  # type: ignore[operator]
    missing = f"; {open_ended} without a crossing in the tested lengths" if open_ended else ""
    if len(ratios) < MIN_SEEDS:
        alone = f"{math.exp(ratios[0]):.2g} times in one seed" if ratios else "no seed in which both cross"
        return row | {"result": f"{alone}{missing}"}
    middle, low, high = (math.exp(value) for value in statistics.mean_interval(ratios))
    row["result"] = f"{middle:.2f} times [{low:.2f}, {high:.2f}] over {len(ratios)} seeds{missing}"
    if low > 1 and low <= 2 <= high:
        row["verdict"] = SUPPORTED
    elif not low <= 2 <= high:
        row["verdict"] = CONTRADICTED
    if open_ended:
        row["verdict"] = UNDECIDED
    return row


def _recall_claims(runs: list[Run]) -> list[dict[str, Any]]:
    rows = []
    for task, sentence, paper, margin in (
        ("fda", "QED recalls more on FDA", "+3.35 and +3.73 points", 0.0),
        ("swde", "QED recalls more on SWDE", "+2.43 and 0.00 points", 0.0),
        ("squad_completion", "QED recalls as much on SQuAD-completion", "−0.10 and −0.16 points", SAME_RECALL),
    ):
        beyond = f"−{100 * margin:g} points" if margin else "zero"
        row = {
            "claim": sentence,
            "paper": paper,
            "test": f"interval of the mean paired difference over seeds lies above {beyond}; contradicted below it",
            "verdict": UNDECIDED,
        }
        tested = recall.protocols(runs)
        found = recall.differences(runs, task, tested[-1], "qed", "gdn2") if tested else []
        rows.append(row | (_decide(found, margin) if found else {"result": "not measured for both arms of one seed"}))
    return rows


def _loss_claim(runs: list[Run]) -> dict[str, Any]:
    row = {
        "claim": "Validation loss stays the same",
        "paper": "+0.0005 and −0.0011 nats",
        "test": f"interval over seeds of the difference QED − GDN-2 lies within ±{SAME_LOSS:g} nats; contradicted "
        "outside",
        "verdict": UNDECIDED,
    }
    losses = [
        one.loss["loss"] - other.loss["loss"] for one, other in pairs(runs, "qed", "gdn2") if one.loss and other.loss
    ]
    if len(losses) < MIN_SEEDS:
        alone = (
            f"{_signed(losses[0])} nats in one seed: an illustration"
            if losses
            else "not measured for both arms of one seed"
        )
        return row | {"result": alone}
    middle, low, high = statistics.mean_interval(losses)
    row["result"] = f"{_signed(middle)} [{_signed(low)}, {_signed(high)}] nats over {len(losses)} seeds"
    if low > -SAME_LOSS and high < SAME_LOSS:
        row["verdict"] = SUPPORTED
    elif low > SAME_LOSS or high < -SAME_LOSS:
        row["verdict"] = CONTRADICTED
    return row


def _strength_matters(runs: list[Run]) -> dict[str, Any]:
    row = {
        "claim": "The trained correction is used at inference: accuracy falls when it is removed (s = 0)",
        "paper": "41.4 against 41.8 % (seed 0), 55.0 against 65.6 % (seed 1) at 16K, no paired counts",
        "test": "exact McNemar test of s = 0 against s = 1, Holm-corrected p below 0.05 in every swept model, at the "
        "longest swept length",
        "verdict": UNDECIDED,
    }
    found = []
    for run in runs:
        if run.arm != "qed" or not run.strength:
            continue
        task, length = sweep.places([run])[-1]
        test = sweep.comparisons(run, task, length).get(0.0)
        if test is not None:
            found.append((run, length, test))
    if not found:
        return row | {"result": "no strength sweep with s = 0"}
    changes = [test["difference"] for _, _, test in found]
    if len(found) > MIN_SEEDS:
        clear = sum(test["p_holm"] < 0.05 for _, _, test in found)
        row["result"] = (
            f"{len(found)} models: {text.points(min(changes))} to {text.points(max(changes))} points, {clear} of them "
            "with p below 0.05"
        )
    else:
        row["result"] = "; ".join(
            f"seed {run.seed} at {text.length_label(length)}: {text.points(test['difference'])} points, {test['n01']} "
            f"gained and {test['n10']} lost, p {_p(test['p_holm'])}"
            for run, length, test in found
        )
    decided = [test["difference"] for _, _, test in found if test["p_holm"] < 0.05]
    if len(decided) == len(found) >= MIN_SEEDS:
        if all(value < 0 for value in decided):
            row["verdict"] = SUPPORTED
        elif all(value > 0 for value in decided):
            row["verdict"] = CONTRADICTED
    return row


def _strength_grows(runs: list[Run]) -> dict[str, Any]:
    row = {
        "claim": "Training raises the strength above its start",
        "paper": "mean 0.101 and 0.120, from 0.0298",
        "test": "interval over seeds of the trained models' mean strength lies above the start; contradicted below",
        "verdict": UNDECIDED,
    }
    means, starts = [], set()
    for run in runs:
        strengths = (run.train or {}).get("lambda")
        if run.arm == "qed" and strengths:
            flat = [value for layer in strengths for value in layer]
            means.append(sum(flat) / len(flat))
            starts.add(initial_strength(run))
    if len(means) < MIN_SEEDS or len(starts) != 1:
        listed = ", ".join(f"{mean:.4f}" for mean in means) or "no trained strengths recorded"
        return row | {"result": listed}
    start = starts.pop()
    middle, low, high = statistics.mean_interval(means)
    row["result"] = f"{middle:.4f} [{low:.4f}, {high:.4f}] over {len(means)} seeds, from {start:.4f}"
    row["verdict"] = SUPPORTED if low > start else CONTRADICTED if high < start else UNDECIDED
    return row


def _projection_barely_matters(runs: list[Run]) -> dict[str, Any]:
    row = {
        "claim": "In models trained without projection, projecting changes the eigenvalue by less than "
        f"{SMALL_CHANGE:g}",
        "paper": "below 1e-3, statistic not stated; e in [−0.011, 0.985]",
        "test": "largest absolute change over all samples below it in every probed model; contradicted where even "
        "the mean is not",
        "verdict": UNDECIDED,
    }
    found = [
        (run, one)
        for run in runs
        if run.arm in ("qed-noproj", "qed-nogate-noproj")
        for one in diagnostics.summaries(run, "projection_change")
    ]
    if not found:
        return row | {"result": "no probe of a model without projection"}
    largest = [max(abs(one["min"]), abs(one["max"])) for _, one in found]
    means = [abs(one["mean"]) for _, one in found]
    row["result"] = (
        f"{len(found)} models: mean {text.number(min(means))} to {text.number(max(means))}, largest "
        f"{text.number(max(largest))}"
    )
    if max(largest) < SMALL_CHANGE:
        row["verdict"] = SUPPORTED
    elif min(means) >= SMALL_CHANGE:
        row["verdict"] = CONTRADICTED
    return row


def initial_strength(run: Run) -> float:
    """``lambda_max * sigmoid(theta_init)`` of a run, by its own configuration (the paper's: 0.25 and -2)."""
    top, theta = run.lookup("lambda_max"), run.lookup("theta_init")
    top, theta = 0.25 if top is None else top, -2.0 if theta is None else theta
    return top / (1 + math.exp(-theta))


def _signed(value: float) -> str:
    return f"{value:+.4f}".replace("-", text.MINUS)


def _p(value: float) -> str:
    shown = text.p_value(value)
    return shown if shown.startswith("<") else f"= {shown}"
