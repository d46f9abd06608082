"""Run folders that are plainly synthetic: outcomes drawn from a stated curve, nothing trained."""

import math

import numpy as np
import pytest

from qed import statistics
from qed.records import read_json, write_json, write_rows
from qed.report import report

LENGTHS = (256, 512, 1024, 2048, 4096)


def write_run(
    folder, arm, seed, *, half_length, num_examples=60, train_length=256, num_steps=300, ceiling=1.0, **parts
):
    """Write a run whose accuracy falls as a logistic of log-length, crossing half at ``half_length``."""
    folder = folder / f"{arm}-seed{seed}"
    generator = np.random.default_rng([seed, len(arm)])
    config = {
        "arm": arm,
        "seed": seed,
        "model": {"hidden_size": 64, "num_layers": 2},
        "train": {"sequence_length": train_length, "learning_rate": 3e-3},
        "note": "synthetic <b>fixture</b>",
    }
    write_json(folder / "config.json", config)
    log = [
        {
            "step": step,
            "tokens": step * 8192,
            "loss": 6 * math.exp(-step / 80) + 0.4 + 0.05 * float(generator.random()),
            "lr": 3e-3,
            "grad_norm": 1.0,
            "lambda_mean": 0.0298 + 0.05 * step / num_steps,
        }
        for step in range(1, num_steps + 1)
    ]
    write_rows(folder / "train.jsonl", log)
    provenance = {"commit": "0123456789abcdef", "device": "synthetic device", "versions": {"torch": "2.13.0"}}
    record = {
        "num_parameters": 312_000,
        "num_tokens": num_steps * 8192,
        "seconds": 93.5,
        "tokens_per_second": 26_000.0,
        "provenance": provenance,
    }
    write_json(folder / "train.json", record)
    rows = []
    for length in LENGTHS:
        share = ceiling / (1 + (length / half_length) ** 2.5)
        right = generator.random(num_examples) < (ceiling if length == train_length else share)
        rows += [
            {
                "task": "niah_single_1",
                "length": length,
                "index": index,
                "num_tokens": length - 3,
                "prediction": "12",
                "answer": "12" if right[index] else "34",
                "correct": bool(right[index]),
            }
            for index in range(num_examples)
        ]
    write_rows(folder / "niah.jsonl", rows)
    scores = [
        {
            "task": "niah_single_1",
            "length": length,
            "num_tokens": {"min": length - 30, "mean": length - 20, "max": length - 16},
        }
        for length in LENGTHS
    ]
    niah = {"config": {"max_new_tokens": 16, "fill": "unit"}, "scores": scores, "provenance": provenance}
    write_json(folder / "niah.json", niah)
    if arm != "gdn2":
        record["lambda"] = [[0.09, 0.1], [0.11, 0.12 + 0.01 * seed]]
        write_json(folder / "train.json", record)
        write_json(folder / "strength.json", strength_record(generator, num_examples))
        write_json(folder / "probe.json", probe_record(generator))
    for name, value in parts.items():
        write_json(folder / f"{name}.json", value)
    return folder


def strength_record(generator, num_examples):
    """A sweep in the form of ``qed.evals.strength``, accuracies drawn around 30 to 50 %."""
    scores, comparisons = [], []
    base = generator.random(num_examples) < 0.4
    for strength in (-1.0, 0.0, 0.5, 1.0, 1.5, 2.0):
        right = base if strength == 1.0 else generator.random(num_examples) < 0.35 + 0.05 * strength
        place = {"task": "niah_single_1", "length": 2048, "strength": strength}
        share = float(right.mean())
        score = {"num_examples": num_examples, "num_correct": int(right.sum()), "accuracy": share}
        scores.append(place | score | {"wilson": list(statistics.wilson(int(right.sum()), num_examples))})
        if strength != 1.0:
            test = statistics.mcnemar(base, right)
            comparisons.append(place | {"difference": share - float(base.mean())} | test._asdict() | {"family_size": 5})
    for one, p in zip(comparisons, statistics.holm([one["p"] for one in comparisons]), strict=True):
        one["p_holm"] = p
    return {"kind": "strength", "scores": scores, "comparisons": comparisons}


def summary(values):
    quantiles = {str(q): float(np.quantile(values, q)) for q in (0.01, 0.5, 0.99)}
    ends = {"mean": float(values.mean()), "min": float(values.min()), "max": float(values.max())}
    return {"count": len(values), **ends, "quantiles": quantiles}


def effect_shares(generator):
    own = float(generator.random())
    sizes = {
        f"rms_{name}_over_output": float(generator.random()) for name in ("this_step", "earlier_steps", "all_steps")
    }
    return sizes | {"share_this_step": own, "share_through_state": 1 - own}


def probe_record(generator):
    """Diagnostics in the form of ``diagnostics.py``, drawn at random."""
    summaries = []
    for quantity in ("e", "projection_change", "state_norm"):
        values = generator.random(500) * (0.002 if quantity == "projection_change" else 1)
        counts, edges = np.histogram(values, bins=20, range=(0, 1))
        extra = {"histogram": {"counts": counts.tolist(), "edges": edges.tolist()}, "shares": {"outside (0, 1)": 0.0}}
        nothing = {"quantity": quantity, "layer": None, "head": None, "start": None, "end": None}
        summaries.append(nothing | summary(values) | extra)
        summaries += [nothing | {"layer": layer} | summary(values + layer) for layer in range(2)]
        summaries += [
            nothing | {"start": start, "end": 2 * start} | summary(values * start)
            for start in (64, 128, 256, 512, 1024)
        ]
    effects = [
        {"removed": what, "measure": "relative"} | summary(generator.random(200))
        for what in ("this step", "earlier steps", "all steps")
    ]
    read = np.concatenate([np.zeros(100), np.exp(-np.arange(300) / (100 + 100 * generator.random()))])
    needle = {"length": 400, "needle_start": 90, "needle_end": 100, "quantity": "read of the needle's key"}
    needle |= {"position": list(range(400)), "read": read.tolist()}
    attribution = [{"layer": None, "start": None, "end": None} | effect_shares(generator)]
    attribution += [
        {"layer": None, "start": start, "end": end} | effect_shares(generator) for start, end in ((0, 64), (64, 128))
    ]
    loss = {"as_trained": 2.1, "without": 2.2 + 0.1 * float(generator.random()), "num_targets": 499}
    measured = {"attribution": attribution, "loss": loss}
    return measured | {"kind": "probe", "num_tokens": 500, "summaries": summaries, "effects": effects, "needle": needle}


@pytest.fixture
def synthetic_run():
    return write_run


@pytest.fixture(scope="session")
def run_folders(tmp_path_factory):
    """Five seeds of two arms; qed's seed 3 never learns the task."""
    root = tmp_path_factory.mktemp("runs")
    folders = []
    for seed in range(5):
        folders.append(write_run(root, "gdn2", seed, half_length=800 + 150 * seed))
        folders.append(write_run(root, "qed", seed, half_length=1700 + 200 * seed, ceiling=0.1 if seed == 3 else 1.0))
    return folders


@pytest.fixture(scope="session")
def page(run_folders, tmp_path_factory):
    return report(run_folders, tmp_path_factory.mktemp("report"), title="Synthetic <runs> & more", label="laptop scale")


@pytest.fixture(scope="session")
def content(page):
    return read_json(page.parent / "report.json")
