"""Resumable checkpoints: written beside, renamed into place, read without trusting anything.

A checkpoint folder holds ``model.safetensors``, ``optimizer.safetensors`` (one tensor a parameter and statistic, keyed
by parameter name, so that any number of processes can read it) and ``state.json`` (position, schedule, random states,
the run's identity). Full tensors are written whatever the sharding.
"""

from __future__ import annotations

import base64
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
_BETWEEN = "::"


class CheckpointError(OSError):
    """A checkpoint could not be written; the previous one is intact."""


def list_checkpoints(root: Path) -> list[Path]:
    """Complete checkpoints under ``root``, oldest first."""
    return sorted(path for path in root.glob("step-*") if path.is_dir())


def step_of(path: Path) -> int:
    return int(path.name.partition("-")[2])


def sweep(root: Path) -> None:
    """Remove what a killed save left behind."""
    for path in root.glob(".step-*.part"):
        shutil.rmtree(path, ignore_errors=True)


def save(root: Path, step: int, write: Callable[[Path], None], *, num_bytes: int, keep: int) -> Path:
    """Let ``write`` fill a folder beside the final one, rename it, then remove all but the newest ``keep``."""
    root.mkdir(parents=True, exist_ok=True)
    target, part = root / f"step-{step:09d}", root / f".step-{step:09d}.part"
    if target.exists():
        return target
    shutil.rmtree(part, ignore_errors=True)
    try:
        free = shutil.disk_usage(root).free
        if free < num_bytes:
            raise OSError(f"it needs {num_bytes:,} bytes and {free:,} are free")
        part.mkdir()
        write(part)
        for path in (*sorted(part.rglob("*")), part):
            _sync(path)
        os.replace(part, target)
        _sync(root)
    except Exception as error:
        shutil.rmtree(part, ignore_errors=True)
        # safetensors reports a failed write by an error of its own.
        if not isinstance(error, OSError) and type(error).__name__ != "SafetensorError":
            raise
        left = list_checkpoints(root)
        kept = f"the checkpoint of step {step_of(left[-1])} is intact" if left else "there is no earlier checkpoint"
        raise CheckpointError(f"cannot write the checkpoint of step {step} to {root}: {error}; {kept}") from error
    for old in list_checkpoints(root)[:-keep]:
        remove(old)
    return target


def remove(path: Path) -> None:
    """Delete a checkpoint: renamed first, so that a kill never leaves half of one under a valid name."""
    doomed = path.with_name(f".{path.name}.part")
    os.replace(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def model_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters (tied ones once) and persistent buffers by name."""
    persistent = model.state_dict().keys()
    yield from model.named_parameters()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in persistent)


def optimizer_tensors(model: nn.Module, optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            yield f"{name}{_BETWEEN}{key}", value


def gather(tensors: Iterator[tuple[str, torch.Tensor]], *, keep: bool) -> dict[str, torch.Tensor]:
    """Full tensors on the CPU; every process takes part, those with ``keep`` hold the result."""
    full = {}
    for name, tensor in tensors:
        tensor = tensor.detach()
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        if keep:
            full[name] = tensor.cpu().contiguous()
    return full


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, str(path), metadata={"format": "pt"})


def num_bytes(model: nn.Module) -> int:
    """Size of a checkpoint: the weights and two statistics of each."""
    return 3 * sum(tensor.numel() * tensor.element_size() for _, tensor in model_tensors(model)) + (1 << 20)


@torch.no_grad()
def load_model(path: Path, model: nn.Module) -> None:
    """Copy the saved weights into ``model``; a missing or unknown name is a ``ValueError``."""
    targets = dict(model_tensors(model))
    with safe_open(str(path / MODEL), framework="pt") as file:
        different = set(targets) ^ set(file.keys())
        if different:
            raise ValueError(f"{path / MODEL} does not hold this model: {', '.join(sorted(different)[:5])} differ")
        for name, target in targets.items():
            target.copy_(_like(file.get_tensor(name), target))


def load_optimizer(path: Path, model: nn.Module, optimizer: Any) -> None:
    """Give every parameter back its statistics."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    with safe_open(str(path / OPTIMIZER), framework="pt") as file:
        keys: dict[str, list[str]] = {}
        for entry in file.keys():  # noqa: SIM118 (a file handle, not a mapping)
            name, _, key = entry.rpartition(_BETWEEN)
            keys.setdefault(name, []).append(key)
        unknown = set(keys) - set(names.values())
        if unknown:
            raise ValueError(f"{path / OPTIMIZER} names parameters this model lacks: {', '.join(sorted(unknown)[:5])}")
        state, index = {}, 0
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = names[id(parameter)]
                if name in keys:
                    values = {key: file.get_tensor(f"{name}{_BETWEEN}{key}") for key in keys[name]}
                    state[index] = {
                        key: _like(value, parameter) if value.ndim else value for key, value in values.items()
                    }
                index += 1
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": state, "param_groups": groups})


def _like(value: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if isinstance(target, DTensor):
        return distribute_tensor(value.to(target.device), target.device_mesh, target.placements)
    return value


def random_state() -> dict[str, Any]:
    """Every random state of this process, as JSON values."""
    version, words, gauss = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    return {
        "python": [version, list(words), gauss],
        "numpy": {**numpy_state, "state": {**numpy_state["state"], "key": numpy_state["state"]["key"].tolist()}},
        "torch": _encode(torch.get_rng_state()),
        "cuda": [_encode(torch.cuda.get_rng_state())] if torch.cuda.is_available() else [],
    }


def restore_random_state(state: dict[str, Any]) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    numpy_state = dict(state["numpy"])
    numpy_state["state"] = {**numpy_state["state"], "key": np.array(numpy_state["state"]["key"], dtype=np.uint32)}
    np.random.set_state(numpy_state)
    torch.set_rng_state(_decode(state["torch"]))
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(_decode(state["cuda"][0]))


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
