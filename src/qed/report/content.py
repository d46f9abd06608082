"""What stands on the page, in its order: sections of figures and tables, the sentences at its head, the gaps."""

from __future__ import annotations

import json
import re
from importlib import metadata
from typing import Any

from . import claims, comparisons, diagnostics, figures, paper, recall, speed, sweep, text, values
from .runs import Run
from .statements import statements

DESCRIPTION = (
    "QED adds to the erase vector of Gated DeltaNet-2 a second direction taken from the query, projected orthogonal "
    "to the key. At strength zero it is GDN-2 exactly."
)


RULER_ANSWER_TOKENS = 128
Part = tuple[str, str, dict[str, Any] | None]


def assemble(
    runs: list[Run], *, title: str, label: str = "", benchmarks: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Every number of the report, as the JSON that ``report.json`` holds; ``benchmarks``: results of ``qed bench``."""
    needle = values.Needle(runs)
    reference = paper.load()
    departures = {run.name: paper.departures(run, reference) for run in runs}
    comparable = not any(departures.values())
    behind = reference if comparable else None
    content: dict[str, Any] = {"title": title, "label": label, "description": DESCRIPTION}
    content["software"] = {"qed-attention": _version()}
    content["statements"] = statements(needle)
    content |= {"sections": [], "figures": {}, "tables": {}}
    for task in needle.tasks:
        heading = f"{text.task_label(task)}: finding a needle"
        _section(content, task, heading, _needle(needle, task, behind), _protocol(runs, task))
    _section(content, "sweep", "Strength at inference", _sweep(runs, behind))
    _section(content, "recall", "Recall", _recall(runs, behind))
    _section(content, "loss", "Validation loss", _loss(runs))
    table = claims.claims_table(needle, comparable)
    _section(content, "claims", "What the paper claims, and what these runs say", [("table", "claims", table)])
    _section(content, "inside", "Inside the models", _inside(runs))
    _section(content, "training", "Training", _training(needle))
    timed: list[Part] = [("table", f"speed-{result['name']}", speed.speed_table(result)) for result in benchmarks or ()]
    _section(content, "speed", "Speed", timed)
    away = sorted({departure for found in departures.values() for departure in found})
    lead = f"Source: {reference['source']}. " + (
        "The runs above share the paper's model size, token count and training length."
        if comparable
        else f"Not to be compared with the runs above, whose setting differs: {'; '.join(away)}."
    )
    parts: list[Part] = [("table", name, value) for name, value in paper.tables(reference).items()]
    _section(content, "paper", "The paper's numbers", parts, lead)
    content["gaps"] = [{"run": run.name, "gap": gap} for run in runs for gap in run.gaps]
    content["configs"] = _configs(runs)
    return json.loads(json.dumps(content, allow_nan=False))


def _section(content: dict[str, Any], key: str, heading: str, parts: list[Part], lead: str = "") -> None:
    shown = []
    for kind, name, value in parts:
        if value is not None:
            name = _slug(name)
            content[f"{kind}s"][name] = value
            shown.append({"kind": kind, "name": name})
    if shown:
        content["sections"].append({"key": _slug(key), "heading": heading, "lead": lead, "parts": shown})


def _slug(name: str) -> str:
    """A name safe in a path and in markup; task names come from the records."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip(".")


def _needle(needle: values.Needle, task: str, reference: dict[str, Any] | None) -> list[Part]:
    behind = paper.accuracies(reference) if reference and text.task_label(task) == "S-NIAH-1" else None
    parts: list[Part] = [
        ("figure", f"accuracy-{task}", figures.accuracy_figure(needle, task, behind)),
        ("table", f"accuracy-{task}", values.accuracy_table(needle, task)),
    ]
    for arm, base in comparisons.CONTRASTS:
        key = f"{task}-{arm}-{base}"
        pooled = comparisons.pooled_table(needle, task, arm, base)
        if (arm, base) == comparisons.CONTRASTS[0]:
            drawn = figures.difference_figure(needle, task, arm, base, pooled)
            parts.append(("figure", f"difference-{key}", drawn))
        parts.append(("table", f"over-seeds-{key}", pooled))
        parts.append(("table", f"paired-{key}", comparisons.paired_table(needle, task, arm, base)))
    length = needle.extrapolation_length(task)
    contrasts = comparisons.contrasts_table(needle, task, length) if length else None
    if contrasts is not None:
        points = reference["contrasts_at_8192_points"] if reference and behind and length == 8192 else None
        parts.append(("figure", f"contrasts-{task}", figures.contrasts_figure(contrasts, points)))
        parts.append(("table", f"contrasts-{task}", contrasts))
    parts.append(("table", f"usable-context-{task}", values.usable_context_table(needle, task)))
    return parts


def _protocol(runs: list[Run], task: str) -> str:
    """How the examples were made, and how long the prompts came out, from the evaluations' own records."""
    records = [run.niah for run in runs if run.niah and run.niah.get("config")]
    if not records:
        return ""
    sentences = []
    for reserved in sorted({record["config"]["max_new_tokens"] for record in records}):
        aside = "" if reserved == RULER_ANSWER_TOKENS else f" (RULER: {RULER_ANSWER_TOKENS})"
        sentences.append(f"A tested length includes {reserved} tokens{aside} for the answer.")
    if {record["config"]["fill"] for record in records} == {"unit"}:
        sentences.append(
            "The haystack is filled unit by unit, not in RULER's larger steps, which short lengths cannot hold."
        )
    reached: dict[int, list[int]] = {}
    for record in records:
        for score in record.get("scores", []):
            if score["task"] == task:
                ends = reached.setdefault(score["length"], [score["num_tokens"]["min"], score["num_tokens"]["max"]])
                ends[0] = min(ends[0], score["num_tokens"]["min"])
                ends[1] = max(ends[1], score["num_tokens"]["max"])
    if reached:
        listed = [
            f"{text.integer(low)} to {text.integer(high)} at {text.length_label(length)}"
            for length, (low, high) in sorted(reached.items())
        ]
        sentences.append(f"Tokens of the prompts: {', '.join(listed)}.")
    return " ".join(sentences)


def _sweep(runs: list[Run], reference: dict[str, Any] | None) -> list[Part]:
    parts: list[Part] = []
    for task, length in sweep.places(runs):
        same = reference is not None and text.task_label(task) == "S-NIAH-1" and length == 16384
        behind = reference["strength_sweep_s_niah_1_at_16384"] if reference and same else None
        parts.append(("figure", f"sweep-{task}-{length}", sweep.sweep_figure(runs, task, length, behind)))
        parts.append(("table", f"sweep-{task}-{length}", sweep.sweep_table(runs, task, length)))
    return parts


def _recall(runs: list[Run], reference: dict[str, Any] | None) -> list[Part]:
    parts: list[Part] = []
    for protocol in recall.protocols(runs):
        # The paper's protocol is lm-eval's whole document; a window of it is another task.
        behind = reference["recall_accuracy_percent"] if reference and protocol == "whole" else None
        parts.append(("figure", f"recall-{protocol}", recall.recall_figure(runs, protocol, behind)))
        parts.append(("table", f"recall-{protocol}", recall.recall_table(runs, protocol)))
    return parts


def _loss(runs: list[Run]) -> list[Part]:
    return [
        ("figure", "validation-loss", recall.loss_figure(runs)),
        ("table", "validation-loss", recall.loss_table(runs)),
    ]


def _inside(runs: list[Run]) -> list[Part]:
    parts: list[Part] = [
        ("figure", "needle-read", diagnostics.needle_figure(runs)),
        ("figure", "correction-through-state", diagnostics.attribution_figure(runs)),
        ("table", "correction", diagnostics.attribution_table(runs)),
        ("figure", "e-histogram", diagnostics.histogram_figure(runs, "e")),
    ]
    for axis, quantities in (("position", diagnostics.BY_POSITION), ("layer", diagnostics.BY_LAYER)):
        for quantity in quantities:
            parts.append(("figure", f"{quantity}-by-{axis}", diagnostics.course_figure(runs, quantity, axis)))
    return [*parts, ("table", "inside", diagnostics.summary_table(runs))]


def _training(needle: values.Needle) -> list[Part]:
    trained = [run for run in needle.runs if run.arm != "gdn2"]
    loss = figures.curve_figure(
        needle.runs, "loss", "Training loss", "loss, nats", "Loss of the logged steps, every run."
    )
    strength = figures.curve_figure(
        trained,
        "lambda_mean",
        "Strength during training",
        "mean strength",
        "Mean of the strengths over layers and heads; in the paper's 340M models they end near 0.101 and 0.120.",
    )
    return [
        ("figure", "training-loss", loss),
        ("figure", "training-loss-difference", figures.loss_difference_figure(needle.runs)),
        ("figure", "training-strength", strength),
        ("table", "runs", values.runs_table(needle)),
    ]


def _configs(runs: list[Run]) -> list[dict[str, Any]]:
    """Configurations, runs that differ in arm and seed alone under one heading."""
    groups: dict[str, dict[str, Any]] = {}
    for run in runs:
        shared = _without(run.config, ("arm", "seed"))
        key = json.dumps(shared, sort_keys=True)
        groups.setdefault(key, {"runs": [], "config": shared})["runs"].append(run.name)
    return list(groups.values())


def _without(tree: Any, names: tuple[str, ...]) -> Any:
    if isinstance(tree, dict):
        return {key: _without(value, names) for key, value in tree.items() if key not in names}
    return tree


def _version() -> str | None:
    try:
        return metadata.version("qed-attention")
    except metadata.PackageNotFoundError:
        return None
