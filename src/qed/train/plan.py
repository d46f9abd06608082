"""``dry_run``: what a run will take, and whether it can start, before it does."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from qed.config import config_hash
from qed.train.checks import check_row
from qed.train.config import TrainConfig
from qed.train.measure import peak_tflops
from qed.train.run import FINAL, RECORD, RESUME, computes_in_bf16

# Part of the peak that a run is taken to reach when nobody says how fast it is.
ASSUMED_MFU = 0.3
# Bytes kept for the backward pass, per token, layer and unit of the hidden size, with bf16 compute (twice in float32).
# Compiled: the 340M model at B16 T2048 peaks at 36.1 GiB on an H200 (benchmarks/results/train.json). Else: another
# library's 346M model of GDN-2 layers peaks at 54 GiB there. Weights and logits are taken off.
COMPILED_BYTES, EAGER_BYTES = 42, 52


def dry_run(
    model_config: PreTrainedConfig,
    dataset: Any,
    config: TrainConfig,
    folder: Path | str,
    *,
    num_processes: int = 1,
    tokens_per_second: float | None = None,
    use_cpu: bool = False,
) -> dict[str, Any]:
    """Sizes, steps, estimated time and memory, and ``problems`` (empty when the run can start). Writes nothing.

    ``tokens_per_second`` is the speed of all processes together; without it, it is estimated from 6 x parameters x
    tokens at ``ASSUMED_MFU`` of the stated peak or, where none is known, of a matrix product timed now.
    """
    folder = Path(folder)
    num_parameters = count_parameters(model_config)
    problems = []
    try:
        accumulation = config.accumulation_steps(num_processes)
    except ValueError as error:
        accumulation = 0
        problems.append(str(error))
    try:
        check_row(dataset, model_config, config)
        check_row(dataset, model_config, config, index=len(dataset) - 1)
    except ValueError as error:
        problems.append(str(error))

    on_gpu = torch.cuda.is_available() and not use_cpu
    bf16 = computes_in_bf16(config, use_cpu=use_cpu)
    peak = (peak_tflops(config) if on_gpu else config.peak_tflops) or matmul_tflops(on_gpu, bf16)
    speed = tokens_per_second or ASSUMED_MFU * peak * 1e12 * num_processes / (6 * num_parameters)
    num_tokens = config.num_steps * config.batch_tokens

    checkpoint_bytes = 12 * num_parameters
    # One more than is kept: the new one is complete before an old one goes.
    disk_bytes = (config.keep_checkpoints + 1) * checkpoint_bytes + 4 * num_parameters
    free_bytes = shutil.disk_usage(nearest_folder(folder)).free
    if free_bytes < disk_bytes:
        problems.append(f"{folder} needs {disk_bytes:,} bytes for checkpoints, {free_bytes:,} are free")
    return {
        "folder": str(folder),
        "state": "done" if (folder / RECORD).exists() else "started" if (folder / RESUME).exists() else "new",
        "config_hash": config_hash(config),
        "num_parameters": num_parameters,
        "num_steps": config.num_steps,
        "num_tokens": num_tokens,
        "batch_tokens": config.batch_tokens,
        "num_processes": num_processes,
        "accumulation_steps": accumulation,
        "data_rows": len(dataset),
        "data_passes": config.num_steps * config.batch_rows / max(1, len(dataset)),
        "precision": "bf16" if bf16 else "fp32",
        "estimated_tokens_per_second": speed,
        "estimated_seconds": num_tokens / speed,
        "speed_from": "given" if tokens_per_second else f"{ASSUMED_MFU:.0%} of {peak:.3g} TFLOP/s a device",
        "estimated_memory_bytes": memory_bytes(model_config, config, num_parameters, bf16=bf16),
        "checkpoint_bytes": checkpoint_bytes,
        "disk_bytes": disk_bytes,
        "free_bytes": free_bytes,
        "checkpoint": str(folder / FINAL),
        "problems": problems,
    }


def count_parameters(model_config: PreTrainedConfig) -> int:
    """Parameters of the model, tied ones once, without allocating it."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config)
    return sum(parameter.numel() for parameter in model.parameters())


def memory_bytes(model_config: PreTrainedConfig, config: TrainConfig, num_parameters: int, *, bf16: bool) -> int:
    """Estimate for one process: float32 weights, gradients and two statistics, kept activations, logits."""
    tokens = config.micro_batch_rows * config.sequence_length
    layers = 2 if config.activation_checkpointing else model_config.num_hidden_layers
    each = COMPILED_BYTES if config.compile else EAGER_BYTES
    kept = tokens * layers * model_config.hidden_size * each * (1 if bf16 else 2)
    if config.activation_checkpointing:
        kept += tokens * model_config.num_hidden_layers * model_config.hidden_size * 4
    # Logits in the compute type, then in float32 with their gradient.
    logits = tokens * model_config.vocab_size * (10 if bf16 else 12) if config.loss == "logits" else 0
    return 16 * num_parameters + kept + logits


def matmul_tflops(on_gpu: bool, bf16: bool) -> float:
    """Rate of one square matrix product on this device, measured in about a tenth of a second."""
    device, size = ("cuda", 4096) if on_gpu else ("cpu", 512)
    dtype = torch.bfloat16 if bf16 else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(size, size, generator=generator, device=device).to(dtype)

    def timed(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            y = x @ x
        # Reading a value waits for the device.
        y[0, 0].item()
        return time.perf_counter() - start

    count = max(1, int(0.1 / max(min(timed(1), timed(1)), 1e-6)))
    return 2 * size**3 * count / timed(count) / 1e12


def nearest_folder(path: Path) -> Path:
    """The deepest folder of a path that exists."""
    path = path.absolute()
    return next(parent for parent in (path, *path.parents) if parent.is_dir())
