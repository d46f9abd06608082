"""The evaluations as the command line calls them: plain arguments in, rows for a table out.

Whatever is missing (a file, a package, a length that cannot hold its examples) is named before a model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import nearest
from ..data.prose import load_prose
from ..data.sources import read_texts
from ..model.load import find_checkpoints, load_model, load_tokenizer
from . import compare as comparison
from . import loss as loss_evaluation
from . import niah as niah_evaluation
from . import recall as recall_evaluation
from . import strength as strength_evaluation
from .loss import LossConfig
from .niah import NiahConfig, needle_tasks
from .recall import RecallConfig
from .strength import STRENGTHS, StrengthConfig

Row = dict[str, Any]
PARTS = ("niah", "strength", "recall", "loss")
EMBEDDED = "embedded prose, which the default training corpus holds too"


@dataclass(frozen=True)
class Part:
    """One evaluation. ``check`` raises for what ``tokenizer`` makes impossible; ``run`` takes model, tokenizer, folder
    and progress and returns a record; ``rows`` are the record's lines in a table.
    """

    name: str
    check: Callable[[Any], object]
    run: Callable[[Any, Any, Path, bool], dict[str, Any]]
    rows: Callable[[dict[str, Any]], list[Row]]


def niah(
    checkpoints: Sequence[str],
    *,
    out: str | None = None,
    config: NiahConfig | None = None,
    device: str | None = None,
    dtype: str | None = None,
    progress: bool = True,
) -> list[Row]:
    """S-NIAH: one row a checkpoint, task and length."""
    return _run([_niah_part(config or NiahConfig())], checkpoints, out, device, dtype, progress)


def strength(
    checkpoints: Sequence[str],
    *,
    out: str | None = None,
    strengths: Sequence[float] = STRENGTHS,
    config: NiahConfig | None = None,
    device: str | None = None,
    dtype: str | None = None,
    progress: bool = True,
) -> list[Row]:
    """The strength sweep: one row a checkpoint, task, length and s, with paired counts against s = 1."""
    part = _strength_part(StrengthConfig(strengths=tuple(strengths), niah=config or NiahConfig()))
    return _run([part], checkpoints, out, device, dtype, progress)


def recall(
    checkpoints: Sequence[str],
    *,
    out: str | None = None,
    data: str | None = None,
    config: RecallConfig | None = None,
    device: str | None = None,
    dtype: str | None = None,
    progress: bool = True,
) -> list[Row]:
    """FDA, SWDE and SQuAD completion from ``data``, a folder of <task>.jsonl, or through lm-eval without one."""
    return _run([_recall_part(config or RecallConfig(), data)], checkpoints, out, device, dtype, progress)


def loss(
    checkpoints: Sequence[str],
    *,
    out: str | None = None,
    data: str | None = None,
    text_field: str = "text",
    config: LossConfig | None = None,
    device: str | None = None,
    dtype: str | None = None,
    progress: bool = True,
) -> list[Row]:
    """Validation loss on ``data`` (.txt, .jsonl, .parquet or a folder), by default on the embedded prose."""
    return _run([_loss_part(config or LossConfig(), data, text_field)], checkpoints, out, device, dtype, progress)


def everything(
    checkpoints: Sequence[str],
    *,
    out: str | None = None,
    parts: Sequence[str] = PARTS,
    niah: NiahConfig | None = None,
    strengths: Sequence[float] = STRENGTHS,
    recall: RecallConfig | None = None,
    recall_data: str | None = None,
    loss: LossConfig | None = None,
    loss_data: str | None = None,
    text_field: str = "text",
    device: str | None = None,
    dtype: str | None = None,
    progress: bool = True,
) -> list[Row]:
    """Every part on every checkpoint; what is done is skipped, each model is loaded once.

    A part that cannot run (data that is not there, a model without strengths) becomes a row whose ``problem`` says why,
    and the others go on.
    """
    needles = niah or NiahConfig()
    makers: dict[str, Callable[[], Part]] = {
        "niah": lambda: _niah_part(needles),
        "strength": lambda: _strength_part(StrengthConfig(strengths=tuple(strengths), niah=needles)),
        "recall": lambda: _recall_part(recall or RecallConfig(), recall_data),
        "loss": lambda: _loss_part(loss or LossConfig(), loss_data, text_field),
    }
    ready: list[Part] = []
    rows: list[Row] = []
    find_checkpoints(checkpoints, out)
    for name in parts:
        if name not in makers:
            raise ValueError(nearest("evaluation", name, PARTS))
        try:
            ready.append(makers[name]())
        except ValueError as error:
            rows += [{"checkpoint": given, "evaluation": name, "problem": str(error)} for given in checkpoints]
    return _run(ready, checkpoints, out, device, dtype, progress, keep_going=True) + rows


def compare(first: Sequence[str], second: Sequence[str], *, out: str | None = None) -> list[Row]:
    """``second - first`` for all that both finished: a row for each pair, and for several pairs one that pools them.

    A folder that holds finished evaluations needs no checkpoint.
    """
    folders = [[_results(given) for given in side] for side in (first, second)]
    for side in folders:
        for i, folder in enumerate(side):
            if folder in side[:i]:
                raise ValueError(f"{folder} is given twice on one side; wanted a folder for each seed")
    result = comparison.compare(*folders, out=out)
    rows = []
    for kind in comparison.KINDS:
        for entry in result.get(kind, ()):
            group = {"evaluation": kind, **{k: v for k, v in entry.items() if k not in ("pairs", "pooled")}}
            rows += [{**group, "pair": i, **pair} for i, pair in enumerate(entry["pairs"])]
            if len(entry["pairs"]) > 1:
                pooled = entry["pooled"]
                shown = {key: pooled[key] for key in ("low", "high", "p", "num_seeds", "between_seed_sd")}
                rows.append({**group, "pair": "pooled", "difference": pooled["estimate"], **shown})
    rows += [{"evaluation": "loss", "pair": i, **pair} for i, pair in enumerate(result.get("loss", ()))]
    return rows


def _results(given: str) -> Path:
    if any((Path(given) / f"{name}.json").is_file() for name in (*comparison.KINDS, "loss")):
        return Path(given)
    return find_checkpoints([given])[0].folder


def table(rows: Sequence[Row]) -> str:
    """``rows`` as aligned text, columns in the order of their first appearance."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cells = [columns, *[[_cell(row.get(column)) for column in columns] for row in rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells
    )


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return " to ".join(map(_cell, value))
    return str(value)


