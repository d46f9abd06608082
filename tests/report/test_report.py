"""The report against values computed here from the same rows, and against damaged folders."""

import csv
import json
import re
import shutil

import numpy as np
import pytest
from scipy import stats

from qed.records import read_json, read_rows, write_json, write_rows
from qed.report import find_runs, report
from qed.report.content import assemble
from qed.report.draw import draw
from qed.report.runs import load_runs

LENGTHS = (256, 512, 1024, 2048, 4096)


def outcomes(folders, name, length):
    folder = next(folder for folder in folders if folder.name == name)
    return np.array([row["correct"] for row in read_rows(folder / "niah.jsonl") if row["length"] == length])


def said(content, tone):
    return " ".join(one["text"] for one in content["statements"] if one["tone"] == tone)


def test_accuracies_and_intervals_are_those_of_the_rows(run_folders, content):
    rows = content["tables"]["accuracy-niah_single_1"]["rows"]
    assert len(rows) == 10
    for row, name in zip(rows, [f"{arm}-seed{seed}" for arm in ("gdn2", "qed") for seed in range(5)], strict=True):
        for length in LENGTHS:
            right = outcomes(run_folders, name, length)
            interval = stats.binomtest(int(right.sum()), len(right)).proportion_ci(method="wilson")
            np.testing.assert_allclose(row[str(length)], [right.mean(), interval.low, interval.high], atol=1e-12)


def test_paired_counts_and_exact_p_values_are_those_of_the_rows(run_folders, content):
    rows = content["tables"]["paired-niah_single_1-qed-gdn2"]["rows"]
    assert len(rows) == len(LENGTHS) * 5
    for row in rows:
        base = outcomes(run_folders, f"gdn2-seed{row['seed']}", row["length"])
        arm = outcomes(run_folders, f"qed-seed{row['seed']}", row["length"])
        only_arm, only_base = int((arm & ~base).sum()), int((base & ~arm).sum())
        assert (row["only_arm"], row["only_base"], row["both"]) == (only_arm, only_base, int((arm & base).sum()))
        assert row["both"] + row["only_arm"] + row["only_base"] + row["neither"] == row["num_pairs"]
        wanted = stats.binomtest(only_arm, only_arm + only_base).pvalue if only_arm + only_base else 1.0
        assert row["p"] == pytest.approx(wanted, abs=1e-12)
        assert row["p_holm"] >= row["p"]


def test_training_losses_are_subtracted_within_a_seed_at_shared_steps(run_folders, tmp_path):
    folders = [folder for folder in run_folders if folder.name in ("gdn2-seed0", "qed-seed0", "qed-seed1")]
    folders = [shutil.copytree(folder, tmp_path / folder.name) for folder in folders]
    logs = {folder.name: read_rows(folder / "train.jsonl") for folder in folders}
    write_rows(tmp_path / "gdn2-seed0" / "train.jsonl", logs["gdn2-seed0"][1::2])
    figure = assemble(load_runs(folders), title="shared steps")["figures"]["training-loss-difference"]
    (series,) = figure["series"]
    losses = [{row["tokens"]: row["loss"] for row in logs[name]} for name in ("qed-seed0", "gdn2-seed0")]
    assert (series["arm"], series["seed"]) == ("qed", 0)
    assert series["x"] == [row["tokens"] for row in logs["gdn2-seed0"][1::2]]
    assert series["y"] == [losses[0][x] - losses[1][x] for x in series["x"]]


def test_a_run_that_never_learned_is_named(content):
    assert "1 of 10 runs never learned the task" in said(content, "caution")
    assert "qed-seed3" in said(content, "caution")
    faint = [one["label"] for one in content["figures"]["accuracy-niah_single_1"]["series"] if one.get("faint")]
    assert faint == ["QED, seed 3"]


def test_one_seed_is_called_an_illustration_and_never_a_finding(run_folders):
    content = assemble(load_runs(run_folders[:2]), title="one seed")
    assert "One seed an arm: an illustration, not a finding." in said(content, "caution")
    assert said(content, "finding") == ""
    assert not any(name.startswith("over-seeds") for name in content["tables"])


