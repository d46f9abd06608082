"""The products of gates around the recurrence and in the MLP: PyTorch's own steps, or one kernel without gradients."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from qed.ops.inputs import choose_backend


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, backend: str | None = None) -> Tensor:
    """``rms_norm(x) * weight * sigmoid(gate)`` over the last axis; the norm in float32 or wider, weight ``[V]``.

    ``backend``: ``"torch"``, or ``"triton"`` or ``None``: one kernel on CUDA where no gradient is wanted (and nothing
    is float64), PyTorch's steps elsewhere.
    """
    if _fused(backend, {"q": x, "gate": gate, "weight": weight}):
        from qed.ops.fused import gated_norm_op

        return gated_norm_op(x, gate, weight, eps)
    wide = torch.promote_types(x.dtype, torch.float32)
    normed = F.rms_norm(x.to(wide), weight.shape, weight.to(wide), eps).to(x.dtype)
    return normed * gate.sigmoid()


def silu_product(gate: Tensor, up: Tensor, *, backend: str | None = None) -> Tensor:
    """``silu(gate) * up``; ``backend`` as in :func:`gated_norm`."""
    if _fused(backend, {"q": gate, "up": up}):
        from qed.ops.fused import silu_product_op

        return silu_product_op(gate, up)
    return F.silu(gate) * up


def _fused(backend: str | None, tensors: dict[str, Tensor]) -> bool:
    first, second = list(tensors.values())[:2]
    if first.shape != second.shape:
        raise ValueError(f"what is multiplied must have one shape; got {list(first.shape)} and {list(second.shape)}")
    trains = torch.is_grad_enabled() and any(x.requires_grad for x in tensors.values())
    return not trains and choose_backend(backend, tensors) == "triton"
