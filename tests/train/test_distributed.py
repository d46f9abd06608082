"""Two processes on the CPU (gloo), as torchrun starts them."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.slow


def launch(context: Any, runs: ModuleType, folder: Path, num_processes: int = 2, **options: Any) -> set[int | None]:
    """Run to the end; the exit codes of the processes."""
    options |= {"log_every_steps": 1, "learning_rate": 1e-3}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [
        context.Process(target=runs.work_as_rank, args=(rank, num_processes, port, str(folder), options))
        for rank in range(num_processes)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(100)
        if process.is_alive():
            process.kill()
    return {process.exitcode for process in processes}


def rows(folder: Path) -> list[tuple[float, ...]]:
    lines = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"], row["grad_norm"], row["lambda_mean"]) for row in lines]


def assert_close(folder: Path, reference: Path) -> None:
    # Sums are taken in another order; a small rate keeps training from blowing the difference up.
    torch.testing.assert_close(torch.tensor(rows(folder)), torch.tensor(rows(reference)), rtol=1e-4, atol=1e-5)
    mine, theirs = (load_file(path / "checkpoint" / "model.safetensors") for path in (folder, reference))
    torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, context: Any, runs: ModuleType) -> Path:
    """One process with two micro-batches a step: the same rows a step as two processes with one."""
    folder = tmp_path_factory.mktemp("one") / "run"
    assert launch(context, runs, folder, 1) == {0}
    assert json.loads((folder / "train.json").read_text())["accumulation_steps"] == 2
    return folder


def test_two_processes_equal_one(tmp_path: Path, reference: Path, context: Any, runs: ModuleType) -> None:
    assert launch(context, runs, tmp_path) == {0}
    record = json.loads((tmp_path / "train.json").read_text())
    assert (record["num_processes"], record["accumulation_steps"]) == (2, 1)
    assert_close(tmp_path, reference)


def test_a_signal_to_one_process_stops_all_and_one_process_goes_on(
    tmp_path: Path, reference: Path, context: Any, runs: ModuleType
) -> None:
    assert launch(context, runs, tmp_path, stop_after=7) == {3}
    (saved,) = sorted((tmp_path / "resume").iterdir())[-1:]
    assert saved.name == "step-000000007"
    assert launch(context, runs, tmp_path, 1) == {0}
    assert json.loads((tmp_path / "train.json").read_text())["resumed_at"] == [7]
    assert_close(tmp_path, reference)


def test_sharded_parameters_give_the_same_run_through_two_stops(
    tmp_path: Path, reference: Path, context: Any, runs: ModuleType
) -> None:
    """FSDP2 with tied embeddings and small float32 vectors; checkpoints pass between sharded and whole."""
    assert launch(context, runs, tmp_path, fsdp=True, stop_after=5) == {3}
    assert launch(context, runs, tmp_path, 1, stop_after=6) == {3}
    assert launch(context, runs, tmp_path, fsdp=True) == {0}
    assert json.loads((tmp_path / "train.json").read_text())["resumed_at"] == [5, 11]
    assert_close(tmp_path, reference)
