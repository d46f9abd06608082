"""Before the first step: kernels compiled in threads, and what a compiled block keeps for its backward pass."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from qed.model.mixer import QEDMixer
from qed.ops import fused, get_arm, library  # noqa: F401 (registers the operators)
from qed.ops.convolution import FUSED_WIDTH
from qed.ops.tiles import segment_length
from qed.train.config import TrainConfig
from qed.train.loss import liger_cross_entropy

ops: Any = torch.ops.qed


@contextmanager
def block_compilation() -> Iterator[None]:
    """While it lasts, blocks are compiled for training one by one.

    A block computes cheap inputs of its weights' gradients again instead of keeping them: norms and gate products are
    fused into the backward pass, and 24 layers of 1024 keep 31 GiB for 32,768 tokens instead of 39. Under DDP a block
    stays whole: gradients are sent block by block anyway, and pieces would keep more.
    """
    # The compiler takes seconds to import.
    import torch._dynamo.config as capture
    import torch._functorch.config as partitioning

    with (
        partitioning.patch("ban_recompute_materialized_backward", False),
        capture.patch(optimize_ddp=False),
    ):
        yield


def compile_kernels(
    model: nn.Module, config: TrainConfig, device: torch.device, *, bf16: bool
) -> list[threading.Thread]:
    """Start to compile a step's Triton kernels at the step's own shapes, beside whatever follows.

    Otherwise each is compiled at its first call, one after the other. Nothing needs the threads' results: a kernel that
    cannot be compiled fails where the step calls it. Returns the threads; join them before the process ends.
    """
    mixer = next((module for module in model.modules() if isinstance(module, QEDMixer)), None)
    if device.type != "cuda" or mixer is None or mixer.config.backend not in (None, "triton"):
        return []
    B, T, H, K, V = config.micro_batch_rows, config.sequence_length, mixer.num_heads, mixer.key_dim, mixer.value_dim
    compute = torch.bfloat16 if bf16 else torch.float32
    switches = get_arm(mixer.config.arm)

    def zeros(*shape: int, dtype: torch.dtype = compute) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    def wide(*shape: int) -> torch.Tensor:
        return zeros(*shape, dtype=torch.float32)

    def heads(x: torch.Tensor, *widths: int) -> list[torch.Tensor]:
        return [part.unflatten(-1, (H, -1)) for part in x.split([H * width for width in widths], -1)]

    # Called as operators, without autograd: its thread of this device is left to the step.

    def convolution() -> None:
        x, weight = zeros(B, T, H * (2 * K + V)), wide(*mixer.conv_weight.shape)
        if weight.shape[1] == FUSED_WIDTH:
            ops.short_convolution(x, weight, None, 0)
            ops.short_convolution_backward(x, weight, None, x, 0)

    def inputs() -> None:
        q, k, v = heads(zeros(B, T, H * (2 * K + V)), K, K, V)
        erase, write = heads(zeros(B, T, H * (K + V)), K, V)
        z = wide(H, K) if switches.direction == "random" else None
        streams = (q, k, v, zeros(B, T, H, K), erase, write, wide(H), wide(H, K), wide(H), z)
        flags = (switches.direction, switches.gate, switches.project)
        gradients = ops.recurrence_inputs(*streams, *flags)
        ops.recurrence_inputs_backward(*streams, *gradients, *flags)

    def core() -> tuple[torch.Tensor, ...]:
        q, k, a, v = zeros(B, T, H, K), zeros(B, T, H, K), zeros(B, T, H, K), zeros(B, T, H, V)
        return q, k, v, a, wide(B, T, H, K), wide(B, H, K, V)

    def forward() -> None:
        ops.gated_delta_rule(*core(), None)

    def backward() -> None:
        tensors, none = core(), wide(0)
        ops.gated_delta_rule_backward(*tensors, None, none, none, zeros(B, T, H, V), wide(B, H, K, V))

    def loss() -> None:
        vocab, width = model.get_output_embeddings().weight.shape  # type: ignore[operator]
        hidden, weight = zeros(1024, width).requires_grad_(), wide(vocab, width).requires_grad_()
        liger_cross_entropy()(hidden, weight, zeros(1024, dtype=torch.int64))

    tasks: list[Callable[[], Any]] = [convolution, inputs, forward]
    if segment_length(B, T, H, V, packed=False) >= T:
        tasks.append(backward)
    if config.loss == "liger":
        tasks.append(loss)

    def work(task: Callable[[], Any]) -> None:
        try:
            with torch.cuda.device(device), torch.autocast("cuda", torch.bfloat16, enabled=bf16):
                task()
        except Exception:  # the step will meet it and say so
            return

    threads = [threading.Thread(target=work, args=(task,), name=f"compile {task.__name__}") for task in tasks]
    for thread in threads:
        thread.start()
    return threads