def test_an_arm_with_one_seed_beside_others_with_more_is_named(run_folders, tmp_path, synthetic_run):
    single = synthetic_run(tmp_path, "qed-rand", 0, half_length=900)
    content = assemble(load_runs([*run_folders, single]), title="one more")
    assert "One seed of QED-rand: an illustration, not a finding." in said(content, "caution")
    assert "QED minus GDN-2, mean over 5 seeds" in said(content, "finding")


def test_the_protocol_and_the_achieved_lengths_are_said(content):
    lead = next(section["lead"] for section in content["sections"] if section["key"] == "niah_single_1")
    assert "includes 16 tokens (RULER: 128) for the answer" in lead
    assert "filled unit by unit" in lead
    assert "226 to 240 at 256" in lead


def test_different_seeds_of_two_arms_are_not_paired(tmp_path, synthetic_run):
    folders = [synthetic_run(tmp_path, "gdn2", 0, half_length=900), synthetic_run(tmp_path, "qed", 1, half_length=900)]
    content = assemble(load_runs(folders), title="unpaired")
    assert not any(name.startswith("paired") for name in content["tables"])


def test_missing_and_damaged_parts_are_named_and_the_rest_is_shown(tmp_path, synthetic_run):
    whole, bare = (synthetic_run(tmp_path, "gdn2", seed, half_length=900) for seed in range(2))
    (bare / "train.json").unlink()
    (bare / "niah.jsonl").unlink()
    (bare / "niah.json").write_text("{broken")
    write_json(bare / "failure.json", {"error": "RuntimeError: <stopped>"})
    path = report([whole, bare], tmp_path / "out", title="gaps")
    gaps = [one["gap"] for one in read_json(tmp_path / "out/report.json")["gaps"] if one["run"] == "gdn2-seed1"]
    assert any("training record (train.json) is missing" in gap for gap in gaps)
    assert any("needle outcomes (niah.jsonl) is missing" in gap or "are missing" in gap for gap in gaps)
    assert any("niah.json) cannot be read" in gap for gap in gaps)
    assert any("RuntimeError: <stopped>" in gap for gap in gaps)
    text = path.read_text()
    assert "RuntimeError: &lt;stopped&gt;" in text
    assert "<stopped>" not in text


def test_a_run_folder_with_nothing_but_its_configuration_renders(tmp_path, synthetic_run):
    folder = synthetic_run(tmp_path, "gdn2", 0, half_length=900)
    for name in ("train.json", "train.jsonl", "niah.json", "niah.jsonl"):
        (folder / name).unlink()
    text = report([folder], tmp_path / "out", title="empty").read_text()
    assert "No needle outcomes were found" in text


def test_everything_given_is_escaped(page):
    text = page.read_text()
    assert "Synthetic &lt;runs&gt; &amp; more" in text
    assert "synthetic <b>fixture</b>" not in text


def test_names_from_records_neither_escape_the_folder_nor_become_markup(tmp_path, synthetic_run):
    folder = synthetic_run(tmp_path, "gdn2", 0, half_length=900)
    rows = [row | {"task": "../../<img src=x>--><i>"} for row in read_rows(folder / "niah.jsonl")]
    write_rows(folder / "niah.jsonl", rows)
    write_json(folder / "config.json", {"arm": "<script>$x$</script>", "seed": 0})
    text = report([folder], tmp_path / "out", title="names").read_text()
    assert "<img" not in text
    assert "<script>$x$" not in text
    written = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file())
    assert all(path.parts[0] in ("out", "gdn2-seed0") for path in written)
    assert "out/figures/accuracy-..-..-img-src-x----i-.svg" in map(str, written)


def test_the_page_needs_no_network_and_no_other_file(page):
    text = page.read_text()
    head = text[: text.index('<script type="application/json"')]
    assert "default-src 'none'" in head
    without_namespaces = re.sub(r'xmlns(:\w+)?="[^"]*"', "", head)
    assert not re.search(r'(?:src|href|url\()=?["\']?(?:https?:)?//', without_namespaces)
    assert "<link" not in head
    assert "MIT License" in text


def test_names_in_the_drawings_are_unique(page):
    ids = re.findall(r'\bid="([^"]+)"', page.read_text().split('<script type="application/json"')[0])
    assert len(ids) == len(set(ids))


