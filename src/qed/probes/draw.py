"""Pictures of what the probes measured, PNG and SVG, drawn from the records alone."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from qed.records import write_text

STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "svg.fonttype": "path",
    "svg.hashsalt": "qed",
    "text.parse_math": False,
}
INK, MUTED = "#1c1f24", "#626973"
COLOURS = {"gdn2": "#6b7280", "qed": "#0072b2"}
OTHERS = ("#c24e00", "#00805e", "#a8477f", "#9a7400")
DASHES = ("-", "--", ":", "-.")
MOST_HEADS_NAMED = 24


@dataclass(frozen=True)
class Held:
    """One model's part of the needle picture: ``needle`` of its record, and its rows."""

    name: str
    arm: str
    needle: dict[str, Any]
    rows: Sequence[dict[str, Any]]

    def curves(self, quantity: str) -> tuple[list[int], np.ndarray]:
        """Tokens since the needle, and ``[layers * heads, points]``."""
        found = [row for row in self.rows if row["quantity"] == "needle"]
        return found[0]["tokens_after"], np.array([row[quantity] for row in found])

    @property
    def answering(self) -> int:
        """The row of the head that contributes most to the answer."""
        found = [(row["layer"], row["head"]) for row in self.rows if row["quantity"] == "needle"]
        return found.index((self.needle["layer"], self.needle["head"]))


def draw_needle(held: Sequence[Held], path: Path) -> None:
    """What is left of the needle and what the question gets of it, above a map of all heads: ``path`` .png and .svg."""
    with matplotlib.rc_context(STYLE):
        num_rows = max(len(one.curves("kept")[1]) for one in held)
        height = 3.4 + min(4.0, 1.2 + 0.16 * num_rows)
        figure = Figure(figsize=(max(9.5, 3.8 * len(held)), height), layout="constrained")
        halves: Any = figure.subfigures(2, 1, height_ratios=(3.2, height - 3.2))
        upper, lower = halves
        left, asked = upper.subplots(1, 2, width_ratios=(2, 1))
        colours, dashes = _lines(held)
        for one, colour, dash in zip(held, colours, dashes, strict=True):
            x, kept = one.curves("kept")
            left.plot(x, np.delete(kept, one.answering, axis=0).T, color=colour, linewidth=0.6, alpha=0.3)
            label = f"{one.name}: layer {one.needle['layer']}, head {one.needle['head']}"
            left.plot(x, kept[one.answering], color=colour, linestyle=dash, linewidth=2.2, label=label)
        left.axhline(0, color=MUTED, linewidth=0.6)
        left.set(xlabel="tokens read since the needle", ylabel="share left under its own key", xlim=(0, None))
        left.set_title("What the state still holds of the needle (bold: the head that answers)")
        left.legend(frameon=False, fontsize=8.5)
        shares = [max(head["question_share"] for head in one.needle["heads"]) for one in held]
        places = range(len(held))
        bars = asked.barh(places, [100 * share for share in shares], color=colours, height=min(0.6, 0.15 * len(held)))
        asked.bar_label(bars, [f"{100 * share:.0f} %" for share in shares], padding=3)
        asked.set_yticks(places, [one.name for one in held])
        asked.set_ylim(len(held) - 0.3, -0.7)
        asked.set(xlabel="% of that head's output, by length", xlim=(0, 118 * max(shares)))
        asked.set_title("The needle's part in the answer")
        maps = lower.subplots(1, len(held), squeeze=False)[0]
        for one, axes in zip(held, maps, strict=True):
            x, kept = one.curves("kept")
            shown = axes.imshow(
                kept,
                aspect="auto",
                cmap="viridis",
                vmin=0,
                vmax=1,
                interpolation="nearest",
                extent=(x[0], x[-1], len(kept) - 0.5, -0.5),
            )
            _name_heads(axes, one)
            axes.set(xlabel="tokens read since the needle", title=one.name)
            axes.spines[["left", "bottom"]].set_visible(False)
        lower.colorbar(shown, ax=maps, label="share left")
        _save(figure, path)


def draw_summary(record: dict[str, Any], name: str, path: Path) -> None:
    """Eight panels of one model: ``path`` with .png and .svg."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(14, 6.4), layout="constrained")
        title = f"Inside {name}: {record['num_tokens']:,} tokens of {record['source']}"
        figure.suptitle(title, fontsize=10, x=0.01, ha="left")
        panels = figure.subplots(2, 4).flat
        colour = COLOURS.get(record["arm"], OTHERS[0])
        _histogram(next(panels), record, "e", "Eigenvalue e = 1 − a·k", colour)
        _histogram(next(panels), record, "rho", "ρ = q·k", colour)
        _norms(next(panels), record)
        _half_lives(next(panels), record)
        _course(next(panels), record, "state_norm", "State norm", colour)
        _course(next(panels), record, "effective_rank", "Effective rank of the state", colour)
        found = "Content found, |S·d|" if record["effects"] else "Content QED's direction would find, |S·d|"
        _course(next(panels), record, "content_norm", found, colour)
        _effects(next(panels), record)
        _save(figure, path)


def _lines(held: Sequence[Held]) -> tuple[list[str], list[str]]:
    """An arm's colour, and for another run of the arm the same colour dashed differently."""
    arms = list(dict.fromkeys(one.arm for one in held))
    others = [arm for arm in arms if arm not in COLOURS]
    colours = [COLOURS.get(one.arm) or OTHERS[others.index(one.arm) % len(OTHERS)] for one in held]
    before = [sum(other.arm == one.arm for other in held[:i]) for i, one in enumerate(held)]
    return colours, [DASHES[n % len(DASHES)] for n in before]


