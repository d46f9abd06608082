"""Static drawings of the figures: SVG and PNG files, and the SVG that stands in the page without a script."""

from __future__ import annotations

import io
import re
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from . import text

# Okabe and Ito's colour-blind-safe hues, each one arm's everywhere; the second of a pair is for dark backgrounds.
ARM_COLOURS = {
    "gdn2": ("#6b7280", "#a3abb8"),
    "qed": ("#0072b2", "#56b4e9"),
    "qed-nogate": ("#00805e", "#2fc79d"),
    "qed-noproj": ("#a8477f", "#dd92bd"),
    "qed-nogate-noproj": ("#c24e00", "#f0894a"),
    "qed-rand": ("#9a7400", "#e6b422"),
}
OTHER_COLOURS = ("#5b4b8a", "#b3a2e6")
PAGE_COLOURS = {
    "page": ("#ffffff", "#14171c"),
    "ink": ("#1c1f24", "#e6e8eb"),
    "muted": ("#626973", "#9aa3ad"),
    "rule": ("#d9dce0", "#343a43"),
}
MARKERS = {"gdn2": "s", "qed": "o", "qed-nogate": "^", "qed-noproj": "v", "qed-nogate-noproj": "D", "qed-rand": "P"}
STYLE: dict[Any, Any] = {
    "font.size": 9.5,
    "font.family": "DejaVu Sans",
    "axes.edgecolor": PAGE_COLOURS["muted"][0],
    "axes.labelcolor": PAGE_COLOURS["ink"][0],
    "text.color": PAGE_COLOURS["ink"][0],
    "xtick.color": PAGE_COLOURS["muted"][0],
    "ytick.color": PAGE_COLOURS["muted"][0],
    "xtick.labelcolor": PAGE_COLOURS["ink"][0],
    "ytick.labelcolor": PAGE_COLOURS["ink"][0],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "figure.facecolor": PAGE_COLOURS["page"][0],
    "axes.facecolor": PAGE_COLOURS["page"][0],
    "savefig.facecolor": PAGE_COLOURS["page"][0],
    "svg.fonttype": "path",
    "text.parse_math": False,
}


def colour(arm: str) -> str:
    return ARM_COLOURS.get(arm, OTHER_COLOURS)[0]


def colour_name(arm: str) -> str:
    """The CSS variable that holds an arm's colour."""
    return f"--arm-{arm}" if arm in ARM_COLOURS else "--arm-other"


def palette() -> dict[str, tuple[str, str]]:
    """CSS variable -> colour on a light and on a dark page."""
    arms = {f"--arm-{arm}": pair for arm, pair in ARM_COLOURS.items()} | {"--arm-other": OTHER_COLOURS}
    return arms | {f"--{name}": pair for name, pair in PAGE_COLOURS.items()}


def draw(spec: dict[str, Any], name: str) -> tuple[str, bytes]:
    """One figure as SVG text and PNG bytes."""
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": name}):
        figure = Figure(figsize=(5.8, 3.6), layout="constrained")
        axes = figure.add_subplot()
        _axes(axes, spec)
        runs = [series for series in spec["series"] if series["role"] == "run"]
        for series in spec["series"]:
            _series(axes, series | {"x": dodged(series, runs, spec["x"]["scale"])}, spec["crowded"])
        _marks(axes, spec["marks"])
        _legend(figure, spec["series"])
        svg, png = io.StringIO(), io.BytesIO()
        figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
        figure.set_layout_engine("none")
        figure.savefig(png, format="png", dpi=160)
    return svg.getvalue(), png.getvalue()


def inline(svg: str, name: str, alt: str) -> str:
    """An SVG for the page itself: no prolog, names of its own, a text alternative, colours from the page's theme."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.S)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    for variable, (light, _) in palette().items():
        svg = svg.replace(light, f"var({variable})")
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{alt}" ', 1).rstrip()


def dodged(series: dict[str, Any], runs: list[dict[str, Any]], scale: str) -> list[float]:
    """Positions moved apart by a few percent, so that intervals of several runs at one length do not hide each "
    "other."""
    if scale != "log" or series["role"] != "run" or len(runs) < 2:
        return series["x"]
    shift = 2 ** (
        min(0.12, 0.02 * len(runs)) * (next(i for i, run in enumerate(runs) if run is series) / (len(runs) - 1) - 0.5)
    )
    return [x * shift for x in series["x"]]


