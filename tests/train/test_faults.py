"""A run that is killed, interrupted or out of disk space, and then goes on as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from safetensors.torch import load_file

pytestmark = pytest.mark.slow


def finish(context: Any, runs: ModuleType, folder: Path, **options: Any) -> int | None:
    process = context.Process(target=runs.work, args=(str(folder),), kwargs=options)
    process.start()
    process.join(60)
    assert process.exitcode is not None, "the run hangs"
    return process.exitcode


def rows(folder: Path) -> list[tuple[Any, ...]]:
    lines = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"], row["grad_norm"], row["learning_rate"], row["skipped_steps"]) for row in lines]


def assert_same_run(folder: Path, reference: Path) -> None:
    assert rows(folder) == rows(reference)
    mine, theirs = (load_file(path / "checkpoint" / "model.safetensors") for path in (folder, reference))
    assert mine.keys() == theirs.keys()
    assert all(mine[name].equal(theirs[name]) for name in mine)
    assert not (folder / "resume").exists()
    assert not list(folder.glob(".*"))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, context: Any, runs: ModuleType) -> Path:
    folder = tmp_path_factory.mktemp("reference") / "run"
    assert finish(context, runs, folder) == 0
    assert [row[0] for row in rows(folder)] == [1, *range(3, runs.STEPS + 1, 3)]
    return folder


def test_killed_at_ten_random_moments(tmp_path: Path, reference: Path, context: Any, runs: ModuleType) -> None:
    draw = random.Random(0)
    moments = [
        ("step", draw.randint(1, 8)),
        ("half a file", 1),
        ("update", draw.randint(4, 7)),
        ("before the rename", draw.randint(1, 4)),
        ("half a file", 2),
        ("pruning", draw.randint(1, 4)),
        ("save", draw.randint(1, 2)),
        ("step", draw.randint(1, 12)),
        ("final weights", 1),
        ("record", 1),
    ]
    folder = tmp_path / "run"
    for event, count in moments:
        before = position(folder)
        exit_code = finish(context, runs, folder, kill=(event, count))
        assert exit_code in (-signal.SIGKILL, 0)
        assert position(folder) >= before, "a kill lost a checkpoint"
        if exit_code == 0:
            break
    assert finish(context, runs, folder) == 0
    record = json.loads((folder / "train.json").read_text())
    assert len(record["resumed_at"]) >= 1
    assert_same_run(folder, reference)


def position(folder: Path) -> int:
    return max((int(path.name[5:]) for path in (folder / "resume").glob("step-*")), default=0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_stops(
    number: signal.Signals, tmp_path: Path, reference: Path, context: Any, runs: ModuleType
) -> None:
    folder = tmp_path / "run"
    process = context.Process(target=runs.work, args=(str(folder),), kwargs={"slow": True})
    process.start()
    deadline = time.monotonic() + 60
    while not (folder / "train.jsonl").exists() or len(rows(folder)) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, number)
    process.join(60)
    assert process.exitcode == 3
    stopped_at = position(folder)
    assert stopped_at >= rows(folder)[-1][0]
    assert finish(context, runs, folder) == 0
    assert json.loads((folder / "train.json").read_text())["resumed_at"] == [stopped_at]
    assert_same_run(folder, reference)


def test_a_full_disk_leaves_the_previous_checkpoint(
    tmp_path: Path, reference: Path, context: Any, runs: ModuleType
) -> None:
    folder = tmp_path / "run"
    assert finish(context, runs, folder, fail_save=3) == 4
    message = (folder / "error.txt").read_text()
    assert "cannot write the checkpoint of step 12" in message
    assert "the checkpoint of step 8 is intact" in message
    assert sorted(path.name for path in (folder / "resume").iterdir()) == ["step-000000004", "step-000000008"]
    (folder / "error.txt").unlink()
    assert finish(context, runs, folder) == 0
    assert_same_run(folder, reference)
