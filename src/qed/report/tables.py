"""Tables: one plain description, written as HTML cells, CSV and Markdown."""

from __future__ import annotations

import csv
import io
from typing import Any

from . import text

SPLIT = {
    "estimate": ("", "_low", "_high"),
    "difference": ("", "_low", "_high"),
    "quantiles": ("", "_p20", "_p80"),
    "range": ("_min", "_max"),
}


def table(
    title: str,
    columns: list[tuple[str, str, str]],
    rows: list[dict[str, Any]],
    *,
    caption: str,
    origin: str = "these runs",
) -> dict[str, Any]:
    """A table as JSON: ``columns`` are (key, label, kind), kinds as in ``text.cell``; ``origin`` says whose numbers."""
    return {
        "title": title,
        "caption": caption,
        "origin": origin,
        "columns": [{"key": key, "label": label, "kind": kind} for key, label, kind in columns],
        "rows": rows,
    }


def cells(table: dict[str, Any], row: dict[str, Any]) -> list[str]:
    return [text.cell(row.get(column["key"]), column["kind"]) for column in table["columns"]]


def to_markdown(table: dict[str, Any]) -> str:
    def line(parts: list[str]) -> str:
        return "| " + " | ".join(part.replace("|", "\\|").replace("\n", " ") for part in parts) + " |"

    numeric = [column["kind"] != "text" for column in table["columns"]]
    lines = [
        f"**{table['title']}** ({table['origin']})",
        "",
        line([column["label"] for column in table["columns"]]),
        line(["---:" if right else "---" for right in numeric]),
        *(line(cells(table, row)) for row in table["rows"]),
        "",
        table["caption"],
    ]
    return "\n".join(lines) + "\n"


def to_csv(table: dict[str, Any]) -> str:
    """Raw values; an estimate with its interval takes three columns."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    header: list[str] = []
    for column in table["columns"]:
        header += [column["key"] + ending for ending in SPLIT.get(column["kind"], ("",))]
    writer.writerow(header)
    for row in table["rows"]:
        values: list[Any] = []
        for column in table["columns"]:
            value = row.get(column["key"])
            endings = SPLIT.get(column["kind"])
            values += [value] if endings is None else (list(value) if value is not None else [None] * len(endings))
        writer.writerow(["" if value is None else value for value in values])
    return file.getvalue()