def _axes(axes: Any, spec: dict[str, Any]) -> None:
    for axis, name, side in ((axes.xaxis, "x", spec["x"]), (axes.yaxis, "y", spec["y"])):
        if side["scale"] == "log":
            getattr(axes, f"set_{name}scale")("log", base=2 if name == "x" else 10)
        if "ticks" in side:
            axis.set_major_locator(FixedLocator(side["ticks"]))
            axis.set_minor_locator(NullLocator())
            if "tick_labels" in side:
                axis.set_ticklabels(side["tick_labels"])
        elif name == "x" and side["scale"] == "linear" and "range" not in side:
            axis.set_major_formatter(FuncFormatter(lambda value, _: text.count(value)))
        if "range" in side:
            getattr(axes, f"set_{name}lim")(*side["range"])
    axes.set_xlabel(spec["x"]["label"])
    axes.set_ylabel(spec["y"]["label"])
    axes.grid(axis="y", color=PAGE_COLOURS["rule"][0], linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(length=3)


def _series(axes: Any, series: dict[str, Any], crowded: bool) -> None:
    shade, marker, role = colour(series["arm"]), MARKERS.get(series["arm"], "X"), series["role"]
    looks: dict[str, dict[str, Any]] = {
        "mean": {"linewidth": 2.6, "marker": marker, "markersize": 6, "zorder": 5},
        "paper": {
            "linewidth": 1,
            "linestyle": ":",
            "marker": "D",
            "markersize": 6,
            "markerfacecolor": "none",
            "zorder": 1,
        },
        "points": {"linestyle": "", "marker": "x" if series.get("faint") else marker, "markersize": 6},
        "curve": {"linewidth": 1.1, "alpha": 0.85},
        "run": {
            "linewidth": 0.9 if crowded else 1.2,
            "linestyle": "--" if series.get("faint") else "-",
            "marker": "" if crowded else marker,
            "markersize": 4,
            "alpha": 0.4 if crowded else 0.8,
            "zorder": 3,
        },
    }
    axes.plot(series["x"], series["y"], color=shade, **looks[role])
    if "low" in series and not (crowded and role == "run"):
        mean = role == "mean"
        width, alpha = (1.4, 1.0) if mean else (0.9, 0.55)
        axes.vlines(series["x"], series["low"], series["high"], color=shade, linewidth=width, alpha=alpha, zorder=2)


def _marks(axes: Any, marks: list[dict[str, Any]]) -> None:
    for mark in marks:
        if "x" in mark:
            style = "-" if mark.get("solid") else (0, (2, 2))
            axes.axvline(mark["x"], color=PAGE_COLOURS["muted"][0], linewidth=1, linestyle=style, zorder=1)
            if not mark["label"]:
                continue
            axes.annotate(
                mark["label"],
                (mark["x"], 0.12),
                xycoords=("data", "axes fraction"),
                xytext=(5, 0),
                textcoords="offset points",
                color=PAGE_COLOURS["muted"][0],
                fontsize=9,
                bbox={"facecolor": PAGE_COLOURS["page"][0], "edgecolor": "none", "pad": 1.5},
                zorder=6,
            )
        else:
            axes.axhline(mark["y"], color=PAGE_COLOURS["muted"][0], linewidth=1, zorder=1)


def _legend(figure: Figure, series: list[dict[str, Any]]) -> None:
    shown: dict[str, dict[str, Any]] = {}
    for one in series:
        if one["role"] != "paper":
            shown.setdefault(one.get("group", one["arm_label"]), one)
    handles = []
    for label, one in shown.items():
        role = one["role"]
        handles.append(
            Line2D(
                [],
                [],
                color=colour(one["arm"]),
                marker="" if role == "curve" else MARKERS.get(one["arm"], "X"),
                markersize=6 if role == "mean" else 4.5,
                linestyle="" if role == "points" else "-",
                linewidth=2.6 if role == "mean" else 1.4,
                label=label,
            )
        )
    if any(one["role"] == "paper" for one in series):
        muted = PAGE_COLOURS["muted"][0]
        handles.append(
            Line2D([], [], color=muted, marker="D", markerfacecolor="none", linestyle=":", label="the paper")
        )
    figure.legend(handles=handles, loc="outside upper left", ncols=min(len(handles), 3), frameon=False, fontsize=9)