def test_figures_and_tables_lie_beside_the_page(page, content):
    for name in content["figures"]:
        assert (page.parent / "figures" / f"{name}.svg").read_text().lstrip().startswith("<?xml")
        assert (page.parent / "figures" / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
    for name, table in content["tables"].items():
        with open(page.parent / "tables" / f"{name}.csv", newline="") as file:
            assert len(list(csv.DictReader(file))) == len(table["rows"])
        assert table["title"] in (page.parent / "tables" / f"{name}.md").read_text()


def test_the_papers_numbers_stand_behind_only_comparable_runs(tmp_path, synthetic_run):
    folders = [synthetic_run(tmp_path, arm, 0, half_length=8000, train_length=2048) for arm in ("gdn2", "qed")]
    away = assemble(load_runs(folders), title="away")
    assert not [one for one in away["figures"]["accuracy-niah_single_1"]["series"] if one["role"] == "paper"]
    assert "Not to be compared" in next(one["lead"] for one in away["sections"] if one["key"] == "paper")
    for folder in folders:
        record = read_json(folder / "train.json")
        write_json(folder / "train.json", record | {"num_parameters": 341_000_000, "num_tokens": 15_000_000_000})
    near = assemble(load_runs(folders), title="near")
    behind = [one for one in near["figures"]["accuracy-niah_single_1"]["series"] if one["role"] == "paper"]
    assert {one["label"] for one in behind} >= {"QED, paper, seed 1", "GDN-2, paper, seed 0"}
    one = next(one for one in behind if one["label"] == "QED, paper, seed 1")
    assert dict(zip(one["x"], one["y"], strict=True))[16384] == 59.8


def test_the_same_runs_give_the_same_bytes(run_folders, content):
    again = assemble(load_runs(reversed(run_folders)), title=content["title"], label=content["label"])
    assert again == content
    name, spec = next(iter(content["figures"].items()))
    assert draw(spec, name) == draw(spec, name)


def test_wrong_folders_are_refused_by_name(tmp_path, run_folders):
    with pytest.raises(ValueError, match="no run folders given"):
        report([], tmp_path, title="none")
    with pytest.raises(ValueError, match=r"no such run folder.*absent"):
        report([tmp_path / "absent"], tmp_path, title="none")
    copy = tmp_path / "copy" / run_folders[0].name
    shutil.copytree(run_folders[0], copy)
    with pytest.raises(ValueError, match="two folders hold the run gdn2-seed0"):
        report([run_folders[0], copy], tmp_path, title="twice")
    with pytest.raises(ValueError, match="holds no run"):
        find_runs([tmp_path])
    assert find_runs([copy.parent]) == [copy]


def test_partial_outcomes_are_compared_on_shared_examples_only(tmp_path, synthetic_run):
    folders = [synthetic_run(tmp_path, arm, 0, half_length=900) for arm in ("gdn2", "qed")]
    rows = read_rows(folders[1] / "niah.jsonl")
    write_rows(folders[1] / "niah.jsonl", [row for row in rows if row["index"] < 25])
    table = assemble(load_runs(folders), title="partial")["tables"]["paired-niah_single_1-qed-gdn2"]
    assert {row["num_pairs"] for row in table["rows"]} == {25}


def test_report_json_holds_no_number_that_is_not_finite(page):
    json.loads((page.parent / "report.json").read_text(), parse_constant=lambda name: pytest.fail(name))


def test_diagnostics_are_those_of_the_record(run_folders, content):
    folder = next(folder for folder in run_folders if folder.name == "qed-seed1")
    probe = read_json(folder / "probe.json")
    rows = [row for row in content["tables"]["inside"]["rows"] if (row["arm"], row["seed"]) == ("QED", 1)]
    wanted = [row for row in probe["summaries"] if row["layer"] is None and row["start"] is None] + probe["effects"]
    assert len(rows) == len(wanted)
    for row, one in zip(rows, wanted, strict=True):
        assert [row[name] for name in ("count", "mean", "min", "max")] == [
            one[name] for name in ("count", "mean", "min", "max")
        ]
        assert {name: row[f"q{name}"] for name in one["quantiles"]} == one["quantiles"]
    drawn = {one["label"]: one for one in content["figures"]["needle-read"]["series"]}
    line = drawn["QED, seed 1"]
    assert (len(line["x"]), line["x"][0], line["x"][-1]) == (200, 0, 399)
    assert line["y"] == [probe["needle"]["read"][position] for position in line["x"]]
    by_position = next(one for one in content["figures"]["state_norm-by-position"]["series"] if one["seed"] == 1)
    means = [row["mean"] for row in probe["summaries"] if row["quantity"] == "state_norm" and row["start"]]
    assert by_position["y"] == means
    acts = next(row for row in content["tables"]["correction"]["rows"] if row["seed"] == 1)
    overall = probe["attribution"][0]
    assert acts["share_through_state"] == overall["share_through_state"]
    assert (acts["loss"], acts["loss_without"]) == (2.1, probe["loss"]["without"])


def test_diagnostics_of_many_models_are_one_row_an_arm(tmp_path, synthetic_run):
    folders = [synthetic_run(tmp_path, "qed", seed, half_length=900, num_examples=5) for seed in range(7)]
    rows = assemble(load_runs(folders), title="many")["tables"]["inside"]["rows"]
    e = next(row for row in rows if row["quantity"].startswith("eigenvalue"))
    found = [next(row for row in read_json(folder / "probe.json")["summaries"]) for folder in folders]
    assert (e["num_models"], e["count"]) == (7, 3500)
    assert e["mean"] == pytest.approx(np.mean([row["mean"] for row in found]))
    assert e["means"] == [min(row["mean"] for row in found), max(row["mean"] for row in found)]
    assert (e["min"], e["max"]) == (min(row["min"] for row in found), max(row["max"] for row in found))


def test_benchmarks_show_every_row_and_the_cost_of_qed(run_folders, tmp_path):
    shape = {"work": "forward", "batch": 2, "length": 2048, "heads": 4, "K": 64, "V": 64}
    rows = [
        shape | {"peer": peer, "status": "ok", "median_ms": ms, "p20_ms": ms - 0.1, "p80_ms": ms + 0.1, "note": ""}
        for peer, ms in (("gdn2", 2.0), ("qed", 2.1))
    ]
    rows.append({"peer": "other", "work": "process", "status": "out of memory"})
    provenance = {"device": "some <device>", "commit": "0123456789abcdef", "time": "2026-01-01"}
    write_json(tmp_path / "cpu.json", {"provenance": provenance, "rows": rows})
    page = report(run_folders[:1], tmp_path / "out", title="speed", benchmarks=[tmp_path / "cpu.json"])
    table = read_json(tmp_path / "out/report.json")["tables"]["speed-cpu"]
    assert [row["status"] for row in table["rows"]] == ["ok", "ok", "out of memory"]
    assert "forward at B2 T2\u202f048: +5.0 %" in table["caption"]
    assert "some &lt;device&gt;" in page.read_text()
    with pytest.raises(ValueError, match="no benchmark result at"):
        report(run_folders[:1], tmp_path / "out", title="speed", benchmarks=[tmp_path / "gone.json"])


def test_records_alone_make_a_run_and_a_checkpoint_does_not(tmp_path, synthetic_run):
    folder = synthetic_run(tmp_path, "qed-rand", 4, half_length=900)
    record = read_json(folder / "train.json")
    write_json(folder / "train.json", record | {"config": {"seed": 4}, "identity": {"model": {"arm": "qed-rand"}}})
    (folder / "config.json").unlink()
    moved = folder.rename(tmp_path / "by-hand")
    (moved / "checkpoint").mkdir()
    write_json(moved / "checkpoint/config.json", {"model_type": "qed", "arm": "qed-rand"})
    (moved / "checkpoint/model.safetensors").touch()
    assert find_runs([tmp_path]) == find_runs([moved]) == [moved]
    run = load_runs([moved])[0]
    assert (run.arm, run.seed, run.train_length) == ("qed-rand", 4, None)
    (moved / "train.json").unlink()
    run = load_runs([moved])[0]
    assert (run.arm, run.seed) == ("by-hand", 0)
    assert {
        "no arm is recorded: shown as by-hand, by the folder's name",
        "no seed is recorded: shown as seed 0",
    } <= set(run.gaps)
