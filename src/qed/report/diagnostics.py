"""What the probes measured inside trained models: summaries, their course over layers and positions, the needle's read.

Of ``probe.json`` this reads ``summaries`` (rows of ``quantity``, ``layer``, ``head``, ``start`` and ``end`` with
``count``, ``mean``, ``min``, ``max``, ``quantiles``, and where measured ``histogram`` and ``shares``; a null group is
"all of it"), ``effects`` (the same fields for each way of removing the correction), ``attribution`` (how much of the
correction's effect acts at once and how much through the state), ``loss`` (with and without the correction) and
``needle`` (one read over positions). Any of them may be missing.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from . import text
from .figures import figure
from .runs import Run
from .tables import table
from .values import thinned

LABELS = {
    "e": "eigenvalue e = 1 − a·k",
    "projection_change": "change of e by projecting",
    "rho": "ρ = q·k",
    "content_norm": "size of the content found, |S·d|",
    "correction_share": "|λ ρ S·d| / |o|",
    "transition_norm": "largest singular value of M D",
    "amplification_1": "amplification over 1 token",
    "amplification_16": "amplification over 16 tokens",
    "amplification_256": "amplification over 256 tokens",
    "state_norm": "state norm",
    "effective_rank": "effective rank of the state",
    "strength": "strength λ",
    "gate": "erase gate b",
    "write_gate": "write gate w",
    "decay_rate": "decay rate −g, a token",
    "half_life": "half-life of a channel, tokens",
}
BY_POSITION = ("correction_share", "state_norm", "effective_rank")
BY_LAYER = ("strength", "transition_norm")
MOST_RUNS_LISTED = 6
EFFECT_MEASURES = {"relative": "|change of o| / |o|", "norm": "|change of o|"}
GROUPS = ("layer", "head", "start", "end")


def label(quantity: str) -> str:
    return LABELS.get(quantity, quantity)


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def summaries(run: Run, quantity: str | None = None, *, by: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Rows grouped by exactly ``by``, all quantities or one."""
    return [
        row
        for row in (run.probe or {}).get("summaries", [])
        if (quantity is None or row["quantity"] == quantity)
        and {name for name in GROUPS if row.get(name) is not None} == set(by)
    ]


def summary_table(runs: list[Run]) -> dict[str, Any] | None:
    """Every quantity over all of a model's samples; with many models one row an arm instead of one a model."""
    found: list[tuple[str, Run, dict[str, Any]]] = []
    for run in runs:
        found += [(label(row["quantity"]), run, row) for row in summaries(run)]
        for row in (run.probe or {}).get("effects", []):
            measure = EFFECT_MEASURES.get(row.get("measure", "relative"), row.get("measure"))
            found.append((f"{measure}, correction removed at {row['removed']}", run, row))
    if not found:
        return None
    order = list(dict.fromkeys(what for what, _, _ in found))
    shares = list(dict.fromkeys(name for _, _, row in found for name in row.get("shares", {})))
    columns = [("quantity", "quantity", "text"), ("arm", "arm", "text")]
    caption = "Over all layers, heads and positions of the probed tokens. "
    if len({run.name for _, run, _ in found}) <= MOST_RUNS_LISTED:
        quantiles = sorted({name for _, _, row in found for name in row.get("quantiles", {})}, key=float)
        rows = [_of_model(what, run, row) for what, run, row in found]
        columns += [("seed", "seed", "integer"), ("count", "samples", "count"), ("mean", "mean", "number")]
        columns.append(("min", "min", "number"))
        columns += [(f"q{name}", f"{100 * float(name):g} %", "number") for name in quantiles]
        columns.append(("max", "max", "number"))
        caption += "Columns in percent are quantiles. "
    else:
        arms = list(dict.fromkeys(run.arm for _, run, _ in found))
        groups = {
            (what, arm): [row for other, run, row in found if (other, run.arm) == (what, arm)]
            for what in order
            for arm in arms
        }
        rows = [_of_arm(what, arm, group) for (what, arm), group in groups.items() if group]
        columns += [("num_models", "models", "integer"), ("count", "samples", "count"), ("mean", "mean", "number")]
        columns += [("means", "means of the models", "range"), ("min", "min", "number"), ("max", "max", "number")]
        caption += "The mean is over models, each weighing the same; minimum and maximum are over all their samples. "
    columns += [(f"share {name}", f"{name}, % of samples", "percent") for name in shares]
    rows.sort(key=lambda row: order.index(row["quantity"]))
    caption += "An eigenvalue bounds nothing by itself: norms and amplification stand beside it."
    return table("Inside the trained models", columns, rows, caption=caption)


