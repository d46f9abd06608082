"""Gated products of reading and decoding, forward only: one pass over memory each, rounded once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qed.ops.triton_inputs import sigmoid

# Elements of one program's tile, and warps; not tuned.
TILE, WARPS = 2048, 4


@triton.jit(do_not_specialize=["N"])
def gated_norm_kernel(x, gate, weight, y, N, eps, V: tl.constexpr, BR: tl.constexpr, BV: tl.constexpr):
    o_r, o_v = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR), tl.arange(0, BV)
    m_v = o_v < V
    m = (o_r < N)[:, None] & m_v[None, :]
    at = o_r[:, None] * V + o_v[None, :]
    b_x = tl.load(x + at, mask=m, other=0.0).to(tl.float32)
    b_g = tl.load(gate + at, mask=m, other=0.0).to(tl.float32)
    b_w = tl.load(weight + o_v, mask=m_v, other=0.0).to(tl.float32)
    b_y = b_x * tl.rsqrt(tl.sum(b_x * b_x, 1) / V + eps)[:, None] * b_w[None, :] * sigmoid(b_g)
    tl.store(y + at, b_y.to(y.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["N"])
def silu_product_kernel(gate, up, y, N, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = at < N
    b_g = tl.load(gate + at, mask=m, other=0.0).to(tl.float32)
    b_u = tl.load(up + at, mask=m, other=0.0).to(tl.float32)
    tl.store(y + at, (b_g * sigmoid(b_g) * b_u).to(y.dtype.element_ty), mask=m)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``rms_norm(x) * weight * sigmoid(gate)`` over the last axis."""
    x, gate, V = x.contiguous(), gate.contiguous(), x.shape[-1]
    y, N = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, gate.dtype)), x.numel() // V
    BV = triton.next_power_of_2(V)
    BR = max(1, TILE // BV)
    with torch.cuda.device_of(x):
        gated_norm_kernel[(triton.cdiv(N, BR),)](
            x, gate, weight.contiguous(), y, N, eps, V=V, BR=BR, BV=BV, num_warps=WARPS
        )
    return y


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``."""
    gate, up = gate.contiguous(), up.contiguous()
    y = gate.new_empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype))
    with torch.cuda.device_of(gate):
        silu_product_kernel[(triton.cdiv(gate.numel(), TILE),)](gate, up, y, gate.numel(), BLOCK=TILE, num_warps=WARPS)
    return y
