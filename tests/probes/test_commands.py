import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from qed.probes import ProbeConfig, commands, probe
from qed.records import read_json, read_rows
from qed.report import diagnostics
from qed.report.runs import Run

CONFIG = ProbeConfig(length=192, num_tokens=400, chunk_tokens=64, needle_length=256, num_needles=1)
FILES = {"probe.json", "probe.jsonl", "probe.png", "probe.svg", "probe-needle.png", "probe-needle.svg"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, build, tokenizer):
    folder = tmp_path_factory.mktemp("runs")
    for arm in ("gdn2", "qed"):
        model = build(torch.float32, arm=arm, vocab_size=len(tokenizer), initializer_range=0.2)
        model.save_pretrained(folder / f"{arm}-seed0" / "checkpoint")
        tokenizer.save_pretrained(folder / f"{arm}-seed0" / "checkpoint")
    return folder


@pytest.fixture
def undrawn(monkeypatch):
    """Without the pictures of one model, which take longest."""
    monkeypatch.setattr(commands, "draw_summary", lambda *given: None)


@pytest.fixture(scope="module")
def table(runs):
    return probe([str(runs / "gdn2-seed0"), str(runs / "qed-seed0")], config=CONFIG, device="cpu", progress=False)


def test_records_pictures_and_a_comparison_stand_beside_the_runs(runs, table):
    assert [row["checkpoint"] for row in table] == ["gdn2-seed0", "qed-seed0"]
    for row in table:
        folder = runs / row["checkpoint"]
        assert {path.name for path in folder.iterdir()} - {"checkpoint"} == FILES
        record = read_json(folder / "probe.json")
        assert record["kind"] == "probe"
        assert record["provenance"]["seed"] == CONFIG.seed
        assert row["loss"] == record["loss"]["as_trained"]
        for name in FILES - {"probe.json", "probe.jsonl"}:
            assert (folder / name).stat().st_size > 10_000
        json.loads((folder / "probe.jsonl").read_text().splitlines()[0])
    assert {path.name for path in runs.iterdir() if path.is_file()} == {"probe-needle.png", "probe-needle.svg"}
    assert "share_this_step" in table[1]
    assert "share_this_step" not in table[0]
    assert table[1]["loss_without_correction"] != table[1]["loss"]


def test_what_is_done_is_skipped_and_another_config_is_not(runs, table, monkeypatch):
    given = [str(runs / "gdn2-seed0"), str(runs / "qed-seed0")]
    monkeypatch.setattr(commands, "measure", None)
    monkeypatch.setattr(commands, "draw_needle", lambda *given: None)
    assert probe(given, config=CONFIG, device="cpu", progress=False) == table
    grouped = ProbeConfig(**{**vars(CONFIG), "chunk_tokens": 128, "batch_windows": 1})
    assert probe(given[:1], config=grouped, device="cpu", progress=False) == table[:1]
    other = ProbeConfig(**{**vars(CONFIG), "length": 200})
    with pytest.raises(TypeError):
        probe(given[:1], config=other, device="cpu", progress=False)


def test_an_interruption_leaves_no_record_and_nothing_half_written(runs, tmp_path, monkeypatch):
    def interrupt(*given, **named):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "measure_needles", interrupt)
    with pytest.raises(KeyboardInterrupt):
        probe([str(runs / "qed-seed0")], config=CONFIG, out=str(tmp_path), device="cpu", progress=False)
    assert not list(tmp_path.rglob("*"))


def test_text_of_ones_own_without_needles(runs, tmp_path, monkeypatch, undrawn):
    text = tmp_path / "text.txt"
    text.write_text("The grass is green. The sky is blue. " * 60)
    config = ProbeConfig(length=100, num_tokens=200, num_needles=0)
    given = [str(runs / "qed-seed0")]
    (row,) = probe(given, data=str(text), config=config, out=str(tmp_path / "out"), device="cpu", progress=False)
    record = read_json(tmp_path / "out" / "qed-seed0" / "probe.json")
    assert (record["source"], record["num_tokens"], record["num_windows"]) == ("text.txt", 200, 2)
    assert "needle" not in record
    assert "problem" not in row
    assert not (tmp_path / "out" / "qed-seed0" / "probe-needle.png").exists()
    monkeypatch.setattr(commands, "load_model", None)
    with pytest.raises(ValueError, match="no such file"):
        probe(given, data=str(tmp_path / "missing.txt"), device="cpu")
    with pytest.raises(ValueError, match="less than one window"):
        probe(given, data=str(text), config=ProbeConfig(length=4096), device="cpu")


def test_a_needle_that_does_not_fit_is_a_named_problem(runs, tmp_path, undrawn):
    text = tmp_path / "text.txt"
    text.write_text("The grass is green. " * 60)
    config = ProbeConfig(length=70, num_tokens=70, needle_length=32)
    (row,) = probe(
        [str(runs / "gdn2-seed0")], data=str(text), config=config, out=str(tmp_path), device="cpu", progress=False
    )
    assert "does not fit a length of 32" in row["problem"]


def test_another_kind_of_model_is_refused(tmp_path, tokenizer):
    config = LlamaConfig(vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                         num_attention_heads=2)  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama" / "checkpoint")
    tokenizer.save_pretrained(tmp_path / "llama" / "checkpoint")
    with pytest.raises(ValueError, match="LlamaForCausalLM has none"):
        probe([str(tmp_path / "llama")], config=CONFIG, device="cpu", progress=False)


def test_the_report_reads_what_the_probe_wrote(runs, table):
    found = [
        Run(folder=runs / name, arm=name.split("-")[0], seed=0, probe=read_json(runs / name / "probe.json"))
        for name in ("gdn2-seed0", "qed-seed0")
    ]
    inside = diagnostics.summary_table(found)
    assert len(inside["rows"]) == 14 + 15 + 6
    assert len({row["quantity"] for row in inside["rows"]}) == 15 + 6
    # states are looked at every 64 tokens, so the last bucket of a window below 192 has none
    for quantity, axis, points in (
        ("state_norm", "position", 2),
        ("strength", "layer", 2),
        ("effect_all_steps", "position", 3),
    ):
        drawn = diagnostics.course_figure(found, quantity, axis)
        assert drawn["series"][-1]["arm"] == "qed"
        assert len(drawn["series"][-1]["x"]) == points
    assert len(diagnostics.needle_figure(found)["series"]) == 2
    assert len(diagnostics.histogram_figure(found, "e")["series"]) == 2
    rows = read_rows(runs / "qed-seed0" / "probe.jsonl")
    assert {row["quantity"] for row in rows} >= {"e", "effect_this_step", "needle", "half_life_by_channel"}
