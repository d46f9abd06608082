"""Runs that a test starts in processes of their own, and ways to kill them from inside at a chosen moment."""

from __future__ import annotations

import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

import accelerate
import torch
from transformers import LlamaConfig

from qed.model import QEDConfig
from qed.records import read_rows
from qed.train import TrainConfig, TrainingInterrupted, checkpoint, run, train, trainer

ROW, ROWS_A_STEP, STEPS = 16, 4, 24


class Rows(torch.utils.data.Dataset):
    """Random rows, each a pure function of its index."""

    def __init__(self, num_rows: int = 37, length: int = ROW, vocab: int = 50) -> None:
        self.num_rows, self.length, self.vocab = num_rows, length, vocab

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, self.vocab, (self.length,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


def model_config(dropout: float = 0.1) -> LlamaConfig:
    """A tiny tied model; dropout makes the random state matter."""
    return LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
        attention_dropout=dropout,
    )


def qed_config() -> QEDConfig:
    return QEDConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_heads=2, head_dim=8, intermediate_size=16)


def train_config(**changes: Any) -> TrainConfig:
    values = {
        "num_tokens": STEPS * ROWS_A_STEP * ROW,
        "batch_tokens": ROWS_A_STEP * ROW,
        "sequence_length": ROW,
        "micro_batch_rows": 2,
        "learning_rate": 1e-2,
        "warmup_tokens": 4 * ROWS_A_STEP * ROW,
        "decay_start_tokens": 16 * ROWS_A_STEP * ROW,
        "log_every_steps": 3,
        "save_every_steps": 4,
        "tensorboard": False,
    }
    return TrainConfig(**(values | changes))


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_at(event: str, count: int) -> None:
    """Arrange for SIGKILL at the ``count``-th time of an event."""
    owner, name = {
        "step": (trainer.RunTrainer, "training_step"),
        "update": (trainer.RunTrainer, "_clip_grad_norm"),
        "save": (trainer.RunTrainer, "_save_checkpoint"),
        "half a file": (checkpoint, "write_tensors"),
        "before the rename": (checkpoint, "_sync"),
        "pruning": (checkpoint.shutil, "rmtree"),
        "final weights": (run, "save_final"),
        "record": (run, "write_json"),
    }[event]
    original, calls = getattr(owner, name), [0]

    def hook(*arguments: Any, **keywords: Any) -> Any:
        calls[0] += 1
        if calls[0] == count:
            if event == "half a file":
                original(*arguments, **keywords)
                os.truncate(arguments[0], os.path.getsize(arguments[0]) // 2)
            kill_self()
        return original(*arguments, **keywords)

    setattr(owner, name, hook)


def fail_writes_from_save(count: int) -> None:
    """From the ``count``-th save on, no file may grow past 4 KiB: a write fails part-way, as on a full disk."""
    original, calls = trainer.RunTrainer._save_checkpoint, [0]

    def hook(*arguments: Any) -> None:
        calls[0] += 1
        if calls[0] == count:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        original(*arguments)

    trainer.RunTrainer._save_checkpoint = hook  # type: ignore[method-assign]


def work(folder: str, *, kill: tuple[str, int] | None = None, fail_save: int | None = None, slow: bool = False) -> None:
    """Train in this process; exit code 3 when interrupted, 4 when a checkpoint could not be written."""
    torch.set_num_threads(1)
    if kill is not None:
        kill_at(*kill)
    if fail_save is not None:
        fail_writes_from_save(fail_save)
    if slow:
        original = trainer.RunTrainer.training_step

        def hook(*arguments: Any) -> Any:
            time.sleep(0.02)
            return original(*arguments)

        trainer.RunTrainer.training_step = hook  # type: ignore[method-assign]
    try:
        train(
            model_config(),
            None,
            Rows(),
            train_config(),
            folder,
            data={"name": "random rows"},
            use_cpu=True,
            progress=False,
        )
    except TrainingInterrupted:
        os._exit(3)
    except checkpoint.CheckpointError as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        Path(folder, "error.txt").write_text(str(error))
        os._exit(4)


def work_as_rank(rank: int, num_processes: int, port: int, folder: str, options: dict[str, Any]) -> None:
    """One process of a distributed run, told its place by the variables that torchrun sets."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    changes = dict(options)
    stop_after = changes.pop("stop_after", None)
    if changes.pop("fsdp", False):
        shard_on_the_cpu()
    if stop_after is not None and rank == num_processes - 1:
        stop_at(stop_after)
    try:
        record = train(qed_config(), None, Rows(), train_config(**changes), folder, use_cpu=True, progress=False)
    except TrainingInterrupted:
        os._exit(3)
    # Every process returns the run's record, not its own share.
    assert record["loss"] == read_rows(Path(folder, "train.jsonl"))[-1]["loss"]


def stop_at(count: int) -> None:
    """Send this process alone SIGTERM in the middle of its ``count``-th update step."""
    original, calls = trainer.RunTrainer._clip_grad_norm, [0]

    def hook(*arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == count:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments)

    trainer.RunTrainer._clip_grad_norm = hook  # type: ignore[method-assign]


def shard_on_the_cpu() -> None:
    """FSDP2 as ``accelerate launch --use_fsdp --fsdp_version 2`` sets it, which Accelerate itself offers on GPUs only.

    While Accelerate reads its settings, the processes pass for processes with a GPU each; everything after that runs
    as it would there.
    """
    os.environ |= {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
    }
    original = accelerate.state.AcceleratorState.__init__

    def hook(self: Any, *arguments: Any, **keywords: Any) -> None:
        shared = accelerate.PartialState(cpu=True)._shared_state
        before = shared["distributed_type"]
        if not accelerate.state.AcceleratorState._shared_state:
            shared["distributed_type"] = accelerate.DistributedType.MULTI_GPU
        original(self, *arguments, **keywords)
        shared["distributed_type"] = before

    accelerate.state.AcceleratorState.__init__ = hook  # type: ignore[method-assign]
