from pathlib import Path
from types import ModuleType

import pytest

from qed.model import QEDConfig
from qed.train import build_model, dry_run
from qed.train import plan as planning
from qed.train.plan import count_parameters


def test_a_plan_says_what_the_run_will_take_and_writes_nothing(tmp_path: Path, runs: ModuleType) -> None:
    folder = tmp_path / "not" / "there"
    plan = dry_run(runs.qed_config(), runs.Rows(), runs.train_config(), folder, tokens_per_second=100.0, use_cpu=True)
    assert plan["problems"] == []
    assert (plan["state"], plan["num_steps"], plan["accumulation_steps"]) == ("new", runs.STEPS, 2)
    assert plan["num_tokens"] == runs.STEPS * 64
    assert plan["estimated_seconds"] == pytest.approx(plan["num_tokens"] / 100)
    assert plan["data_passes"] == pytest.approx(runs.STEPS * 4 / 37)
    assert plan["num_parameters"] == sum(p.numel() for p in build_model(runs.qed_config(), 0).parameters())
    assert plan["estimated_memory_bytes"] > 16 * plan["num_parameters"]
    assert list(tmp_path.iterdir()) == []


def test_speed_is_estimated_from_the_device_when_not_given(tmp_path: Path, runs: ModuleType) -> None:
    one, two = (
        dry_run(runs.qed_config(), runs.Rows(), runs.train_config(peak_tflops=2.0), tmp_path, num_processes=n)
        for n in (1, 2)
    )
    assert one["estimated_tokens_per_second"] == pytest.approx(0.3 * 2e12 / (6 * one["num_parameters"]))
    assert two["estimated_tokens_per_second"] == pytest.approx(2 * one["estimated_tokens_per_second"])
    measured = dry_run(runs.qed_config(), runs.Rows(), runs.train_config(), tmp_path, use_cpu=True)
    assert measured["estimated_tokens_per_second"] > 0


def test_problems_are_all_listed(tmp_path: Path, runs: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = planning.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(planning.shutil, "disk_usage", lambda path: usage._replace(free=10))
    plan = dry_run(
        runs.qed_config(), runs.Rows(length=9), runs.train_config(), tmp_path, num_processes=3, tokens_per_second=1.0
    )
    processes, rows, disk = plan["problems"]
    assert "4 rows a step cannot be split evenly over 3 processes" in processes
    assert "sequence_length=16 tokens; got (9,)" in rows
    assert "10 are free" in disk


def test_the_papers_model_is_counted_without_being_built() -> None:
    assert count_parameters(QEDConfig()) == pytest.approx(340e6, rel=0.01)
