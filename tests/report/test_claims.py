"""Verdicts never go further than the runs: each branch on outcomes made to order."""

from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from qed import statistics
from qed.report import recall
from qed.report.claims import claims_table, initial_strength
from qed.report.runs import Run
from qed.report.values import Needle

LENGTHS = (256, 1024)
EXTRAPOLATION = "QED finds the needle more often than GDN-2 past the training length (at 1K)"
FREE = "At the training length QED costs nothing"
CONTEXT = "Usable context about doubles (length where accuracy falls to 50 %)"
SWEEP = "The trained correction is used at inference: accuracy falls when it is removed (s = 0)"


def run(arm, seed, shares, *, lengths=LENGTHS, num_examples=100, **parts):
    """A run that answers the first ``share`` of the examples of each length."""
    rows = [
        {"task": "niah_single_1", "length": length, "index": i, "correct": i < round(share * num_examples)}
        for length, share in zip(lengths, shares, strict=True)
        for i in range(num_examples)
    ]
    config = {"train": {"sequence_length": 256}}
    return Run(folder=Path(f"{arm}-seed{seed}"), arm=arm, seed=seed, config=config, outcomes=rows, **parts)


def claim(runs, sentence):
    rows = claims_table(Needle(runs), comparable=False)["rows"]
    return next(row for row in rows if row["claim"] == sentence)


def runs_of(first, second):
    arms = (("gdn2", first), ("qed", second))
    return [run(arm, seed, (1.0, share)) for arm, shares in arms for seed, share in enumerate(shares)]


@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [
        ((0.2, 0.25, 0.2), (0.7, 0.8, 0.75), "supported"),
        ((0.7, 0.8, 0.75), (0.2, 0.25, 0.2), "contradicted"),
        ((0.2, 0.9, 0.5), (0.9, 0.2, 0.6), "not decided"),
    ],
)
def test_verdict_follows_the_interval_over_seeds(first, second, verdict):
    found = claim(runs_of(first, second), EXTRAPOLATION)
    assert found["verdict"] == verdict
    differences = np.subtract(second, first)
    interval = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
    assert (interval.low > 0) == (verdict == "supported")
    assert f"{100 * differences.mean():.1f}".lstrip("-") in found["result"]


def test_one_seed_decides_nothing():
    found = claim(runs_of((0.2,), (0.9,)), EXTRAPOLATION)
    assert found["verdict"] == "not decided"
    assert found["result"] == "+70.0 points in one seed: an illustration"


def test_pairs_that_never_learned_are_left_out_and_counted():
    runs = [*runs_of((0.2, 0.25, 0.2), (0.7, 0.8, 0.75)), run("gdn2", 3, (1.0, 0.9)), run("qed", 3, (0.1, 0.0))]
    found = claim(runs, EXTRAPOLATION)
    assert found["verdict"] == "supported"
    assert "over 3 seeds; 1 left out, never learned" in found["result"]
    only = [run("gdn2", 3, (1.0, 0.9)), run("qed", 3, (0.1, 0.0))]
    assert claim(only, EXTRAPOLATION)["result"] == "no seed in which QED and GDN-2 both learned"


def test_no_cost_at_the_training_length_allows_five_points_less():
    better = [run(arm, seed, (1.0, 0.5)) for arm in ("gdn2", "qed") for seed in range(3)]
    assert claim(better, FREE)["verdict"] == "supported"
    shares = {"gdn2": (1.0, 0.99, 1.0), "qed": (0.95, 0.97, 0.96)}
    close = [run(arm, seed, (share, 0.5)) for arm, values in shares.items() for seed, share in enumerate(values)]
    assert claim(close, FREE)["verdict"] == "not decided"


def test_usable_context_is_a_ratio_over_seeds():
    lengths = (256, 512, 1024, 2048, 4096)
    base, doubled = (1.0, 0.5, 0.0, 0.0, 0.0), (1.0, 1.0, 0.5, 0.0, 0.0)
    slower = (1.0, 0.96, 0.5, 0.0, 0.0), (1.0, 1.0, 0.96, 0.5, 0.0)
    runs = [
        run(arm, seed, shares, lengths=lengths)
        for seed, pair in enumerate([(base, doubled), slower, (base, doubled)])
        for arm, shares in zip(("gdn2", "qed"), pair, strict=True)
    ]
    found = claim(runs, CONTEXT)
    assert found["result"].startswith("2.00 times [")
    endless = [*runs, run("gdn2", 3, base, lengths=lengths), run("qed", 3, (1.0,) * 5, lengths=lengths)]
    open_ended = claim(endless, CONTEXT)
    assert "1 without a crossing in the tested lengths" in open_ended["result"]
    assert open_ended["verdict"] == "not decided"


