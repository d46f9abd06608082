"""From a mixer's projections to the recurrence's inputs: norms, gates, decay and the erase vector."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from qed.ops.arms import erase_vector

NORM_EPS = 1e-6


def l2_normalize(x: Tensor) -> Tensor:
    """Unit vectors over the last axis; epsilon is added to the SUM of squares (zero stays zero, gradients finite)."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


def recurrence_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    erase: Tensor,
    write: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    strength: Tensor,
    *,
    arm: str = "qed",
    random_direction: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Turn raw projections into ``(q, k, v, a, g)`` for :func:`gated_delta_rule` (paper sections 2 and 5).

    Args:
        q, k: ``[B, T, H, K]`` after convolution and activation, not yet normalised.
        v: ``[B, T, H, V]``.
        decay: ``[B, T, H, K]`` pre-activation; ``g = -exp(A_log) * softplus(decay + dt_bias)`` in float32.
        erase, write: ``[B, T, H, K]`` and ``[B, T, H, V]`` logits; ``b = sigmoid(erase)``, ``w = sigmoid(write)``.
        A_log: ``[H]`` float32. dt_bias: ``[H, K]`` float32. strength: ``[H]`` float32, lambda.
        arm, random_direction: see :func:`erase_vector`.

    Returns:
        Normalised ``q, k``, gated ``v`` and ``a`` in the dtype of ``q``; ``g`` in float32 (float64 for float64 inputs).
    """
    dtype = q.dtype
    wide = torch.promote_types(dtype, torch.float32)
    q, k = l2_normalize(q.to(wide)), l2_normalize(k.to(wide))
    g = -A_log.to(wide).exp().unsqueeze(-1) * F.softplus(decay.to(wide) + dt_bias.to(wide))
    a = erase_vector(q, k, erase.to(wide).sigmoid(), strength.to(wide), arm=arm, random_direction=random_direction)
    v = v.to(wide) * write.to(wide).sigmoid()
    return q.to(dtype), k.to(dtype), v.to(dtype), a.to(dtype), g
