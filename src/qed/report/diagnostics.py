"""What the probes measured inside trained models: summaries, their course over layers and positions, the needle's read.

``probe.json`` holds ``summaries``: rows of ``quantity``, ``layer``, ``head``, ``start``, ``end`` with ``count``,
``mean``, ``min``, ``max``, ``quantiles``, and where measured ``histogram`` and ``shares``; a group that is null is "all
of it". ``effects``: the same summary fields for each way of removing the correction. ``needle``: a read over positions.
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
    "half_life": "half-life of a channel, tokens",
}
BY_POSITION = ("state_norm", "effective_rank", "correction_share", "e")
BY_LAYER = ("strength", "correction_share", "transition_norm", "e")
GROUPS = ("layer", "head", "start", "end")


def label(quantity: str) -> str:
    return LABELS.get(quantity, quantity)


def summaries(run: Run, quantity: str | None = None, *, by: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Rows grouped by exactly ``by``, all quantities or one."""
    return [
        row
        for row in (run.probe or {}).get("summaries", [])
        if (quantity is None or row["quantity"] == quantity)
        and {name for name in GROUPS if row.get(name) is not None} == set(by)
    ]


def summary_table(runs: list[Run]) -> dict[str, Any] | None:
    found = [(run, row, label(row["quantity"])) for run in runs for row in summaries(run)]
    found += [
        (run, row, f"output changed by removing the correction at {row['removed']}")
        for run in runs
        for row in (run.probe or {}).get("effects", [])
    ]
    if not found:
        return None
    quantiles = sorted({name for _, row, _ in found for name in row.get("quantiles", {})}, key=float)
    shares = list(dict.fromkeys(name for _, row, _ in found for name in row.get("shares", {})))
    rows = []
    for run, row, what in found:
        shown: dict[str, Any] = {"quantity": what, "arm": text.arm_label(run.arm), "seed": run.seed}
        shown |= {name: row.get(name) for name in ("count", "mean", "min", "max")}
        shown |= {f"q{name}": value for name, value in row.get("quantiles", {}).items()}
        rows.append(shown | {f"share {name}": value for name, value in row.get("shares", {}).items()})
    order = list(dict.fromkeys(what for _, _, what in found))
    rows.sort(key=lambda row: order.index(row["quantity"]))
    return table(
        "Inside the trained models",
        [
            ("quantity", "quantity", "text"),
            ("arm", "arm", "text"),
            ("seed", "seed", "integer"),
            ("count", "samples", "count"),
            ("mean", "mean", "number"),
            ("min", "min", "number"),
            *((f"q{name}", f"{100 * float(name):g} %", "number") for name in quantiles),
            ("max", "max", "number"),
            *((f"share {name}", f"{name}, % of samples", "percent") for name in shares),
        ],
        rows,
        caption="Over all layers, heads and positions of the probed tokens; columns in percent are quantiles. The "
        "eigenvalue bounds nothing by itself: norms and amplification stand beside it.",
    )


def course_figure(runs: list[Run], quantity: str, axis: str) -> dict[str, Any] | None:
    """A quantity's mean by ``axis``: "layer" or "position" (middle of each bucket, log scale)."""
    series: list[dict[str, Any]] = []
    edges: set[int] = set()
    for run in runs:
        rows = summaries(run, quantity, by=("layer",) if axis == "layer" else ("start", "end"))
        rows.sort(key=lambda row: row["layer"] if axis == "layer" else row["start"])
        if not rows:
            continue
        if axis == "layer":
            x = [row["layer"] for row in rows]
        else:
            x = [float(np.sqrt(max(row["start"], 1) * row["end"])) for row in rows]
            edges |= {row["end"] for row in rows}
        series.append(
            {
                "label": f"{text.arm_label(run.arm)}, seed {run.seed}",
                "arm": run.arm,
                "seed": run.seed,
                "role": "run",
                "x": x,
                "y": [row["mean"] for row in rows],
            }
        )
    if not series:
        return None
    if axis == "layer":
        ticks = sorted({value for one in series for value in one["x"]})
        across = {"label": "layer", "scale": "linear", "ticks": ticks, "tick_labels": [str(tick) for tick in ticks]}
    else:
        chosen = sorted(edges)
        across = {
            "label": "position, tokens",
            "scale": "log",
            "ticks": chosen,
            "tick_labels": [text.length_label(edge) for edge in chosen],
        }
    marks: list[dict[str, Any]] = []
    if axis == "position":
        trained = sorted({run.train_length for run in runs if run.train_length is not None})
        marks = [{"x": length, "label": f"training length {text.length_label(length)}"} for length in trained]
    return figure(
        f"{label(quantity)} by {axis}",
        "Mean over heads and probed tokens, one line a model.",
        series,
        x=across,
        y={"label": label(quantity), "scale": "linear"},
        marks=marks,
    )


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
        f"{label(quantity)}: distribution",
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
        f"{name[:1].upper()}{name[1:]} after each token of one example: it rises when the needle is read; what is "
        f"left at "
        "the end is what the question can find.",
        series,
        x={"label": "position, tokens", "scale": "linear"},
        y={"label": name, "scale": "linear"},
        marks=[marks[end] for end in sorted(marks)],
    )
