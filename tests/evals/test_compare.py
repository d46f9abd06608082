import numpy as np
import pytest

from qed.evals.compare import compare
from qed.records import read_json, write_json, write_rows
from qed.statistics import mcnemar, paired_bootstrap, pool_over_seeds


def write_niah(folder, outcomes, tokenizer="aa", answer="7"):
    rows = [
        {
            "task": "niah_single_1",
            "length": length,
            "index": i,
            "key": f"k{i}",
            "answer": answer,
            "correct": bool(value),
        }
        for length, values in outcomes.items()
        for i, value in enumerate(values)
    ]
    write_rows(folder / "niah.jsonl", rows)
    write_json(folder / "niah.json", {"identity": {"tokenizer": tokenizer}})
    return folder


def write_loss(folder, nats, counts, content="c"):
    rows = [{"window": i, "nats": [n], "counts": [c]} for i, (n, c) in enumerate(zip(nats, counts, strict=True))]
    write_rows(folder / "loss.jsonl", rows)
    write_json(folder / "loss.json", {"content": content, "loss": sum(nats) / sum(counts)})
    return folder


def test_one_pair(tmp_path):
    a = write_niah(tmp_path / "a", {256: [1, 1, 1, 0, 1, 0], 512: [1, 0, 0, 0, 0, 0]})
    b = write_niah(tmp_path / "b", {256: [1, 1, 1, 1, 1, 1], 512: [1, 1, 1, 1, 1, 1], 1024: [1] * 6})
    result = compare([a], [b], out=tmp_path / "compare.json")
    assert result == read_json(tmp_path / "compare.json")
    assert [(entry["length"], entry["pooled"]["num_seeds"]) for entry in result["niah"]] == [(256, 1), (512, 1)]
    short, long = (entry["pairs"][0] for entry in result["niah"])
    assert (short["n01"], short["n10"], short["p"]) == (2, 0, 0.5)
    assert (long["n01"], long["n10"], long["p"]) == (5, 0, pytest.approx(2 / 32))
    assert (short["p_holm"], long["p_holm"], long["family_size"]) == (0.5, pytest.approx(4 / 32), 2)
    assert (long["first"], long["second"], long["difference"]) == (pytest.approx(1 / 6), 1.0, pytest.approx(5 / 6))


def test_seeds_are_paired_and_pooled(tmp_path):
    generator = np.random.default_rng(0)
    data = [generator.integers(0, 2, (2, 40)) for _ in range(3)]
    sides = [
        [write_niah(tmp_path / f"{arm}{seed}", {256: pair[i]}) for seed, pair in enumerate(data)]
        for i, arm in enumerate("ab")
    ]
    entry = compare(*sides)["niah"][0]
    for pair, (first, second) in zip(entry["pairs"], data, strict=True):
        assert (pair["n01"], pair["n10"], pair["p"]) == mcnemar(first, second)
        assert pair["low"] == paired_bootstrap(first, second, seed=0).low
    assert entry["pooled"] == pool_over_seeds([tuple(pair) for pair in data])._asdict()


def test_losses_weigh_tokens(tmp_path):
    a = write_loss(tmp_path / "a", [30.0, 20.0, 90.0], [10, 10, 30])
    b = write_loss(tmp_path / "b", [20.0, 20.0, 60.0], [10, 10, 30])
    entry = compare([a], [b])["loss"][0]
    assert entry["difference"] == pytest.approx(100 / 50 - 140 / 50)
    assert entry["low"] <= entry["difference"] <= entry["high"]
    write_loss(tmp_path / "b", [20.0, 20.0, 60.0], [10, 10, 30], content="d")
    with pytest.raises(ValueError, match="different windows"):
        compare([a], [b])


def test_other_examples_and_nothing_in_common_are_refused(tmp_path):
    a = write_niah(tmp_path / "a", {256: [1, 0]})
    b = write_niah(tmp_path / "b", {256: [1, 0]}, answer="8", tokenizer="bb")
    with pytest.raises(ValueError, match="same examples"):
        compare([a], [b])
    (tmp_path / "c").mkdir()
    with pytest.raises(ValueError, match="no evaluation is finished"):
        compare([a], [tmp_path / "c"])
    with pytest.raises(ValueError, match="1 and 0"):
        compare([a], [])
    same_text = write_niah(tmp_path / "d", {256: [1, 0]}, tokenizer="bb")
    assert compare([a], [same_text])["same_tokenizer"] is False