def _name_heads(axes: Any, one: Held) -> None:
    found = [(row["layer"], row["head"]) for row in one.rows if row["quantity"] == "needle"]
    if len(found) <= MOST_HEADS_NAMED:
        axes.set_yticks(range(len(found)), [f"layer {layer}, head {head}" for layer, head in found])
    else:
        num_heads = 1 + max(head for _, head in found)
        layers = range(0, len(found) // num_heads, 4)
        axes.set_yticks([layer * num_heads for layer in layers], [f"layer {layer}" for layer in layers])
    axes.plot(
        0.015, one.answering, marker=">", color="white", markeredgecolor=INK, transform=axes.get_yaxis_transform()
    )


def _rows(record: dict[str, Any], quantity: str, *by: str) -> list[dict[str, Any]]:
    groups = {"layer", "head", "start"}
    return [
        row
        for row in record["summaries"]
        if row["quantity"] == quantity and {name for name in groups if row[name] is not None} == set(by)
    ]


def _histogram(axes: Any, record: dict[str, Any], quantity: str, title: str, colour: str) -> None:
    for row in _rows(record, quantity):
        counts, edges = np.array(row["histogram"]["counts"]), np.array(row["histogram"]["edges"])
        axes.stairs(100 * counts / counts.sum() / np.diff(edges) * 0.01, edges, fill=True, color=colour, alpha=0.8)
        axes.set_xlabel(f"from {row['min']:.4g} to {row['max']:.4g}")
    axes.set(title=title, ylabel="% of samples in 0.01")


def _norms(axes: Any, record: dict[str, Any]) -> None:
    spans = [
        (name.removeprefix("amplification_"), row)
        for name in record["quantities"]
        if name.startswith("amplification_")
        for row in _rows(record, name)
    ]
    for x, (_, row) in enumerate(spans):
        low, middle, high = (row["quantiles"][q] for q in ("0.05", "0.5", "0.95"))
        axes.plot([x, x], [row["min"], row["max"]], color=MUTED, linewidth=1)
        axes.plot([x, x], [low, high], color=INK, linewidth=4, solid_capstyle="butt")
        axes.plot(x, middle, "o", color="white", markeredgecolor=INK, markersize=6)
    axes.axhline(1, color=MUTED, linewidth=0.6, linestyle="--")
    axes.set_xticks(range(len(spans)), [span for span, _ in spans])
    axes.set(title="Norm of the product of transitions", xlabel="tokens multiplied", yscale="log")
    axes.set_xlim(-0.6, len(spans) - 0.4)
    _plain_ticks(axes.yaxis)


def _course(axes: Any, record: dict[str, Any], quantity: str, title: str, colour: str) -> None:
    x, (low, middle, high) = _by_position(record, quantity)
    axes.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
    axes.plot(x, middle, color=colour, marker="o", markersize=3)
    axes.set(title=title, ylabel="median, and 5 to 95 %", xlabel="position, tokens", xscale="log", ylim=(0, None))
    _plain_ticks(axes.xaxis, few=True)


def _effects(axes: Any, record: dict[str, Any]) -> None:
    if not record["effects"]:
        axes.set_axis_off()
        axes.text(0, 0.5, "This arm corrects nothing.", color=MUTED, transform=axes.transAxes)
        return
    shown = (("effect_this_step", "this step"), ("effect_earlier_steps", "earlier steps"), ("effect_all_steps", "all"))
    for (quantity, label), colour, dash in zip(shown, (OTHERS[0], OTHERS[1], INK), ("-", "-", ":"), strict=True):
        x, (_, middle, _) = _by_position(record, quantity)
        axes.plot(x, middle, color=colour, linestyle=dash, marker="o", markersize=3, label=label)
    axes.set(title="Output's change without the correction at", ylabel="median of |change| / |o|", xscale="log")
    axes.set(yscale="log", xlabel="position, tokens")
    _plain_ticks(axes.xaxis, few=True)
    _plain_ticks(axes.yaxis)
    axes.legend(frameon=False, fontsize=8)


def _by_position(record: dict[str, Any], quantity: str) -> tuple[list[float], list[list[float]]]:
    """Middles of the buckets on a log scale, and the quantiles 5, 50 and 95 %."""
    rows = sorted(_rows(record, quantity, "start"), key=lambda row: row["start"])
    x = [(max(row["start"], 1) * row["end"]) ** 0.5 for row in rows]
    return x, [[row["quantiles"][q] for row in rows] for q in ("0.05", "0.5", "0.95")]


def _plain_ticks(axis: Any, few: bool = False) -> None:
    axis.set_major_locator(LogLocator(subs=(1,) if few else (1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def _half_lives(axes: Any, record: dict[str, Any]) -> None:
    rows = _rows(record, "half_life", "layer")
    for row in rows:
        counts, edges = np.array(row["histogram"]["counts"]), np.array(row["histogram"]["edges"])
        shade = matplotlib.colormaps["viridis"](0.85 * row["layer"] / max(1, len(rows) - 1))
        label = f"layer {row['layer']}" if len(rows) <= 6 or row["layer"] in (0, len(rows) - 1) else None
        axes.stairs(np.cumsum(counts) / counts.sum(), edges, color=shade, label=label, baseline=None)
    axes.set(title="Half-life of a channel", xscale="log", xlabel="tokens", ylabel="share of channels below")
    _plain_ticks(axes.xaxis, few=True)
    axes.legend(frameon=False, fontsize=8)


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # the layout is found once and kept for both files
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    write_text(path.with_name(f"{path.name}.svg"), text.getvalue())
    figure.savefig(path.with_name(f"{path.name}.png"), dpi=150, format="png")
