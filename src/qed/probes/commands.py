"""The probes as the command line calls them: plain arguments in, rows for a table out."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qed.config import to_dict
from qed.data.sources import read_texts
from qed.model.load import Checkpoint, find_checkpoints, fingerprint, load_model, load_tokenizer
from qed.records import provenance, read_json, read_rows, write_json, write_rows

from .draw import Held, draw_needle, draw_summary
from .measure import ProbeConfig, measure, needle_windows, text_windows
from .needle import make_needles, measure_needles

RECORD, ROWS, PICTURE, NEEDLE_PICTURE = "probe.json", "probe.jsonl", "probe", "probe-needle"
OWN_TEXT = "S-NIAH-1 prompts with their answers, words of the evaluation half"


def probe(
    checkpoints: Sequence[str],
    *,
    data: str | None = None,
    text_field: str = "text",
    out: str | None = None,
    config: ProbeConfig | None = None,
    device: str | None = None,
    dtype: str | None = None,
    progress: bool = True,
) -> list[dict[str, Any]]:
    """Measure the inside of every checkpoint, without changing it; one row of the main numbers each.

    Beside each run: ``probe.jsonl`` (rows by layer, head and position, and the needle's curves), pictures, and last
    ``probe.json``. A checkpoint whose record is of the same weights, windows and config is skipped. With several
    checkpoints ``probe-needle`` in the folder above compares them.

    Args:
        checkpoints: run folders, checkpoint folders or hub names, of this package's models.
        data: .txt, .jsonl, .parquet or a folder of them; without it the windows are needle prompts.
        text_field: field that holds the text.
        out: results go to <out>/<name>, by default to the run folders.
        config: how much is read.
        device, dtype: as in the evaluations; measurements are in float64 whatever the model's dtype.
        progress: show bars.

    Raises:
        ValueError: a path or text that does not fit, or a model without mixers.
    """
    config = config or ProbeConfig()
    found = find_checkpoints(checkpoints, out)
    records = [
        _probe(checkpoint, data, text_field, config, device=device, dtype=dtype, progress=progress)
        for checkpoint in found
    ]
    held = [
        Held(checkpoint.name, record["arm"], record["needle"], read_rows(checkpoint.folder / ROWS))
        for checkpoint, record in zip(found, records, strict=True)
        if record.get("needle")
    ]
    if len(held) > 1:
        draw_needle(held, (Path(out) if out else found[0].folder.parent) / NEEDLE_PICTURE)
    return [_line(checkpoint, record) for checkpoint, record in zip(found, records, strict=True)]


def _probe(
    checkpoint: Checkpoint,
    data: str | None,
    text_field: str,
    config: ProbeConfig,
    *,
    device: str | None,
    dtype: str | None,
    progress: bool,
) -> dict[str, Any]:
    tokenizer = load_tokenizer(checkpoint)
    if data is None:
        windows, source = needle_windows(tokenizer, config), OWN_TEXT
    else:
        windows, source = text_windows(read_texts(data, text_field=text_field), tokenizer, config), Path(data).name
    needles, problem = [], None
    try:
        needles = make_needles(tokenizer, config) if config.num_needles else []
    except ValueError as error:
        problem = str(error)
    model = load_model(checkpoint, device=device, dtype=dtype)
    identity: dict[str, Any] = {**fingerprint(model, tokenizer), "dtype": str(model.dtype).removeprefix("torch.")}
    # what the weights do not say of the correction
    identity |= {name: getattr(model.config, name, None) for name in ("arm", "lambda_max", "strength_scale")}
    content = hashlib.sha256(repr((windows, [needle.ids for needle in needles])).encode()).hexdigest()[:12]
    # how windows are grouped changes no number but rounding
    settings = {key: value for key, value in to_dict(config).items() if key not in ("batch_windows", "chunk_tokens")}
    run = hashlib.sha256(json.dumps([identity, content, settings], sort_keys=True).encode()).hexdigest()[:12]
    path = checkpoint.folder / RECORD
    if path.exists() and (checkpoint.folder / ROWS).exists() and read_json(path).get("run") == run:
        return read_json(path)
    started = time.perf_counter()
    measured, rows = measure(model, windows, config, progress=progress)
    record: dict[str, Any] = {
        "kind": "probe",
        "run": run,
        "arm": model.config.arm,
        "config": settings,
        "identity": identity,
        "source": source,
        "content": content,
        "num_windows": len(windows),
        "num_tokens": sum(map(len, windows)),
        **measured,
    }
    if needles:
        record["needle"], curves = measure_needles(model, needles, progress=progress)
        rows += curves
    if problem:
        record["needle_problem"] = problem
    record["seconds"] = round(time.perf_counter() - started, 3)
    record["provenance"] = provenance(seed=config.seed, device=str(model.device))
    # a record of other rows would not mean done
    path.unlink(missing_ok=True)
    write_rows(checkpoint.folder / ROWS, rows)
    draw_summary(record, checkpoint.name, checkpoint.folder / PICTURE)
    if needles:
        draw_needle([Held(checkpoint.name, record["arm"], record["needle"], rows)], checkpoint.folder / NEEDLE_PICTURE)
    write_json(path, record)
    return record


def _line(checkpoint: Checkpoint, record: dict[str, Any]) -> dict[str, Any]:
    def overall(name: str) -> dict[str, Any]:
        return next(row for row in record["summaries"] if row["quantity"] == name and _whole(row))

    e, change = overall("e"), overall("projection_change")
    line = {
        "checkpoint": checkpoint.name,
        "e_min": e["min"],
        "e_max": e["max"],
        "e_outside_0_1": e["shares"]["outside (0, 1)"],
        "projection_change_mean": change["mean"],
        "projection_change_max": change["max"],
        "strength": overall("strength")["mean"],
        "transition_norm_max": overall("transition_norm")["max"],
    }
    for row in record["attribution"]:
        if row["layer"] is None and row["start"] is None:
            line |= {name: row[name] for name in ("share_this_step", "share_through_state")}
    line["loss"] = record["loss"]["as_trained"]
    if "without" in record["loss"]:
        line["loss_without_correction"] = record["loss"]["without"]
    if "needle_problem" in record:
        line["problem"] = record["needle_problem"]
    return line


def _whole(row: dict[str, Any]) -> bool:
    return all(row[name] is None for name in ("layer", "head", "start"))
