"""Benchmark results as tables: every row that was timed, and what QED costs over GDN-2 in the same kernels."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from qed.records import read_json

from . import text
from .tables import table

SHAPE = ("work", "batch", "length", "heads", "K", "V")


def load(paths: Iterable[Path | str]) -> list[dict[str, Any]]:
    """Result files of ``qed bench``.

    Raises:
        ValueError: a file that is not there or is no benchmark result.
    """
    results = []
    for path in map(Path, paths):
        if not path.is_file():
            raise ValueError(f"no benchmark result at {path}; make one with `qed bench run`")
        result = read_json(path)
        if not isinstance(result, dict) or "rows" not in result:
            raise ValueError(f"{path} is no benchmark result: wanted an object with rows")
        results.append(result | {"name": path.stem})
    return results


def speed_table(result: dict[str, Any]) -> dict[str, Any]:
    rows = []
    for row in result["rows"]:
        shown = {"peer": row["peer"], "work": row["work"], "status": row["status"], "note": row.get("note")}
        if "batch" in row:
            shown["shape"] = f"B{row['batch']} T{text.integer(row['length'])} H{row['heads']} K{row['K']} V{row['V']}"
        if row["status"] == "ok":
            shown |= {
                "time_ms": [row["median_ms"], row["p20_ms"], row["p80_ms"]],
                "roofline": row.get("roofline_share"),
                "peak_gib": row["peak_extra_bytes"] / 2**30 if row.get("peak_extra_bytes") else None,
            }
        rows.append(shown)
    provenance = result.get("provenance", {})
    extra = [
        f"{shape['work']} at B{shape['batch']} T{text.integer(shape['length'])}: {100 * share:+.1f} %".replace(
            "-", text.MINUS
        )
        for shape, share in overheads(result)
    ]
    return table(
        f"Speed on {provenance.get('device', result['name'])}",
        [
            ("work", "work", "text"),
            ("shape", "shape", "text"),
            ("peer", "system", "text"),
            ("time_ms", "ms, median [20 %, 80 %]", "quantiles"),
            ("roofline", "of the roofline, %", "percent"),
            ("peak_gib", "peak GiB", "number"),
            ("status", "status", "text"),
            ("note", "differs in", "text"),
        ],
        rows,
        caption=f"Commit {(provenance.get('commit') or 'not recorded')[:10]}, "
        f"{provenance.get('time', 'time not recorded')}. "
        + (f"Time of QED over GDN-2 in the same kernels: {'; '.join(extra)}." if extra else ""),
    )


def overheads(result: dict[str, Any]) -> list[tuple[dict[str, Any], float]]:
    """Extra time of the row ``qed`` over the row ``gdn2``, for each work and shape that has both."""
    times: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in result["rows"]:
        if row["status"] == "ok" and row["peer"] in ("qed", "gdn2") and "batch" in row:
            times.setdefault(tuple(row[name] for name in SHAPE), {})[row["peer"]] = row["median_ms"]
    return [
        (dict(zip(SHAPE, shape, strict=True)), both["qed"] / both["gdn2"] - 1)
        for shape, both in times.items()
        if len(both) == 2
    ]
