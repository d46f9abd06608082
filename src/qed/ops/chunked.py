"""The recurrence a chunk at a time: batched matrix products and a short scan over chunks.

Shapes: B batch, T time, H heads, K key dimension, V value dimension, N chunks, C tokens of a chunk.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64


def recurrence(
    q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, a_BTHK: Tensor, g_BTHK: Tensor, state_BHKV: Tensor
) -> tuple[Tensor, Tensor]:
    """The same function as :func:`qed.ops.reference.recurrence`, for any decay in [-inf, 0]."""
    T = q_BTHK.shape[1]
    C = min(CHUNK, 1 << (T - 1).bit_length())
    dtype = state_BHKV.dtype

    def chunks(x: Tensor) -> Tensor:
        x = F.pad(x.to(dtype), (0, 0, 0, 0, 0, -T % C))
        return x.unflatten(1, (-1, C)).permute(1, 0, 3, 2, 4)

    q, k, v, a, g = (chunks(x) for x in (q_BTHK, k_BTHK, v_BTHV, a_BTHK, g_BTHK))
    reads, erases, inverse, q, k, a, decay = _within_chunks(q, k, a, g.exp())
    state = state_BHKV
    outputs = []
    for n in range(q.shape[0]):
        residual = inverse[n] @ (v[n] - a[n] @ state)
        outputs.append(q[n] @ state + reads[n] @ residual)
        state = decay[n].unsqueeze(-1) * state + k[n].mT @ residual
    o = torch.stack(outputs).permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :T]
    return o.to(v_BTHV.dtype), state


def _within_chunks(q: Tensor, k: Tensor, a: Tensor, decay: Tensor) -> tuple[Tensor, ...]:
    """Merge neighbouring blocks until a block is a chunk.

    Rows ``q`` and ``a`` carry the decay since their block began, columns ``k`` the decay until it ends, so the pair
    (i, j) in neighbouring blocks is a plain product: every factor is a product of decays, in [0, 1] and exact.
    """
    C = q.shape[-2]
    reads = (q * k).sum(-1)[..., None, None]
    erases = torch.zeros_like(reads)
    inverse = torch.ones_like(reads)
    q, k, a, decay = (x.unsqueeze(-2) for x in (q * decay, k, a * decay, decay))
    while q.shape[-3] > 1:
        (q0, q1), (k0, k1), (a0, a1), (p0, p1), (e0, e1), (t0, t1), (d0, d1) = (
            (x[..., 0::2, :, :], x[..., 1::2, :, :]) for x in (q, k, a, reads, erases, inverse, decay)
        )
        cross = a1 @ k0.mT
        zero = torch.zeros_like(cross)
        reads = torch.cat([torch.cat([p0, zero], -1), torch.cat([q1 @ k0.mT, p1], -1)], -2)
        erases = torch.cat([torch.cat([e0, zero], -1), torch.cat([cross, e1], -1)], -2)
        inverse = torch.cat([torch.cat([t0, zero], -1), torch.cat([-t1 @ cross @ t0, t1], -1)], -2)
        q, a = torch.cat([q0, q1 * d0], -2), torch.cat([a0, a1 * d0], -2)
        k, decay = torch.cat([k0 * d1, k1], -2), d0 * d1
    assert q.shape[-2] == C
    return tuple(x.squeeze(-3) for x in (reads, erases, inverse, q, k, a)) + (decay.flatten(-3),)