def _run(
    parts: Sequence[Part],
    checkpoints: Sequence[str],
    out: str | None,
    device: str | None,
    dtype: str | None,
    progress: bool,
    keep_going: bool = False,
) -> list[Row]:
    rows: list[Row] = []
    for checkpoint in find_checkpoints(checkpoints, out):
        tokenizer = load_tokenizer(checkpoint)
        problems: dict[str, str] = {}
        for part in parts:
            try:
                part.check(tokenizer)
            except ValueError as error:
                if not keep_going:
                    raise
                problems[part.name] = str(error)
        model = load_model(checkpoint, device=device, dtype=dtype) if len(problems) < len(parts) else None
        for part in parts:
            if part.name not in problems:
                try:
                    record = part.run(model, tokenizer, checkpoint.folder, progress)
                    rows += [
                        {"checkpoint": checkpoint.name, "evaluation": part.name, **row} for row in part.rows(record)
                    ]
                    continue
                except ValueError as error:
                    if not keep_going:
                        raise
                    problems[part.name] = str(error)
            rows.append({"checkpoint": checkpoint.name, "evaluation": part.name, "problem": problems[part.name]})
    return rows


def _niah_part(config: NiahConfig) -> Part:
    def run(model: Any, tokenizer: Any, folder: Path, progress: bool) -> dict[str, Any]:
        return niah_evaluation.evaluate(model, tokenizer, config, folder, progress=progress)

    return Part("niah", lambda tokenizer: needle_tasks(config, tokenizer), run, _accuracy_rows)


def _strength_part(config: StrengthConfig) -> Part:
    def run(model: Any, tokenizer: Any, folder: Path, progress: bool) -> dict[str, Any]:
        return strength_evaluation.evaluate(model, tokenizer, config, folder, progress=progress)

    def rows(record: dict[str, Any]) -> list[Row]:
        tests = {(c["task"], c["length"], c["strength"]): c for c in record["comparisons"]}
        scores = _accuracy_rows(record)
        for score in scores:
            test = tests.get((score["task"], score["length"], score["strength"]), {})
            score.update({column: test.get(column) for column in ("n01", "n10", "p", "p_holm")})
        return scores

    return Part("strength", lambda tokenizer: needle_tasks(config.niah, tokenizer), run, rows)


def _recall_part(config: RecallConfig, data: str | None) -> Part:
    if data is None:
        examples, source = recall_evaluation.read_harness(config.tasks), "lm-eval"
    else:
        examples = recall_evaluation.read_local(data, config.tasks)
        named = sorted({str(row["source"]) for rows in examples.values() for row in rows if row.get("source")})
        source = ": ".join(["local files", *named])

    def run(model: Any, tokenizer: Any, folder: Path, progress: bool) -> dict[str, Any]:
        return recall_evaluation.evaluate(model, tokenizer, examples, config, folder, source=source, progress=progress)

    def check(tokenizer: Any) -> None:
        for task in config.tasks:
            for protocol in config.protocols:
                recall_evaluation.prompt(task, protocol, examples[task][0], tokenizer, config)

    return Part("recall", check, run, _accuracy_rows)


def _loss_part(config: LossConfig, data: str | None, text_field: str) -> Part:
    texts = load_prose() if data is None else list(read_texts(data, text_field=text_field))
    source = EMBEDDED if data is None else str(data)

    def run(model: Any, tokenizer: Any, folder: Path, progress: bool) -> dict[str, Any]:
        return loss_evaluation.evaluate(model, tokenizer, texts, config, folder, source=source, progress=progress)

    def rows(record: dict[str, Any]) -> list[Row]:
        whole = {"start": 1, "end": record["config"]["length"], "num_targets": record["num_targets"]}
        return [{**bucket} for bucket in [{**whole, "loss": record["loss"]}, *record["buckets"]]]

    return Part("loss", lambda tokenizer: loss_evaluation.make_windows(texts, tokenizer, config), run, rows)


def _accuracy_rows(record: dict[str, Any]) -> list[Row]:
    columns = ("task", "protocol", "length", "strength", "num_correct", "num_examples", "accuracy", "wilson")
    return [{column: score[column] for column in columns if column in score} for score in record["scores"]]
