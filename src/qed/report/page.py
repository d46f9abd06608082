"""Writes a report: one self-contained page, the numbers on it as JSON, its figures and its tables as files."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from qed.records import write_json, write_text

from . import draw, speed, tables
from .content import assemble
from .runs import load_runs


def report(
    runs: Iterable[Path | str],
    out: Path | str,
    *,
    title: str,
    label: str = "",
    benchmarks: Iterable[Path | str] = (),
) -> Path:
    """Write the report of ``runs`` (run folders) into the folder ``out`` and return the path of its page.

    Written: ``index.html`` (no network, no other file needed), ``report.json`` (every number on the page), ``figures/``
    (SVG and PNG) and ``tables/`` (CSV and Markdown). ``label`` stands beside the title, such as "laptop scale";
    ``benchmarks`` are result files of ``qed bench``.

    Raises:
        ValueError: no run, a path that is no run folder, two folders of one arm and seed, or no benchmark result.
    """
    content = assemble(load_runs(runs), title=title, label=label, benchmarks=speed.load(benchmarks))
    return write(content, Path(out))


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


def _static(name: str) -> str:
    return (resources.files("qed.report") / "static" / name).read_text(encoding="utf-8")
