"""What a compiled block keeps, and kernels compiled ahead."""

from __future__ import annotations

from contextlib import nullcontext
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import nn

from qed.train.run import build_model
from qed.train.start import block_compilation, compile_kernels

TOKENS, WIDTH, INNER = 8, 16, 48


class Gated(nn.Module):
    """The shape of the model's MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def kept(context: object) -> tuple[int, torch.Tensor]:
    """How many tensors of the inner width a compiled block keeps, and the gradient that it gives."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    block, x = Gated(), torch.randn(TOKENS, WIDTH, requires_grad=True)
    block.compile(backend="aot_eager_decomp_partition")
    shapes: list[torch.Size] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        shapes.append(tensor.shape)
        return tensor

    with context, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):  # type: ignore[attr-defined]
        loss = block(x).square().sum()
    loss.backward()
    assert x.grad is not None
    return shapes.count(torch.Size([TOKENS, INNER])), x.grad


def test_a_gates_product_is_computed_again() -> None:
    (many, expected), (few, got) = kept(nullcontext()), kept(block_compilation())
    assert (many, few) == (3, 2)
    torch.testing.assert_close(got, expected)


def test_no_kernel_is_compiled_without_a_gpu(runs: ModuleType) -> None:
    model = build_model(runs.qed_config(), 0)
    assert compile_kernels(model, runs.train_config(), torch.device("cpu"), bf16=False) == []
