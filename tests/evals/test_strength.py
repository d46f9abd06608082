import pytest
import torch

from qed.evals.niah import NiahConfig
from qed.evals.strength import StrengthConfig, compare_strengths, evaluate, strength_scale
from qed.records import read_rows
from qed.statistics import mcnemar

NIAH = NiahConfig(
    lengths=(256,), num_examples=6, max_new_tokens=8, fill="unit", longest_word=6, rows=6, chunk_tokens=64
)


def rows_of(**outcomes):
    return [
        {"task": "t", "length": 64, "strength": float(name[1:].replace("_", ".")), "index": i, "correct": bool(value)}
        for name, values in outcomes.items()
        for i, value in enumerate(values)
    ]


def test_comparisons_by_hand():
    rows = rows_of(s1=[1, 1, 1, 1, 1, 0], s0=[0, 0, 0, 0, 0, 0], s2=[1, 1, 1, 1, 1, 1])
    zero, two = compare_strengths(rows)
    assert (zero["strength"], zero["n01"], zero["n10"], zero["p"]) == (0.0, 0, 5, pytest.approx(2 / 32))
    assert (two["n01"], two["n10"], two["p"]) == (1, 0, 1.0)
    assert (zero["p_holm"], two["p_holm"], zero["family_size"]) == (pytest.approx(4 / 32), 1.0, 2)
    assert zero["difference"] == pytest.approx(-5 / 6)


def test_unpaired_strengths_are_refused():
    with pytest.raises(ValueError, match="same examples"):
        compare_strengths(rows_of(s1=[1, 0, 1], s0=[1, 0]))


def test_scale_acts_inside_and_leaves_no_trace(qed_model):
    ids = torch.arange(1, 40)[None]
    weights = {name: tensor.clone() for name, tensor in qed_model.state_dict().items()}
    with torch.inference_mode():
        before = qed_model(ids).logits
        with strength_scale(qed_model, 2.0):
            doubled = qed_model(ids).logits
        with pytest.raises(RuntimeError), strength_scale(qed_model, -1.0):
            raise RuntimeError
        assert torch.equal(qed_model(ids).logits, before)
    assert (doubled - before).abs().max() > 1e-3
    assert all(torch.equal(tensor, weights[name]) for name, tensor in qed_model.state_dict().items())


def test_a_model_without_strength_is_refused(llama, tokenizer, tmp_path):
    with pytest.raises(ValueError, match="'llama' has none"):
        evaluate(llama, tokenizer, StrengthConfig(niah=NIAH), tmp_path, progress=False)


def test_one_must_be_among_the_strengths():
    with pytest.raises(ValueError, match="hold 1"):
        StrengthConfig(strengths=(0.0, 2.0))


def test_sweep_pairs_the_same_examples_through_prefill_and_decoding(qed_model, tokenizer, tmp_path):
    config = StrengthConfig(strengths=(0.0, 1.0, 40.0), niah=NIAH)
    record = evaluate(qed_model, tokenizer, config, tmp_path, progress=False)
    rows = read_rows(tmp_path / "strength.jsonl")
    by_strength = {s: [row for row in rows if row["strength"] == s] for s in (0.0, 1.0, 40.0)}
    for group in by_strength.values():
        assert [(row["index"], row["key"], row["num_tokens"]) for row in group] == [
            (row["index"], row["key"], row["num_tokens"]) for row in by_strength[1.0]
        ]
    predictions = {s: [row["prediction"] for row in group] for s, group in by_strength.items()}
    assert predictions[40.0] != predictions[1.0]
    first, second = ([row["correct"] for row in by_strength[s]] for s in (1.0, 0.0))
    entry = next(entry for entry in record["comparisons"] if entry["strength"] == 0.0)
    assert (entry["n01"], entry["n10"], entry["p"]) == mcnemar(first, second)
    assert evaluate(qed_model, tokenizer, config, tmp_path, progress=False) == record
