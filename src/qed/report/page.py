"""Writes a report: one self-contained page, the numbers on it as JSON, its figures and its tables as files."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import jinja2

from qed.records import write_json, write_text

from . import comparisons, draw, figures, paper, tables, text, values
from .runs import Run, load_runs
from .statements import statements

DESCRIPTION = (
    "QED adds to the erase vector of Gated DeltaNet-2 a second direction taken from the query, projected orthogonal "
    "to the "
    "key. At strength zero it is GDN-2 exactly."
)


def report(runs: Iterable[Path | str], out: Path | str, *, title: str, label: str = "") -> Path:
    """Write the report of ``runs`` (run folders) into the folder ``out`` and return the path of its page.

    Written: ``index.html`` (no network, no other file needed), ``report.json`` (every number on the page), ``figures/``
    (SVG and PNG) and ``tables/`` (CSV and Markdown). ``label`` stands beside the title, such as "laptop scale".

    Raises:
        ValueError: no run, a path that is no run folder, or two folders of one arm and seed.
    """
    content = assemble(load_runs(runs), title=title, label=label)
    return write(content, Path(out))


def assemble(runs: list[Run], *, title: str, label: str = "") -> dict[str, Any]:
    """Every number of the report, as the JSON that ``report.json`` holds."""
    needle = values.Needle(runs)
    reference = paper.load()
    departures = {run.name: paper.departures(run, reference) for run in runs}
    comparable = not any(departures.values())
    content: dict[str, Any] = {"title": title, "label": label, "description": DESCRIPTION, "sections": []}
    content["software"] = {"qed-attention": _version(), "made_from": [run.name for run in runs]}
    content["figures"], content["tables"] = {}, {}

    def section(key: str, heading: str, lead: str, parts: list[tuple[str, str, dict[str, Any] | None]]) -> None:
        shown = []
        for kind, name, value in parts:
            if value is not None:
                content[f"{kind}s"][name] = value
                shown.append({"kind": kind, "name": name})
        if shown:
            content["sections"].append({"key": key, "heading": heading, "lead": lead, "parts": shown})

    pooled_first = None
    for task in needle.tasks:
        behind = paper.accuracies(reference) if comparable and text.task_label(task) == "S-NIAH-1" else None
        parts: list[tuple[str, str, dict[str, Any] | None]] = [
            ("figure", f"accuracy-{task}", figures.accuracy_figure(needle, task, behind)),
            ("table", f"accuracy-{task}", values.accuracy_table(needle, task)),
        ]
        for arm, base in comparisons.CONTRASTS:
            key = f"{task}-{arm}-{base}"
            pooled = comparisons.pooled_table(needle, task, arm, base)
            if (arm, base) == comparisons.CONTRASTS[0]:
                parts.append(
                    ("figure", f"difference-{key}", figures.difference_figure(needle, task, arm, base, pooled))
                )
                if task == needle.tasks[0]:
                    pooled_first = pooled
            parts.append(("table", f"over-seeds-{key}", pooled))
            parts.append(("table", f"paired-{key}", comparisons.paired_table(needle, task, arm, base)))
        length = needle.extrapolation_length(task)
        contrasts = comparisons.contrasts_table(needle, task, length) if length else None
        if contrasts is not None:
            points = reference["contrasts_at_8192_points"] if behind and length == 8192 else None
            parts.append(("figure", f"contrasts-{task}", figures.contrasts_figure(contrasts, points)))
            parts.append(("table", f"contrasts-{task}", contrasts))
        parts.append(("table", f"usable-context-{task}", values.usable_context_table(needle, task)))
        section(task, f"{text.task_label(task)}: finding a needle", "", parts)
    section(
        "training",
        "Training",
        "",
        [
            (
                "figure",
                "loss",
                figures.curve_figure(
                    runs, "loss", "Training loss", "loss, nats", "Loss of the logged steps, every run."
                ),
            ),
            (
                "figure",
                "strength",
                figures.curve_figure(
                    [run for run in runs if run.arm != "gdn2"],
                    "lambda_mean",
                    "Strength during training",
                    "mean strength over layers and heads",
                    "Mean of the trained strengths; the paper's 340M models end near 0.101 and 0.120.",
                ),
            ),
            ("table", "runs", values.runs_table(needle)),
        ],
    )
    away = sorted({departure for found in departures.values() for departure in found})
    section(
        "paper",
        "The paper's numbers",
        f"Source: {reference['source']}. "
        + (
            "The runs above share the paper's model size, token count and training length."
            if comparable
            else f"Not to be compared with the runs above, whose setting differs: {'; '.join(away)}."
        ),
        [("table", name, value) for name, value in paper.tables(reference).items()],
    )
    content["statements"] = statements(needle, needle.tasks[0] if needle.tasks else None, pooled_first)
    content["gaps"] = [{"run": run.name, "gap": gap} for run in runs for gap in run.gaps]
    content["configs"] = _configs(runs)
    return json.loads(json.dumps(content, allow_nan=False))


def write(content: dict[str, Any], out: Path) -> Path:
    """Write an assembled report; the page comes last."""
    drawings = {}
    for name, spec in content["figures"].items():
        svg, png = draw.draw(spec, name)
        write_text(out / "figures" / f"{name}.svg", svg)
        (out / "figures" / f"{name}.png").write_bytes(png)
        drawings[name] = draw.inline(svg, f"f-{name}", html.escape(f"{spec['title']}. {spec['caption']}"))
    for name, value in content["tables"].items():
        write_text(out / "tables" / f"{name}.csv", tables.to_csv(value))
        write_text(out / "tables" / f"{name}.md", tables.to_markdown(value))
    write_json(out / "report.json", content)
    write_text(out / "index.html", render(content, drawings))
    return out / "index.html"


def render(content: dict[str, Any], drawings: dict[str, str]) -> str:
    """The page; ``drawings`` are the figures' inline SVGs by name."""
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.globals["cells"] = tables.cells
    environment.globals["dumps"] = lambda value: json.dumps(value, ensure_ascii=False)
    data = json.dumps({"figures": content["figures"]}, allow_nan=False).replace("<", "\\u003c")
    return environment.from_string(_static("page.html")).render(
        content=content,
        drawings=drawings,
        css=_colours() + _static("page.css"),
        data=data,
        script=_static("page.js"),
        plotly=_static("plotly-basic.min.js"),
        licence=_static("plotly-license.txt"),
        colours={arm: draw.colour_name(arm) for arm in draw.ARM_COLOURS},
    )


def _colours() -> str:
    light = "".join(f"{name}:{pair[0]};" for name, pair in draw.palette().items())
    dark = "".join(f"{name}:{pair[1]};" for name, pair in draw.palette().items())
    return (
        f":root{{color-scheme:light;{light}}}\n"
        f"@media screen and (prefers-color-scheme:dark){{:root:not([data-theme=light]){{color-scheme:dark;{dark}}}}}\n"
        f"@media screen{{:root[data-theme=dark]{{color-scheme:dark;{dark}}}}}\n"
    )


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


def _static(name: str) -> str:
    return (resources.files("qed.report") / "static" / name).read_text(encoding="utf-8")


def _version() -> str | None:
    try:
        return metadata.version("qed-attention")
    except metadata.PackageNotFoundError:
        return None
