"""Two figures from a result: time against length, and what QED adds to GDN-2."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any


def draw(result: dict[str, Any], stem: Path) -> list[Path]:
    """Write ``<stem>-time.svg`` and ``<stem>-overhead.svg`` from the rows of one amount of tokens; return the paths."""
    import matplotlib

    matplotlib.use("Agg")
    # the same rows give the same bytes
    matplotlib.rcParams["svg.hashsalt"] = "qed"
    from matplotlib import pyplot, ticker

    rows = [row for row in result["rows"] if row["status"] == "ok" and row.get("length", 1) > 1]
    if len({row["length"] for row in rows}) < 2:
        return []
    device = result["provenance"]["device"]
    works = sorted({row["work"] for row in rows})
    figure, axes = pyplot.subplots(1, len(works), figsize=(5.5 * len(works), 4), squeeze=False, layout="constrained")
    for axis, work in zip(axes[0], works, strict=True):
        lines: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for row in rows:
            if row["work"] == work:
                lines[row["peer"]].append(row)
        for name, points in lines.items():
            points.sort(key=lambda row: row["length"])
            x, y = [row["length"] for row in points], [row["median_ms"] for row in points]
            spread = [
                [row["median_ms"] - row["p20_ms"] for row in points],
                [row["p80_ms"] - row["median_ms"] for row in points],
            ]
            # QED's thin line over GDN-2's thick one, where they agree
            width, above = {"qed": (1, 3), "gdn2": (3, 2)}.get(name, (1, 2))
            axis.errorbar(x, y, spread, marker="o", markersize=3, linewidth=width, zorder=above, label=name)
        _lengths(axis, rows)
        axis.set(title=work, ylabel="ms", yscale="log")
        axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axis.yaxis.set_minor_formatter(ticker.NullFormatter())
        axis.grid(axis="y", color="0.9", linewidth=0.6)
        axis.legend(fontsize="x-small", ncols=2)
    tokens = rows[0]["batch"] * rows[0]["length"]
    figure.suptitle(f"{device}: {tokens:,} tokens, {rows[0]['heads']} heads, K = V = {rows[0]['K']}", fontsize="medium")
    paths = [stem.with_name(f"{stem.name}-{name}.svg") for name in ("time", "overhead")]
    figure.savefig(paths[0], metadata={"Date": None})
    if not any(row["peer"] == "qed" for row in rows) or not any(row["peer"] == "gdn2" for row in rows):
        pyplot.close("all")
        return paths[:1]
    figure, axis = pyplot.subplots(figsize=(5.5, 4), layout="constrained")
    for work in works:
        times = {(row["peer"], row["length"]): row["median_ms"] for row in rows if row["work"] == work}
        lengths = sorted(length for name, length in times if name == "qed" and ("gdn2", length) in times)
        share = [100 * (times["qed", length] / times["gdn2", length] - 1) for length in lengths]
        axis.plot(lengths, share, marker="o", markersize=3, linewidth=1, label=work)
    axis.axhline(0, color="0.6", linewidth=0.8)
    _lengths(axis, rows)
    axis.set(title=f"{device}: QED over GDN-2, our kernels", ylabel="extra time (%)")
    axis.legend(fontsize="x-small")
    figure.savefig(paths[1], metadata={"Date": None})
    pyplot.close("all")
    return paths


def _lengths(axis: Any, rows: list[dict[str, Any]]) -> None:
    lengths = sorted({row["length"] for row in rows})
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [f"{length:,}" for length in lengths], fontsize="small")
    axis.set_xlabel("sequence length (tokens)")
