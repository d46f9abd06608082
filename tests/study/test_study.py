"""The study as a user runs it: grid, resume, refusal, failure and report, at a size where nothing is learned."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from qed.cli import main
from qed.config import from_dict, override, to_dict
from qed.data.needle import NeedleTask
from qed.data.prose import load_prose
from qed.data.tokenizer import TokenizerConfig
from qed.ops import ARMS
from qed.records import read_json, read_rows
from qed.study.presets import PRESETS, RunConfig, get_preset
from qed.study.reproduce import _start, as_interrupts, locked, prepare, run_all
from qed.study.runs import make_tokenizer


def small():
    study = get_preset("smoke")
    return replace(study, niah=replace(study.niah, lengths=(256,), num_examples=3))


def sets(study):
    """The same study as command line arguments."""
    return ["--set", f"niah.lengths={json.dumps(study.niah.lengths)}", f"niah.num_examples={study.niah.num_examples}"]


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_json_and_give_pairs_of_one_seed(name):
    study = replace(get_preset(name), arms=tuple(ARMS), seeds=(0, 1))
    runs = study.runs()
    assert [run.name for run in runs[: len(ARMS)]] == [f"{arm}-seed0" for arm in ARMS]
    assert all(from_dict(RunConfig, json.loads(json.dumps(to_dict(run)))) == run for run in runs)
    assert {run.train.seed for run in runs} == {0, 1}


def test_laptop_preset_is_what_the_readme_says():
    study = get_preset("laptop")
    assert study.arms == ("gdn2", "qed")
    assert study.train.sequence_length == 256
    assert study.niah.lengths == (256, 512, 1024, 2048, 4096)
    assert study.niah.num_examples >= 200
    assert study.niah.split == "eval"
    assert study.niah.max_new_tokens == 16


def test_laptop_preset_asks_nothing_that_its_trials_looked_at():
    niah = get_preset("laptop").niah
    tokenizer = make_tokenizer(TokenizerConfig(vocab_size=2048), load_prose()[:20])
    for length in niah.lengths:
        task = niah.needle("niah_single_1", length)
        asked, seen = (NeedleTask(task, tokenizer, seed) for seed in (niah.seed, 1))
        values = {asked[i].value for i in range(niah.num_examples)}
        assert len(values) == niah.num_examples
        assert not values & {seen[i].value for i in range(100)}


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["reproduce", "--preset", "laptp"], "'laptop'"),
        (["reproduce", "--arms", "qde"], "'qed'"),
        (["reproduce", "--set", "train.learning_rat=1"], "'learning_rate'"),
        (["reproduce", "--set", "train.learning_rate=fast"], "must be float"),
        (["reproduce", "--data", "no/such/file.txt"], "no/such/file.txt"),
        (["reproduce", "--jobs", "0"], "at least 1; got 0"),
        (["reproduc"], "'reproduce'"),
        (["report", "no/such/runs", "--out", "out"], "no/such/runs"),
    ],
)
def test_wrong_input_is_one_line_and_exit_2(arguments, wanted, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    try:
        status = main(arguments)
    except SystemExit as stop:
        status = stop.code
    printed = capsys.readouterr().err
    assert status == 2
    assert wanted in printed
    assert len(printed.strip().splitlines()) == 1


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished study, run without interruption."""
    out = tmp_path_factory.mktemp("study") / "out"
    assert main(["reproduce", "--preset", "smoke", "--out", str(out), *sets(small())]) == 0
    return out


@pytest.mark.slow
def test_reproduce_ends_with_a_report_true_to_its_rows(finished, capsys):
    page = (finished / "report" / "index.html").read_text()
    assert "smoke test: too short to learn anything" in page
    for arm in ("gdn2", "qed"):
        folder = finished / f"{arm}-seed0"
        score = read_json(folder / "niah.json")["scores"][0]
        rows = read_rows(folder / "niah.jsonl")
        assert score["num_examples"] == len(rows) == 3
        assert score["num_correct"] == sum(row["correct"] for row in rows)
    capsys.readouterr()
    assert main(["reproduce", "--preset", "smoke", "--out", str(finished), *sets(small())]) == 0
    assert "already done, skipped: gdn2-seed0, qed-seed0" in capsys.readouterr().out


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_done_and_the_rest_comes_out_the_same(finished, tmp_path):
    command = [sys.executable, "-m", "qed.cli", "reproduce", "--preset", "smoke", "--out", str(tmp_path / "out")]
    process = subprocess.Popen([*command, *sets(small())], start_new_session=True, stderr=subprocess.DEVNULL)
    rows = tmp_path / "out" / "qed-seed0" / "train.jsonl"
    deadline = time.monotonic() + 120
    while not (rows.exists() and rows.read_text()) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(60) in (130, 0)
    subprocess.run([*command, *sets(small())], check=True)
    for arm in ("gdn2", "qed"):
        whole, stopped = (folder / f"{arm}-seed0" for folder in (finished, tmp_path / "out"))
        for one, other in zip(read_rows(whole / "train.jsonl"), read_rows(stopped / "train.jsonl"), strict=True):
            assert (one["step"], one["loss"]) == (other["step"], other["loss"])
        predictions = [[row["prediction"] for row in read_rows(folder / "niah.jsonl")] for folder in (whole, stopped)]
        assert predictions[0] == predictions[1]


@pytest.mark.slow
def test_a_run_that_fails_is_a_status_with_its_reason(tmp_path, capsys):
    study = override(override(small(), "train.learning_rate", 1e30), "train.max_nonfinite_steps", 2)
    folders = prepare(replace(study, arms=("gdn2",)), tmp_path)
    assert list(run_all(folders).values()) == ["failed"]
    failure = read_json(tmp_path / "gdn2-seed0" / "failure.json")
    assert "NonFiniteError" in failure["error"]
    assert "Traceback" in failure["traceback"]


def test_a_folder_of_another_config_is_refused(tmp_path):
    prepare(small(), tmp_path)
    with pytest.raises(ValueError, match=r"learning_rate = 0.004 there, 0.1 now"):
        prepare(override(small(), "train.learning_rate", 0.1), tmp_path)


def test_two_processes_do_not_share_a_folder(tmp_path):
    with locked(tmp_path), pytest.raises(ValueError, match="another process"), locked(tmp_path):
        pass


def test_a_run_that_outlives_its_study_keeps_the_folder(tmp_path):
    with locked(tmp_path) as lock:
        (tmp_path / "run").mkdir()
        run = _start(tmp_path / "run", 1, lock)
    with pytest.raises(ValueError, match="another process"), locked(tmp_path):
        pass
    run.kill()
    run.wait()
    with locked(tmp_path):
        pass


def test_other_signals_stop_a_study_as_ctrl_c_does():
    def terminated():
        with as_interrupts(signal.SIGTERM, signal.SIGHUP):
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)

    before = {signal.SIGHUP: signal.signal(signal.SIGHUP, signal.SIG_IGN)}
    before[signal.SIGTERM] = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(KeyboardInterrupt):
            terminated()
        assert signal.getsignal(signal.SIGTERM) is before[signal.SIGTERM]
    finally:
        signal.signal(signal.SIGHUP, before[signal.SIGHUP])


@pytest.mark.slow
def test_report_to_a_file_is_the_page_alone(finished, tmp_path, capsys):
    assert main(["report", str(finished), "--out", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text() == (tmp_path / "page" / "index.html").read_text()
