"""Outcome rows kept as they come, so that an interrupted evaluation goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .. import statistics
from ..records import read_json, read_rows, write_rows


class Outcomes:
    """A file of rows that all belong to one ``run``: the same weights, tokenizer and settings that decide outcomes.

    ``key`` names the columns that tell one row from another.
    """

    def __init__(self, path: Path | str, *, run: str, key: tuple[str, ...]):
        self.path, self.run, self.key = Path(path), run, key
        self.rows: dict[tuple[Any, ...], dict[str, Any]] = {}
        if self.path.exists():
            rows = read_rows(self.path)
            other = next((row for row in rows if row.get("run") != run), None)
            if other is not None:
                raise ValueError(
                    f"{self.path} holds outcomes of run {other.get('run')}, this is run {run}: other weights, "
                    "tokenizer, texts or settings. Give another folder, or remove the file to evaluate again"
                )
            self.rows = {self.identity(row): row for row in rows}
            # A line cut short by a kill goes, so that the next one does not join it.
            write_rows(self.path, self.rows.values())

    def identity(self, row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[column] for column in self.key)

    def __contains__(self, key: tuple[Any, ...]) -> bool:
        return key in self.rows

    def append(self, rows: Iterable[dict[str, Any]]) -> None:
        """Add finished rows to the file at once."""
        rows = [{**row, "run": self.run} for row in rows]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))
            file.flush()
            os.fsync(file.fileno())
        self.rows.update((self.identity(row), row) for row in rows)

    def finish(self, order: Iterable[tuple[Any, ...]]) -> list[dict[str, Any]]:
        """Rewrite the file with the rows of ``order`` first, in that order; returns those."""
        wanted = [self.rows[key] for key in order]
        chosen = {self.identity(row) for row in wanted}
        write_rows(self.path, wanted + [row for key, row in self.rows.items() if key not in chosen])
        return wanted


def scores(rows: Iterable[dict[str, Any]], columns: tuple[str, ...]) -> list[dict[str, Any]]:
    """Counts, 95 % intervals and achieved lengths of ``rows``, grouped by ``columns`` in order of first appearance."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[column] for column in columns), []).append(row)
    result = []
    for key, group in groups.items():
        num_correct, achieved = sum(row["correct"] for row in group), [row["num_tokens"] for row in group]
        result.append(
            {
                **dict(zip(columns, key, strict=True)),
                "num_examples": len(group),
                "num_correct": num_correct,
                "accuracy": num_correct / len(group),
                "wilson": list(statistics.wilson(num_correct, len(group))),
                "exact": list(statistics.clopper_pearson(num_correct, len(group))),
                "num_tokens": {"min": min(achieved), "mean": sum(achieved) / len(achieved), "max": max(achieved)},
            }
        )
    return result


def run_name(**parts: Any) -> str:
    """Twelve hex digits that name what outcomes depend on."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def finished(path: Path | str, *, run: str, config: dict[str, Any]) -> dict[str, Any] | None:
    """The record at ``path`` if it is of this run and config, else ``None``."""
    path = Path(path)
    if not path.exists():
        return None
    record = read_json(path)
    return record if record.get("run") == run and record.get("config") == config else None
