"""The recurrence, one token at a time: the definition every other form is tested against.

Shapes: B batch, T time, H heads, K key dimension, V value dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor


def recurrence(
    q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, a_BTHK: Tensor, g_BTHK: Tensor, state_BHKV: Tensor
) -> tuple[Tensor, Tensor]:
    """Decay, one rank-one edit along the key, read; returns ``(o, final_state)``."""
    state = state_BHKV
    outputs = []
    for q, k, v, a, g in zip(*(x.unbind(1) for x in (q_BTHK, k_BTHK, v_BTHV, a_BTHK, g_BTHK)), strict=True):
        decayed = g.exp().unsqueeze(-1) * state
        residual = v - (a.unsqueeze(-1) * decayed).sum(-2)
        state = decayed + k.unsqueeze(-1) * residual.unsqueeze(-2)
        outputs.append((q.unsqueeze(-1) * state).sum(-2))
    return torch.stack(outputs, 1).to(v_BTHV.dtype), state
