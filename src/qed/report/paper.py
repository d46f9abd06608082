"""The paper's own numbers: shipped as data, shown with their source, set beside runs only where the settings agree."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from . import text
from .runs import Run
from .tables import table

ORIGIN = "the paper"


def load() -> dict[str, Any]:
    """The paper's reference numbers with their source (arXiv 2608.13668)."""
    return json.loads(resources.files("qed.report").joinpath("paper.json").read_text(encoding="utf-8"))


def departures(run: Run, reference: dict[str, Any]) -> list[str]:
    """How a run's setting departs from the paper's, in words; empty where the two are comparable."""
    model = reference["model"]
    wanted = (
        ("parameters", run.lookup("num_parameters"), 340e6, 0.05),
        ("training tokens", run.lookup("num_tokens"), model["tokens"], 0.05),
    )
    found = []
    for what, value, paper, tolerance in wanted:
        if not isinstance(value, int | float):
            found.append(f"{what} not recorded")
        elif abs(value - paper) > tolerance * paper:
            found.append(f"{text.count(value)} {what} (paper: {text.count(paper)})")
    if run.train_length != model["train_length"]:
        length = "not recorded" if run.train_length is None else text.length_label(run.train_length)
        found.append(f"training length {length} (paper: {text.length_label(model['train_length'])})")
    return found


def accuracies(reference: dict[str, Any]) -> dict[str, Any]:
    """S-NIAH-1 accuracies in percent by arm and seed, with their ``lengths``."""
    block = reference["s_niah_1_accuracy_percent"]
    return {key: value for key, value in block.items() if key == "lengths" or isinstance(value, dict)}


def tables(reference: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The paper's Tables 2 (loss and recall), 3 (needle) and 4 (strength) as tables of ours, marked as the paper's."""
    loss = reference["validation_loss_nats"]
    needle = reference["s_niah_1_accuracy_percent"]
    recall = reference["recall_accuracy_percent"]
    sweep = reference["strength_sweep_s_niah_1_at_16384"]
    derived = set(needle["derived"])
    losses = [
        {"arm": text.arm_label(arm), "seed0": loss["seed0"][i], "seed1": loss["seed1"][i]}
        for i, arm in enumerate(loss["arms"])
    ]
    lengths = needle["lengths"]
    needles = []
    for arm, seeds in accuracies(reference).items():
        if arm == "lengths":
            continue
        for seed in sorted(seeds):
            row: dict[str, Any] = {"arm": text.arm_label(arm), "seed": int(seed[-1])}
            for length, value in zip(lengths, seeds[seed], strict=True):
                mark = "*" if f"{arm} {seed} {length}" in derived else ""
                row[str(length)] = None if value is None else f"{value:.1f}{mark}"
            needles.append(row)
    recalls = [
        {"task": text.task_label(task), "arm": text.arm_label(arm), "seed0": values["seed0"], "seed1": values["seed1"]}
        for task, arms in recall.items()
        for arm, values in arms.items()
    ]
    sweeps = [
        {"seed": int(seed[-1])} | dict(zip(map(str, sweep["s"]), sweep[seed], strict=True))
        for seed in ("seed0", "seed1")
    ]
    return {
        "paper-loss": table(
            "Validation loss, nats",
            [("arm", "arm", "text"), ("seed0", "seed 0", "loss"), ("seed1", "seed 1", "loss")],
            losses,
            caption="340M parameters, 15B tokens.",
            origin=ORIGIN,
        ),
        "paper-needle": table(
            "S-NIAH-1 accuracy by tested length, percent",
            [
                ("arm", "arm", "text"),
                ("seed", "seed", "integer"),
                *((str(length), text.length_label(length), "given") for length in lengths),
            ],
            needles,
            caption=f"Trained at 2K tokens; {needle['examples_per_length']} examples a length. * computed from a "
            "difference that the sources print; a dash is a value they do not give.",
            origin=ORIGIN,
        ),
        "paper-recall": table(
            "Recall tasks, accuracy in percent",
            [
                ("task", "task", "text"),
                ("arm", "arm", "text"),
                ("seed0", "seed 0", "number"),
                ("seed1", "seed 1", "number"),
            ],
            recalls,
            caption="Zero-shot; short documents, so recall and not extrapolation.",
            origin=ORIGIN,
        ),
        "paper-strength": table(
            "Strength sweep: S-NIAH-1 at 16K tokens, percent",
            [
                ("seed", "seed", "integer"),
                *((str(s), f"s = {s}".replace("-", text.MINUS), "number") for s in sweep["s"]),
            ],
            sweeps,
            caption="Trained strengths multiplied by s at inference. The column s = 1 differs from the S-NIAH-1 "
            "table (65.6 and 59.8 for seed 1) without explanation: compare strengths only within this table. "
            "The paper gives no paired counts.",
            origin=ORIGIN,
        ),
    }
