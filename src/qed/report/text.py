"""How values read on the page, in Markdown and in CSV: one formatter for every kind of cell."""

from __future__ import annotations

from typing import Any

ARM_LABELS = {
    "gdn2": "GDN-2",
    "qed": "QED",
    "qed-nogate": "QED-nogate",
    "qed-noproj": "QED-noproj",
    "qed-nogate-noproj": "QED-nogate-noproj",
    "qed-rand": "QED-rand",
}
TASK_LABELS = {
    "niah_single_1": "S-NIAH-1",
    "niah_single_2": "S-NIAH-2",
    "niah_single_3": "S-NIAH-3",
    "s-niah-1": "S-NIAH-1",
    "s-niah-2": "S-NIAH-2",
    "s-niah-3": "S-NIAH-3",
    "fda": "FDA",
    "swde": "SWDE",
    "squad_completion": "SQuAD-completion",
}
MINUS = "\u2212"
NOTHING = "\u2013"


def arm_label(arm: str) -> str:
    return ARM_LABELS.get(arm, arm)


def task_label(task: str) -> str:
    return TASK_LABELS.get(task, task)


def length_label(length: int) -> str:
    """``4096`` as ``4K``; lengths that are no multiple of 1024 stay as they are."""
    return f"{length // 1024}K" if length >= 1024 and length % 1024 == 0 else integer(length)


def integer(value: float) -> str:
    """A whole number, thousands apart by a thin space."""
    return f"{round(value):,}".replace(",", "\u202f")


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


def points(value: float) -> str:
    """A difference of two shares in percentage points, with its sign."""
    rounded = round(100 * value, 1)
    return "0.0" if rounded == 0 else f"{'+' if rounded > 0 else MINUS}{abs(rounded):.1f}"


def p_value(value: float) -> str:
    if value < 0.001:
        return "< 0.001"
    return f"{value:.3f}" if value < 0.9995 else "1"


def count(value: float) -> str:
    """A count in three digits with K, M or B."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:g}"


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def number(value: float) -> str:
    text = f"{value:.4g}"
    return text.replace("-", MINUS) if "e" not in text else f"{value:.2e}"


def cell(value: Any, kind: str) -> str:
    """The text of one table cell; ``None`` is a dash."""
    if value is None:
        return NOTHING
    if kind == "estimate":
        middle, low, high = value
        return percent(middle) + (f" [{percent(low)}, {percent(high)}]" if low is not None else "")
    if kind == "difference":
        middle, low, high = value
        return points(middle) + (f" [{points(low)}, {points(high)}]" if low is not None else "")
    if kind == "quantiles":
        return f"{number(value[0])} [{number(value[1])}, {number(value[2])}]"
    if kind == "range":
        return f"{number(value[0])} to {number(value[1])}"
    if kind == "yes":
        return "yes" if value else "no"
    formats = {
        "percent": percent,
        "points": points,
        "p": p_value,
        "count": count,
        "duration": duration,
        "number": number,
        "loss": lambda loss: f"{loss:.4f}",
        "integer": integer,
    }
    return formats[kind](value) if kind in formats else str(value)
