import ast
import json
import runpy
import shutil
import sys
from pathlib import Path

import pytest

from qed.evals import commands, engine, loss
from qed.evals.harness import main as harness
from qed.evals.loss import LossConfig
from qed.evals.niah import NiahConfig
from qed.evals.recall import RecallConfig
from qed.model.load import find_checkpoints, load_model
from qed.records import read_json

NIAH = NiahConfig(lengths=(256,), num_examples=4, max_new_tokens=8, fill="unit", longest_word=6, rows=4)
LOSS = LossConfig(length=128, num_tokens=512)
RECALL = RecallConfig(tasks=("fda",), max_new_tokens=4)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, qed_model, llama, tokenizer):
    """A run folder of this package's model, one of a Transformer, and a folder of recall rows."""
    folder = tmp_path_factory.mktemp("runs")
    for name, model in (("qed-seed0", qed_model), ("llama-seed0", llama)):
        model.save_pretrained(folder / name / "checkpoint")
        tokenizer.save_pretrained(folder / name / "checkpoint")
    row = {"key": "name", "value": "Xavier", "text": "The grass is green. Its name is Xavier. name:"}
    (folder / "recall").mkdir()
    (folder / "recall" / "fda.jsonl").write_text(json.dumps(row))
    return folder


def test_everything_on_two_kinds_of_model_then_skips(runs, monkeypatch):
    given = [str(runs / "qed-seed0"), str(runs / "llama-seed0" / "checkpoint")]
    settings = {
        "strengths": (0.0, 1.0), "niah": NIAH, "recall": RECALL, "recall_data": str(runs / "recall"), "loss": LOSS,
        "device": "cpu", "progress": False,
    }  # fmt: skip
    rows = commands.everything(given, **settings)
    done = {(row["checkpoint"], row["evaluation"]) for row in rows if "problem" not in row}
    assert done == {(c, e) for c in ("qed-seed0", "llama-seed0") for e in commands.PARTS} - {
        ("llama-seed0", "strength")
    }
    (problem,) = [row for row in rows if "problem" in row]
    assert "'llama' has none" in problem["problem"]
    for name in ("niah", "strength", "recall", "loss"):
        assert read_json(runs / "qed-seed0" / f"{name}.json")["kind"] == name
    monkeypatch.setattr(engine, "measure_calls", None)
    monkeypatch.setattr(loss, "measure_calls", None)
    assert commands.everything(given, **settings) == rows
    text = commands.table(rows)
    assert text.splitlines()[0].startswith("checkpoint")
    assert len(text.splitlines()) == len(rows) + 1
    compared = commands.compare([given[0]], [given[1]])
    assert {row["evaluation"] for row in compared} == {"niah", "recall", "loss"}
    with pytest.raises(ValueError, match="twice"):
        commands.compare([given[0]] * 2, [given[1]] * 2)
    for name, folder in (("qed", "qed-seed0"), ("llama", "llama-seed0")):
        (runs / "kept" / name).mkdir(parents=True)
        for file in ("loss.json", "loss.jsonl"):
            shutil.copyfile(runs / folder / file, runs / "kept" / name / file)
    without_checkpoint = commands.compare([str(runs / "kept" / "qed")], [str(runs / "kept" / "llama")])
    assert without_checkpoint == [row for row in compared if row["evaluation"] == "loss"]

    # The collector reads these records: a table for each, and every score of theirs in the JSON.
    arguments = ["collect.py", str(runs / "llama-seed0"), str(runs / "qed-seed0"), "--out", str(runs / "table")]
    monkeypatch.setattr(sys, "argv", arguments)
    runpy.run_path(str(Path(__file__).parents[2] / "docs" / "evaluation" / "collect.py"), run_name="__main__")
    (score,) = read_json(runs / "qed-seed0" / "niah.json")["scores"]
    (kept,) = read_json(runs / "table.json")["runs"]["qed-seed0"]["niah"]["scores"]
    assert kept["wilson"] == pytest.approx(score["wilson"], rel=1e-5)
    assert kept | {"wilson": 0, "exact": 0} == score | {"wilson": 0, "exact": 0}
    lines = (runs / "table.md").read_text().splitlines()
    assert f"| qed-seed0 | {score['num_correct']}/4 (" in "\n".join(lines)
    assert [line for line in lines if line.startswith("## ")] == [
        "## S-NIAH-1", "## S-NIAH-1: strength", "## Recall", "## Loss", "## Differences between the arms",
    ]  # fmt: skip


def test_missing_things_are_named_before_a_model_loads(runs, monkeypatch):
    monkeypatch.setattr(commands, "load_model", None)
    given = [str(runs / "qed-seed0")]
    with pytest.raises(ValueError, match="smallest"):
        commands.niah(given, config=NiahConfig(lengths=(16,)))
    with pytest.raises(ValueError, match=r"swde.jsonl"):
        commands.recall(given, data=str(runs / "recall"), config=RecallConfig(tasks=("swde",)))
    with pytest.raises(ValueError, match="no such file"):
        commands.loss(given, data=str(runs / "absent.txt"))
    with pytest.raises(ValueError, match="'niah'"):
        commands.everything(given, parts=("nia",))


def test_where_checkpoints_are_and_results_go(runs, tmp_path):
    (inside, folder) = find_checkpoints([str(runs / "qed-seed0"), str(runs / "llama-seed0" / "checkpoint")])
    assert (inside.folder, folder.folder) == (runs / "qed-seed0", runs / "llama-seed0")
    (moved,) = find_checkpoints([str(runs / "qed-seed0")], tmp_path)
    assert moved.folder == tmp_path / "qed-seed0"
    (hub,) = find_checkpoints(["owner/model"], tmp_path)
    assert (hub.model, hub.folder) == ("owner/model", tmp_path / "owner--model")
    with pytest.raises(ValueError, match="did you mean 'qed-seed0'"):
        find_checkpoints([str(runs / "qed-seed1")])
    with pytest.raises(ValueError, match="holds no checkpoint"):
        find_checkpoints([str(tmp_path)])
    with pytest.raises(ValueError, match="both write"):
        find_checkpoints([str(runs / "qed-seed0"), str(runs / "qed-seed0" / "checkpoint")])


def test_pickled_weights_are_refused(runs, tmp_path):
    import shutil

    import torch

    shutil.copytree(runs / "qed-seed0" / "checkpoint", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    torch.save({}, tmp_path / "model" / "pytorch_model.bin")
    (checkpoint,) = find_checkpoints([str(tmp_path / "model")])
    with pytest.raises(OSError, match="safetensors"):
        load_model(checkpoint, device="cpu")


def test_the_harness_is_not_left_to_cut_prompts(capsys):
    assert harness(["--model", "hf", "--model_args", "pretrained=x"]) == 2
    assert "max_length" in capsys.readouterr().err


def test_lm_eval_is_imported_only_where_it_is_used():
    for path in Path(commands.__file__).parent.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in getattr(node, "names", [])] + [getattr(node, "module", None) or ""]
            assert not any(name.startswith("lm_eval") for name in names), path