def swept(seed, difference, p_holm):
    comparison = {"task": "niah_single_1", "length": 1024, "strength": 0.0, "difference": difference}
    comparison |= {"n01": 3, "n10": 20, "p": p_holm, "p_holm": p_holm, "family_size": 5}
    score = {"task": "niah_single_1", "length": 1024, "strength": 0.0, "accuracy": 0.2, "wilson": [0.1, 0.3]}
    sweep = {"scores": [score | {"num_examples": 100}], "comparisons": [comparison]}
    return run("qed", seed, (1.0, 0.5), strength=sweep)


def test_sweep_needs_every_model_to_say_the_same():
    both = [swept(0, -0.2, 0.001), swept(1, -0.1, 0.02)]
    assert claim(both, SWEEP)["verdict"] == "supported"
    assert "−20.0 points, 3 gained and 20 lost, p = 0.001" in claim(both, SWEEP)["result"]
    assert claim([swept(0, -0.2, 0.001), swept(1, -0.1, 0.2)], SWEEP)["verdict"] == "not decided"
    assert claim([swept(0, 0.2, 0.001), swept(1, 0.1, 0.02)], SWEEP)["verdict"] == "contradicted"
    assert claim([swept(0, -0.2, 0.001)], SWEEP)["verdict"] == "not decided"


def test_strength_is_compared_with_the_runs_own_start():
    runs = [run("qed", seed, (1.0, 0.5), train={"lambda": [[0.1, 0.11 + 0.01 * seed]]}) for seed in range(3)]
    found = claim(runs, "Training raises the strength above its start")
    assert found["verdict"] == "supported"
    assert "from 0.0298" in found["result"]
    assert initial_strength(runs[0]) == pytest.approx(0.25 / (1 + np.exp(2)))
    higher = [
        run("qed", seed, (1.0, 0.5), train={"lambda": [[0.1]], "lambda_max": 0.5, "theta_init": 0.0})
        for seed in range(2)
    ]
    assert claim(higher, "Training raises the strength above its start")["verdict"] == "contradicted"


def with_loss(arm, seed, loss):
    record = {"loss": loss, "num_targets": 1000, "config": {"length": 256}, "buckets": []}
    return run(arm, seed, (1.0, 0.5), loss=record)


@pytest.mark.parametrize(
    ("losses", "verdict"),
    [((2.3715, 2.374, 2.372), "supported"), ((2.5, 2.5, 2.5), "contradicted"), ((2.36, 2.4, 2.37), "not decided")],
)
def test_loss_is_the_same_within_a_stated_margin(losses, verdict):
    base = (2.3714, 2.3746, 2.3720)
    runs = [with_loss("gdn2", seed, loss) for seed, loss in enumerate(base)]
    runs += [with_loss("qed", seed, loss) for seed, loss in enumerate(losses)]
    found = claim(runs, "Validation loss stays the same")
    assert found["verdict"] == verdict
    interval = stats.ttest_1samp(np.subtract(losses, base), 0).confidence_interval(0.95)
    assert f"{interval.low:+.4f}".replace("-", "−") in found["result"]


def with_recall(arm, seed, share):
    rows = [{"task": "fda", "protocol": "whole", "index": i, "correct": i < round(100 * share)} for i in range(100)]
    score = {
        "task": "fda",
        "protocol": "whole",
        "accuracy": share,
        "wilson": list(statistics.wilson(round(100 * share), 100)),
    }
    record = {"scores": [score], "source": "local <files>"}
    return run(arm, seed, (1.0, 0.5), recall=record, recall_rows=rows)


def test_recall_is_paired_by_document():
    shares = {"gdn2": (0.1, 0.12, 0.1), "qed": (0.2, 0.21, 0.22)}
    runs = [with_recall(arm, seed, share) for arm, values in shares.items() for seed, share in enumerate(values)]
    found = claim(runs, "QED recalls more on FDA")
    assert found["verdict"] == "supported"
    assert found["result"].startswith("+10.3 [")
    table = recall.recall_table(runs, "whole")
    assert [row["fda"][0] for row in table["rows"]] == [0.1, 0.12, 0.1, 0.2, 0.21, 0.22]
    drawn = recall.recall_figure(runs, "whole", None)["series"]
    assert sorted(one["y"][0] for one in drawn) == pytest.approx([10, 10, 12, 20, 21, 22])
