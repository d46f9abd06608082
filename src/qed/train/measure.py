"""Numbers of a run while it goes on: loss, speed, MFU, memory, strength by layer and head."""

from __future__ import annotations

import math
import resource
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from qed.train.config import TrainConfig

# Vendors' dense bf16 peaks, in TFLOP/s.
PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0, "A100": 312.0, "L40S": 362.0, "B200": 2250.0}


@torch.no_grad()
def strengths(model: nn.Module) -> list[list[float]] | None:
    """``lambda`` by layer and head, or None for a model without ``theta``; every process must call it."""
    thetas = [parameter for name, parameter in model.named_parameters() if name.rpartition(".")[2] == "theta"]
    if not thetas:
        return None
    config: Any = model.config
    full = torch.stack([theta.full_tensor() if isinstance(theta, DTensor) else theta for theta in thetas])
    scale = config.strength_scale * config.lambda_max
    return (scale * torch.sigmoid(full.float())).tolist()


def peak_tflops(config: TrainConfig) -> float | None:
    """The stated peak of one device, or the vendor's for a known GPU."""
    if config.peak_tflops is not None or not torch.cuda.is_available():
        return config.peak_tflops
    name = torch.cuda.get_device_name()
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)


def peak_bytes() -> int:
    """Largest memory so far: allocated on the GPU, or resident in this process."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Meter:
    """Counters of a run. ``seconds`` runs on over resumptions; rates are those since the last row."""

    def __init__(self, config: TrainConfig, model: nn.Module, *, num_processes: int) -> None:
        self.config, self.num_processes = config, num_processes
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self.peak_tflops = peak_tflops(config)
        self.seconds = self.data_seconds = 0.0
        self.skipped = self.skipped_in_a_row = 0
        self.loss_sum: torch.Tensor | float = 0.0
        self.loss_steps = 0
        self._clock = time.perf_counter()
        self._last = (0.0, 0.0, 0)
        self._steps = 0

    def start(self) -> None:
        self._clock = time.perf_counter()
        self._last = (self.seconds, self.data_seconds, self._steps)

    def add(self, loss: torch.Tensor) -> None:
        """A step that was taken, with its loss."""
        self.loss_sum = self.loss_sum + loss
        self.loss_steps += 1
        self.skipped_in_a_row = 0
        self._steps += 1

    def skip(self) -> None:
        """A step that was not taken."""
        self.skipped += 1
        self.skipped_in_a_row += 1
        self._steps += 1

    def tick(self) -> None:
        now = time.perf_counter()
        self.seconds += now - self._clock
        self._clock = now

    def mfu(self, tokens_per_second: float) -> float | None:
        """Model FLOPs utilisation: 6 x parameters x tokens over the stated peak of all devices."""
        if self.peak_tflops is None:
            return None
        return 6 * self.num_parameters * tokens_per_second / (self.peak_tflops * 1e12 * self.num_processes)

    def row(
        self, *, step: int, learning_rate: float, grad_norm: float, strength: list[list[float]] | None
    ) -> dict[str, Any]:
        """The row of ``train.jsonl`` for the steps since the last one; every process must call it."""
        self.tick()
        seconds = max(self.seconds - self._last[0], 1e-9)
        speed = (self._steps - self._last[2]) * self.config.batch_tokens / seconds
        row: dict[str, Any] = {
            "step": step,
            "tokens": step * self.config.batch_tokens,
            "loss": self._mean_loss(),
            "learning_rate": learning_rate,
            "grad_norm": grad_norm if math.isfinite(grad_norm) else None,
            "tokens_per_second": speed,
            "mfu": self.mfu(speed),
            "seconds": self.seconds,
            "data_share": (self.data_seconds - self._last[1]) / seconds,
            "peak_bytes": peak_bytes(),
            "skipped_steps": self.skipped,
        }
        if strength is not None:
            flat = [value for layer in strength for value in layer]
            row |= {"lambda_mean": sum(flat) / len(flat), "lambda_min": min(flat), "lambda_max": max(flat)}
            row["lambda"] = strength
        self.loss_sum, self.loss_steps = 0.0, 0
        self._last = (self.seconds, self.data_seconds, self._steps)
        return row

    def _mean_loss(self) -> float | None:
        if not self.loss_steps:
            return None
        total = torch.as_tensor(self.loss_sum, dtype=torch.float64)
        if self.num_processes > 1:
            torch.distributed.all_reduce(total)
            total = total / self.num_processes
        return float(total) / self.loss_steps

    def state(self) -> dict[str, Any]:
        self.tick()
        names = ("seconds", "data_seconds", "skipped", "skipped_in_a_row", "loss_steps")
        return {"loss_sum": float(self.loss_sum)} | {name: getattr(self, name) for name in names}

    def restore(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