def _of_model(what: str, run: Run, row: dict[str, Any]) -> dict[str, Any]:
    shown: dict[str, Any] = {"quantity": what, "arm": text.arm_label(run.arm), "seed": run.seed}
    shown |= {name: row.get(name) for name in ("count", "mean", "min", "max")}
    shown |= {f"q{name}": value for name, value in row.get("quantiles", {}).items()}
    return shown | {f"share {name}": value for name, value in row.get("shares", {}).items()}


def _of_arm(what: str, arm: str, group: list[dict[str, Any]]) -> dict[str, Any]:
    means = [row["mean"] for row in group]
    count = sum(row["count"] for row in group)
    shown: dict[str, Any] = {"quantity": what, "arm": text.arm_label(arm), "num_models": len(group), "count": count}
    shown |= {"mean": sum(means) / len(means), "means": [min(means), max(means)]}
    shown |= {"min": min(row["min"] for row in group), "max": max(row["max"] for row in group)}
    names = {name for row in group for name in row.get("shares", {})}
    return shown | {f"share {name}": sum(row["shares"][name] * row["count"] for row in group) / count for name in names}


def attribution(run: Run, *, by: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    return [
        row
        for row in (run.probe or {}).get("attribution", [])
        if {name for name in GROUPS if row.get(name) is not None} == set(by)
    ]


def attribution_table(runs: list[Run]) -> dict[str, Any] | None:
    """The paper's two readings told apart: the correction's effect at its own step and through the state."""
    rows = []
    for run in runs:
        for row in attribution(run):
            loss = (run.probe or {}).get("loss", {})
            rows.append(
                {
                    "arm": text.arm_label(run.arm),
                    "seed": run.seed,
                    "this_step": row["rms_this_step_over_output"],
                    "earlier_steps": row["rms_earlier_steps_over_output"],
                    "all_steps": row["rms_all_steps_over_output"],
                    "share_this_step": row["share_this_step"],
                    "share_through_state": row["share_through_state"],
                    "loss": loss.get("as_trained"),
                    "loss_without": loss.get("without"),
                }
            )
    if not rows:
        return None
    return table(
        "Where the correction acts",
        [
            ("arm", "arm", "text"),
            ("seed", "seed", "integer"),
            ("this_step", "changed by this step's, % of |o|", "percent"),
            ("earlier_steps", "by earlier steps', % of |o|", "percent"),
            ("all_steps", "by all, % of |o|", "percent"),
            ("share_this_step", "share at its own step, %", "percent"),
            ("share_through_state", "share through the state, %", "percent"),
            ("loss", "loss, nats", "loss"),
            ("loss_without", "loss without correction", "loss"),
        ],
        rows,
        caption="The same tokens with the correction removed at this step only, at all earlier steps only, and at "
        "all steps; root mean squares over tokens and heads, each layer's inputs held fixed. The two shares "
        "add up to the whole effect and one of them may be negative. The loss without the correction is of "
        "the trained model with all strengths 0, which is not a GDN-2 that was trained as one.",
    )


def attribution_figure(runs: list[Run]) -> dict[str, Any] | None:
    """Share of the correction's effect that acts through the state, by position."""
    found = [(run, attribution(run, by=("start", "end"))) for run in runs]
    points = [
        (run, [(row, 100 * row["share_through_state"]) for row in rows if row["share_through_state"] is not None])
        for run, rows in found
    ]
    return _by_position(
        [(run, [row for row, _ in kept], [value for _, value in kept]) for run, kept in points if kept],
        "Share of the correction that acts through the state",
        "The rest acts at the correction's own step. One line a model.",
        "through the state, %",
    )


def course_figure(runs: list[Run], quantity: str, axis: str) -> dict[str, Any] | None:
    """A quantity's mean by ``axis``: "layer" or "position" (middle of each bucket, log scale)."""
    title, caption = f"{_capital(label(quantity))}, by {axis}", "Mean over heads and probed tokens, one line a model."
    if axis == "position":
        found = [
            (run, sorted(summaries(run, quantity, by=("start", "end")), key=lambda row: row["start"])) for run in runs
        ]
        return _by_position(
            [(run, rows, [row["mean"] for row in rows]) for run, rows in found if rows], title, caption, label(quantity)
        )
    series = []
    for run in runs:
        rows = sorted(summaries(run, quantity, by=("layer",)), key=lambda row: row["layer"])
        # An arm without a correction has a strength of 0 everywhere: nothing to see.
        if any(row["mean"] for row in rows):
            series.append(_line(run, [row["layer"] for row in rows], [row["mean"] for row in rows]))
    if not series:
        return None
    ticks = sorted({value for one in series for value in one["x"]})
    return figure(
        title,
        caption,
        series,
        x={"label": "layer", "scale": "linear", "ticks": ticks, "tick_labels": [str(tick) for tick in ticks]},
        y={"label": label(quantity), "scale": "linear"},
    )


def _by_position(
    found: list[tuple[Run, list[dict[str, Any]], list[float]]], title: str, caption: str, name: str
) -> dict[str, Any] | None:
    """Lines over buckets of position (their ``start`` and ``end``), the training length marked."""
    if not found:
        return None
    series = []
    for run, rows, values in found:
        middles = [float(np.sqrt(max(row["start"], row["end"] / 4) * row["end"])) for row in rows]
        series.append(_line(run, middles, values))
    edges = sorted({row["end"] for _, rows, _ in found for row in rows})
    trained = sorted({run.train_length for run, _, _ in found if run.train_length is not None})
    return figure(
        title,
        caption,
        series,
        x={
            "label": "position, tokens",
            "scale": "log",
            "ticks": edges,
            "tick_labels": [text.length_label(edge) for edge in edges],
        },
        y={"label": name, "scale": "linear"},
        marks=[{"x": length, "label": f"training length {text.length_label(length)}"} for length in trained],
    )


def _line(run: Run, x: list[float], y: list[float]) -> dict[str, Any]:
    name = f"{text.arm_label(run.arm)}, seed {run.seed}"
    return {"label": name, "arm": run.arm, "seed": run.seed, "role": "run", "x": x, "y": y}


def histogram_figure(runs: list[Run], quantity: str) -> dict[str, Any] | None:
    """Share of samples by value, one line a model."""
    series: list[dict[str, Any]] = []
    for run in runs:
        for row in summaries(run, quantity):
            counts, edges = row.get("histogram", {}).get("counts"), row.get("histogram", {}).get("edges")
            if not counts or not sum(counts):
                continue
            series.append(
                {
                    "label": f"{text.arm_label(run.arm)}, seed {run.seed}",
                    "arm": run.arm,
                    "seed": run.seed,
                    "role": "curve",
                    "x": [(low + high) / 2 for low, high in pairwise(edges)],
                    "y": [100 * one / sum(counts) for one in counts],
                }
            )
    if not series:
        return None
    lowest, highest = min(one["x"][0] for one in series), max(one["x"][-1] for one in series)
    return figure(
        f"{_capital(label(quantity))}: distribution",
        "Share of samples in each bin, one line a model.",
        series,
        x={"label": label(quantity), "scale": "linear", "range": [lowest, highest]},
        y={"label": "% of samples", "scale": "linear"},
    )


def needle_figure(runs: list[Run]) -> dict[str, Any] | None:
    """What the state holds of the needle after each token, every probed model in one picture."""
    series: list[dict[str, Any]] = []
    marks: dict[int, dict[str, Any]] = {}
    what = set()
    for run in runs:
        read = (run.probe or {}).get("needle")
        if not read:
            continue
        shown = thinned(len(read["position"]))
        what.add(read.get("quantity", "read of the needle's key"))
        marks[read["needle_end"]] = {"x": read["needle_end"], "label": "needle ends"}
        series.append(
            {
                "label": f"{text.arm_label(run.arm)}, seed {run.seed}",
                "arm": run.arm,
                "seed": run.seed,
                "role": "curve",
                "x": [read["position"][i] for i in shown],
                "y": [read["read"][i] for i in shown],
            }
        )
    if not series:
        return None
    name = " / ".join(sorted(what))
    return figure(
        "What the state holds of the needle",
        f"{_capital(name)} after each token of one example: it rises when the needle is read; what is left at the end "
        "is what the question can find.",
        series,
        x={"label": "position, tokens", "scale": "linear"},
        y={"label": name, "scale": "linear"},
        marks=[marks[end] for end in sorted(marks)],
    )
