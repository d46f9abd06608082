"""Differences between two models, or two groups of them, on the same examples.

With several pairs (the seeds of two arms, in the same order) each pair is tested by itself and the differences are
pooled with seed as a random effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import statistics
from ..records import provenance, read_json, read_rows, write_json

Row = dict[str, Any]

# File, columns that name a group, columns that name an example, columns that must agree for a pair.
KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "niah": (("task", "length"), ("index",), ("key", "answer")),
    "recall": (("task", "protocol"), ("index",), ("answer",)),
}
BOOTSTRAP_SEED = 0


def compare(
    first: Sequence[Path | str], second: Sequence[Path | str], *, out: Path | str | None = None
) -> dict[str, Any]:
    """``second - first`` for every evaluation that both sides finished; written to ``out`` when given.

    ``first`` and ``second`` are result folders, the i-th of one paired with the i-th of the other. P-values are
    Holm-corrected over the comparisons of one evaluation (``family_size`` of them).

    Raises:
        ValueError: unequal numbers of folders, nothing in common, or outcomes of different examples.
    """
    pairs = [(Path(a), Path(b)) for a, b in zip(first, second, strict=False)]
    if not pairs or len(first) != len(second):
        raise ValueError(f"compare needs pairs of folders; got {len(first)} and {len(second)}")
    result: dict[str, Any] = {
        "kind": "compare",
        "first": [str(a) for a, _ in pairs],
        "second": [str(b) for _, b in pairs],
        "same_tokenizer": _same_tokenizer(pairs),
    }
    for kind in KINDS:
        if all((folder / f"{kind}.json").is_file() for pair in pairs for folder in pair):
            result[kind] = _outcomes(kind, pairs)
    if all((folder / "loss.json").is_file() for pair in pairs for folder in pair):
        result["loss"] = _losses(pairs)
    if not set(result) & {*KINDS, "loss"}:
        raise ValueError(
            f"no evaluation is finished in all of {', '.join(str(folder) for pair in pairs for folder in pair)}"
        )
    result["provenance"] = provenance(seed=BOOTSTRAP_SEED)
    if out is not None:
        write_json(out, result)
    return result


def _outcomes(kind: str, pairs: Sequence[tuple[Path, Path]]) -> list[Row]:
    grouping, naming, agreeing = KINDS[kind]
    sides = [
        tuple(_grouped(read_rows(folder / f"{kind}.jsonl"), grouping, naming) for folder in pair) for pair in pairs
    ]
    groups = [group for group in sides[0][0] if all(group in side for pair in sides for side in pair)]
    result = []
    for group in groups:
        outcomes, seeds = [], []
        for (first, second), folders in zip(sides, pairs, strict=True):
            a, b = first[group], second[group]
            shared = sorted(a.keys() & b.keys())
            if not shared or any(a[i][column] != b[i][column] for i in shared for column in agreeing):
                raise ValueError(f"{folders[0]} and {folders[1]} were not asked the same examples of {group}")
            scores = [int(a[i]["correct"]) for i in shared], [int(b[i]["correct"]) for i in shared]
            outcomes.append(scores)
            difference = statistics.paired_bootstrap(*scores, seed=BOOTSTRAP_SEED)
            seeds.append(
                {
                    "num_examples": len(shared),
                    "first": sum(scores[0]) / len(shared),
                    "second": sum(scores[1]) / len(shared),
                    "difference": difference.estimate,
                    "low": difference.low,
                    "high": difference.high,
                    **statistics.mcnemar(*scores)._asdict(),
                }
            )
        pooled = statistics.pool_over_seeds(outcomes)._asdict()
        result.append({**dict(zip(grouping, group, strict=True)), "pairs": seeds, "pooled": pooled})
    tests = [pair for entry in result for pair in entry["pairs"]]
    for test, adjusted in zip(tests, statistics.holm([test["p"] for test in tests]), strict=True):
        test["p_holm"] = adjusted
        test["family_size"] = len(tests)
    return result


def _losses(pairs: Sequence[tuple[Path, Path]]) -> list[Row]:
    """Nats a token, windows resampled together with their numbers of tokens."""
    result = []
    for folders in pairs:
        records = [read_json(folder / "loss.json") for folder in folders]
        if records[0]["content"] != records[1]["content"]:
            raise ValueError(f"{folders[0]} and {folders[1]} have losses of different windows, which do not compare")
        rows = [sorted(read_rows(folder / "loss.jsonl"), key=lambda row: row["window"]) for folder in folders]
        counts = [sum(row["counts"]) for row in rows[0]]
        losses = [[sum(row["nats"]) / count for row, count in zip(side, counts, strict=True)] for side in rows]
        difference = statistics.paired_bootstrap(*losses, weights=counts, seed=BOOTSTRAP_SEED)
        result.append(
            {
                "num_windows": len(counts),
                "first": records[0]["loss"],
                "second": records[1]["loss"],
                "difference": difference.estimate,
                "low": difference.low,
                "high": difference.high,
            }
        )
    return result


def _grouped(rows: Sequence[Row], grouping: Sequence[str], naming: Sequence[str]) -> dict[tuple, dict[tuple, Row]]:
    groups: dict[tuple, dict[tuple, Row]] = {}
    for row in rows:
        group = groups.setdefault(tuple(row[column] for column in grouping), {})
        group[tuple(row[column] for column in naming)] = row
    return groups


def _same_tokenizer(pairs: Sequence[tuple[Path, Path]]) -> bool | None:
    """``None`` where no needle record says."""
    files = [folder / "niah.json" for pair in pairs for folder in pair]
    if not all(file.is_file() for file in files):
        return None
    return len({read_json(file)["identity"]["tokenizer"] for file in files}) == 1
