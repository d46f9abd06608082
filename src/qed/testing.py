"""Input makers and the error rule, shared by tests and benchmarks."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Decay = Literal["usual", "none", "strong", "mixed", "resets"]
NAMES = ("q", "k", "v", "a", "g", "initial_state")


def make_inputs(
    B: int, T: int, H: int, K: int, V: int, dtype: torch.dtype = torch.float32, device: str = "cpu", *,
    generator: torch.Generator, decay: Decay = "usual",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """``(q, k, v, a, g)`` of the kind a trained layer makes: unit q and k, gated v, QED's erase vector, g in float32.

    decay: "usual" as a layer starts; "none" zeros; "strong" below float32's range within a few tokens; "mixed" usual
    with one channel strong; "resets" usual with some entries -inf.
    """

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k = (F.normalize(normal(B, T, H, K), dim=-1) for _ in range(2))
    v = normal(B, T, H, V) * normal(B, T, H, V).sigmoid()
    gate = normal(B, T, H, K).sigmoid()
    a = gate * k + 0.1 * (gate * q - k * (k * gate * q).sum(-1, keepdim=True))
    g = -F.softplus(normal(B, T, H, K) - 2)
    if decay == "none":
        g = torch.zeros_like(g)
    elif decay == "strong":
        g = g * 300
    elif decay == "mixed":
        g[..., 0] *= 300
    elif decay == "resets":
        g = g.masked_fill(torch.rand(g.shape, generator=generator) < 0.05, float("-inf"))
    q, k, v, a = (x.to(dtype).to(device) for x in (q, k, v, a))
    return q, k, v, a, g.to(torch.float32).to(device)


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dtype):  # type: ignore[no-untyped-def]
        ctx.dtype = dtype
        return x.to(dtype).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad.to(ctx.dtype).to(grad.dtype), None


def rounded_recurrence(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, g: Tensor, state: Tensor, operand: torch.dtype, chunk: int = 16
) -> tuple[Tensor, Tensor]:
    """The chunkwise form in plain PyTorch with every product's operands rounded to ``operand``, forward and backward.

    In float64 otherwise: what is left of its error is what any kernel at that precision must make.
    """

    def rounded(x: Tensor) -> Tensor:
        return _Round.apply(x, operand)

    outputs = []
    for start in range(0, q.shape[1], chunk):
        x_q, x_k, x_v, x_a, x_g = (x[:, start : start + chunk].transpose(1, 2) for x in (q, k, v, a, g))
        C = x_q.shape[2]
        decay = x_g.exp()
        row = decay[:, :, :0]
        spans = []
        for i in range(C):
            row = torch.cat([row * decay[:, :, i : i + 1], torch.ones_like(decay[:, :, :1])], 2)
            spans.append(F.pad(row, (0, 0, 0, C - i - 1)))
        decays = torch.stack(spans, 2)
        since, until = decay.cumprod(2), decays[:, :, -1]
        reads = (rounded(x_q[:, :, :, None] * decays) * rounded(x_k)[:, :, None]).sum(-1).tril()
        erases = (rounded(x_a[:, :, :, None] * decays) * rounded(x_k)[:, :, None]).sum(-1).tril(-1)
        inverse = torch.linalg.inv(erases + torch.eye(C, dtype=q.dtype, device=q.device))
        keys = rounded(inverse).mT @ rounded(x_k * until)
        residual = rounded(x_v - rounded(x_a * since) @ rounded(state))
        o = rounded(x_q * since) @ rounded(state) + rounded(rounded(reads) @ rounded(inverse)) @ residual
        state = since[:, :, -1].unsqueeze(-1) * state + rounded(keys).mT @ residual
        outputs.append(o.transpose(1, 2))
    return torch.cat(outputs, 1), state


def rms(x: Tensor) -> float:
    """Root mean square."""
    return x.double().square().mean().sqrt().item()


def error_rule(name: str, out: Tensor, exact: Tensor, twin: Tensor, *, dtype: torch.dtype, ulps: float = 2.0) -> None:
    """Raise ``AssertionError`` unless ``out`` errs at most twice as much as ``twin``, plus ``ulps`` of ``dtype``.

    Both are held against ``exact`` (float64), in RMS, in the largest element, and for ``[B, T, ...]`` tensors in the
    RMS of the worst token position. ulps are of the RMS (of the largest element for the maximum) of ``exact``.
    """
    eps = torch.finfo(dtype).eps
    out, exact, twin = (x.detach().double() for x in (out, exact, twin))
    assert out.shape == exact.shape, f"{name}: shape {list(out.shape)}, expected {list(exact.shape)}"
    assert torch.isfinite(out).all(), f"{name}: not finite"
    error, allowed = (out - exact), (twin - exact)
    measures = {"rms": rms, "max": lambda x: x.abs().max().item()}
    if exact.ndim == 4:
        measures["position"] = lambda x: x.square().mean((0, 2, 3)).sqrt().max().item()
    for kind, measure in measures.items():
        bound = 2 * measure(allowed) + ulps * eps * measure(exact)
        assert measure(error) <= bound, f"{name}: {kind} error {measure(error):.3e} over {bound:.3e}"
