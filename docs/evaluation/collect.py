"""Gather evaluation records of several runs into one JSON file and its tables in Markdown.

    python docs/evaluation/collect.py runs/laptop/gdn2-seed* runs/laptop/qed-seed* --essays runs/essays --out laptop

reads the records in each run folder, and those of S-NIAH-2 and -3 in <essays>/<run>, and writes laptop.json and
laptop.md. Outcomes stay in the run folders; nothing is computed here but Holm's correction, where a family spans runs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from qed.evals.compare import compare
from qed.records import read_json, write_text
from qed.statistics import holm

KINDS = ("niah", "strength", "recall", "loss")
TITLES = {
    "niah_single_1": "S-NIAH-1",
    "niah_single_2": "S-NIAH-2",
    "niah_single_3": "S-NIAH-3",
    "fda": "FDA fields",
    "swde": "SWDE fields",
    "squad_completion": "SQuAD-completion fields",
}

Record = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="run folders named <arm>-seed<n>")
    parser.add_argument("--essays", type=Path, help="folder of the same names with records of S-NIAH-2 and -3")
    parser.add_argument("--out", type=Path, required=True, help="path without its ending")
    options = parser.parse_args()
    runs: dict[str, dict[str, Record]] = {}
    for folder in options.runs:
        records = read(folder, KINDS)
        if options.essays:
            found = read(options.essays / folder.name, ("niah", "strength"))
            records.update({f"essay {kind}": record for kind, record in found.items()})
        runs[folder.name] = records
    arms: dict[str, list[Path]] = {}
    for folder in options.runs:
        arms.setdefault(folder.name.rsplit("-seed", 1)[0], []).append(folder)
    differences = {}
    if len(arms) == 2 and len({len(folders) for folders in arms.values()}) == 1:
        first, second = arms.values()
        differences["runs"] = compare(first, second)
        if options.essays:
            differences["essays"] = compare(*([options.essays / f.name for f in side] for side in (first, second)))
        for difference in differences.values():
            for side in ("first", "second"):
                difference[side] = [Path(path).name for path in difference[side]]
    write_text(options.out.with_suffix(".json"), dump({"runs": runs, "differences": differences}))
    write_text(options.out.with_suffix(".md"), render(runs, differences))


def read(folder: Path, kinds: Iterable[str]) -> dict[str, Record]:
    return {kind: read_json(folder / f"{kind}.json") for kind in kinds if (folder / f"{kind}.json").is_file()}


def dump(value: Any, depth: int = 3) -> str:
    """JSON with one line for everything that lies ``depth`` levels down: a short file whose changes can be read."""

    def write(value: Any, level: int) -> str:
        if level == depth or not isinstance(value, dict | list) or not value:
            return json.dumps(value)
        pad = " " * (level + 1)
        if isinstance(value, list):
            return "[\n" + ",\n".join(pad + write(item, level + 1) for item in value) + "\n" + " " * level + "]"
        items = ",\n".join(f"{pad}{json.dumps(key)}: {write(item, level + 1)}" for key, item in value.items())
        return "{\n" + items + "\n" + " " * level + "}"

    short = json.loads(json.dumps(value), parse_float=lambda digits: float(f"{float(digits):.6g}"))
    return write(short, 0) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(cell, line)) + " |" for line in lines) + "\n"


def cell(value: Any) -> str:
    return "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


def render(runs: dict[str, dict[str, Record]], differences: dict[str, Record]) -> str:
    parts = ["# Evaluation at laptop scale\n", "Written by `collect.py` from `laptop.json`; see `../evaluation.md`.\n"]
    for kind in ("niah", "essay niah"):
        parts += needles(runs, kind)
    for kind in ("strength", "essay strength"):
        parts += sweeps(runs, kind)
    parts += [*recall(runs), *losses(runs), *compared(differences)]
    return "\n".join(parts)


def needles(runs: dict[str, dict[str, Record]], kind: str) -> list[str]:
    parts = []
    chosen = {name: records[kind] for name, records in runs.items() if kind in records}
    for task in unique(score["task"] for record in chosen.values() for score in record["scores"]):
        lengths = unique(s["length"] for record in chosen.values() for s in record["scores"] if s["task"] == task)
        rows = []
        for name, record in chosen.items():
            scores = {s["length"]: s for s in record["scores"] if s["task"] == task}
            contexts = {u["threshold"]: u for u in record["usable_context"] if u["task"] == task}
            cells = [
                f"{s['num_correct']}/{s['num_examples']} ({percent(s['wilson'][0])} to {percent(s['wilson'][1])})"
                for s in (scores[length] for length in lengths)
            ]
            rows.append([name, *cells, context(contexts[0.5]), context(contexts[0.8])])
        config = next(iter(chosen.values()))["config"]
        parts.append(f"## {TITLES[task]}\n")
        parts.append(
            f"Right answers, 95 % Wilson interval in percent; {config['max_new_tokens']} tokens for the answer, fill "
            f"{config['fill']!r}, words and values {config['split']!r}, example seed {config['seed']}"
            + (f", essay {config['essay']!r} (not RULER's)" if task != "niah_single_1" else "")
            + ". Usable context: tokens at which accuracy falls below 50 and 80 %.\n"
        )
        parts.append(table(["run", *map(str, lengths), "at 50 %", "at 80 %"], rows))
    return parts


def context(entry: Record) -> str:
    if entry["length"] is None:
        return str(entry["status"])
    ends = (str(round(entry[end])) if entry[end] else entry[f"{end}_status"] for end in ("low", "high"))
    return f"{entry['length']:.0f} ({' to '.join(ends)})"


def sweeps(runs: dict[str, dict[str, Record]], kind: str) -> list[str]:
    chosen = {name: records[kind] for name, records in runs.items() if kind in records}
    parts = []
    tests = [test for record in chosen.values() for test in record["comparisons"]]
    over_runs = dict(zip(map(id, tests), holm([test["p"] for test in tests]), strict=True)) if tests else {}
    for task in unique(score["task"] for record in chosen.values() for score in record["scores"]):
        rows = []
        for name, record in chosen.items():
            right = {(s["length"], s["strength"]): s["num_correct"] for s in record["scores"] if s["task"] == task}
            for test in record["comparisons"]:
                if test["task"] == task:
                    length, strength = test["length"], test["strength"]
                    counts = [right[length, strength], right[length, 1.0], test["n01"], test["n10"]]
                    rows.append([name, length, strength, *counts, test["p"], test["p_holm"], over_runs[id(test)]])
        same = [row for row in rows if row[5] == row[6] == 0]
        parts.append(f"## {TITLES[task]}: strength\n")
        parts.append(
            "Right answers at s and at s = 1 on the same examples; n01 wrong at 1 and right at s, n10 the reverse; "
            "exact McNemar p, Holm's over the run's sweep and over the sweeps of all runs. "
            f"{len(same)} of {len(rows)} comparisons have no discordant pair and are left out.\n"
        )
        head = ["run", "length", "s", "right at s", "right at 1", "n01", "n10", "p", "Holm", "Holm, all runs"]
        if len(same) < len(rows):
            parts.append(table(head, [row for row in rows if row not in same]))
    return parts


def recall(runs: dict[str, dict[str, Record]]) -> list[str]:
    chosen = {name: records["recall"] for name, records in runs.items() if "recall" in records}
    if not chosen:
        return []
    columns = unique((s["task"], s["protocol"]) for record in chosen.values() for s in record["scores"])
    rows = []
    for name, record in chosen.items():
        scores = {(s["task"], s["protocol"]): s for s in record["scores"]}
        rows.append([name, *(f"{scores[c]['num_correct']}/{scores[c]['num_examples']}" for c in columns)])
    source = next(iter(chosen.values()))["source"]
    longest = max(s["num_tokens"]["max"] for record in chosen.values() for s in record["scores"])
    text = f"Rows from {source}; prompts of up to {longest} tokens. Not comparable with the data sets' scores.\n"
    return ["## Recall\n", text, table(["run", *(f"{TITLES[t]}, {p}" for t, p in columns)], rows)]


def losses(runs: dict[str, dict[str, Record]]) -> list[str]:
    chosen = {name: records["loss"] for name, records in runs.items() if "loss" in records}
    if not chosen:
        return []
    first = next(iter(chosen.values()))
    head = ["run", "all", *(f"{b['start']} to {b['end'] - 1}" for b in first["buckets"])]
    rows = [
        [name, f"{record['loss']:.4f}", *(f"{b['loss']:.4f}" for b in record["buckets"])]
        for name, record in chosen.items()
    ]
    text = f"Nats a token by tokens before the target, {first['num_targets']} targets of {first['source']}.\n"
    return ["## Loss\n", text, table(head, rows)]


def compared(differences: dict[str, Record]) -> list[str]:
    if not differences:
        return []
    rows = []
    for difference in differences.values():
        for kind in ("niah", "recall"):
            for entry in difference.get(kind, ()):
                pooled, column = entry["pooled"], entry.get("length") or entry.get("protocol")
                pairs = ", ".join(f"{p['n01']}:{p['n10']} ({p['p_holm']:.2g})" for p in entry["pairs"])
                ends = "" if pooled["low"] is None else f"{percent(pooled['low'])} to {percent(pooled['high'])}"
                rows.append([TITLES[entry["task"]], column, percent(pooled["estimate"]), ends, pooled["p"], pairs])
    first, second = (next(iter(differences.values()))[side] for side in ("first", "second"))
    text = (
        f"{', '.join(second)} minus {', '.join(first)}, in percentage points; seeds as a random effect (95 % interval, "
        "p). For each pair of seeds the examples that only the second and only the first answered, with the exact "
        "McNemar p after Holm over its evaluation.\n"
    )
    head = ["evaluation", "length or protocol", "difference", "interval", "p", "pairs"]
    return ["## Differences between the arms\n", text, table(head, rows)]


def unique(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


if __name__ == "__main__":
    main()
