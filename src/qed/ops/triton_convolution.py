"""Causal depthwise convolution of width four, then SiLU: one pass forward, one backward.

Bytes a token-channel in bf16: forward 4, backward 6 (the pre-activation is computed again, not stored).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDTH = 4
# H200, B16 T2048, 2304 channels, in ms: 16 x 128 0.117, 32 x 128 0.119, 8 x 256 0.121, 32 x 64 0.179.
FORWARD_TOKENS, FORWARD_CHANNELS, FORWARD_WARPS = 16, 128, 4
# Before fetching ran ahead: 256 channels with 4 warps 0.378, 128 with 2 0.397, 512 with 4 0.473, 128 with 4 0.531.
BACKWARD_CHANNELS, BACKWARD_WARPS = 256, 4
# Tokens of one backward program, which walks three more, four at a time.
STRIP = 61


@triton.jit
def _row(x, base, s_t, i_t, o_c, m_c, LENGTH):
    return tl.load(x + base + i_t * s_t + o_c, mask=m_c & (i_t >= 0) & (i_t < LENGTH), other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["T", "NT"])
def convolution_kernel(
    x, weight, positions, y, T, NT, C, s_b, s_t,
    SKIP: tl.constexpr, PACKED: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    i_c, i_bt = tl.program_id(0) % tl.cdiv(C, BC), tl.program_id(0) // tl.cdiv(C, BC)
    i_b, i_t = i_bt // NT, i_bt % NT
    o_t, o_c = i_t * BT + tl.arange(0, BT), i_c * BC + tl.arange(0, BC)
    m_c = o_c < C
    base = x + i_b.to(tl.int64) * s_b
    if PACKED:
        place = tl.load(positions + o_t, mask=o_t < T, other=0)
    z = tl.zeros([BT, BC], tl.float32)
    for lag in tl.static_range(4):
        row = o_t + (SKIP - lag)
        mask = (row >= 0) & (o_t < T)
        if PACKED:
            mask = mask & (place >= lag)
        b_x = tl.load(
            base + row.to(tl.int64)[:, None] * s_t + o_c[None, :], mask=mask[:, None] & m_c[None, :], other=0.0
        )
        b_w = tl.load(weight + o_c * 4 + (3 - lag), mask=m_c, other=0.0).to(tl.float32)
        z += b_x.to(tl.float32) * b_w[None, :]
    out = y + (i_b.to(tl.int64) * T + o_t.to(tl.int64))[:, None] * C + o_c[None, :]
    b_y = z / (1.0 + tl.exp(-z))
    tl.store(out, b_y.to(y.dtype.element_ty), mask=(o_t < T)[:, None] & m_c[None, :])


@triton.jit
def _step(state, sums, weights, x0, dy, place, own, PACKED: tl.constexpr):
    """One token: the finished gradient of the input three before it, then the windows and sums moved on."""
    x1, x2, x3, p1, p2, p3 = state
    d0, d1, d2, d3 = sums
    w0, w1, w2, w3 = weights
    k1, k2, k3 = x1, x2, x3
    if PACKED:
        k1 = tl.where(place >= 1, x1, 0.0)
        k2 = tl.where(place >= 2, x2, 0.0)
        k3 = tl.where(place >= 3, x3, 0.0)
    z = x0 * w0 + k1 * w1 + k2 * w2 + k3 * w3
    gate = 1.0 / (1.0 + tl.exp(-z))
    dz = dy * (gate * (1.0 + z * (1.0 - gate)))
    dz_own = tl.where(own, dz, 0.0)
    s1, s2, s3 = dz * w1, dz * w2, dz * w3
    if PACKED:
        s1 = tl.where(place >= 1, s1, 0.0)
        s2 = tl.where(place >= 2, s2, 0.0)
        s3 = tl.where(place >= 3, s3, 0.0)
    sums = (d0 + dz_own * x0, d1 + dz_own * k1, d2 + dz_own * k2, d3 + dz_own * k3)
    return p3 + s3, (x0, x1, x2, dz * w0, p1 + s1, p2 + s2), sums


@triton.jit
def _fetch(x, grad, positions, t, s_t, g_t, o_c, m_c, T, PACKED: tl.constexpr):
    x0 = tl.load(x + t * s_t + o_c, mask=m_c & (t < T), other=0.0)
    dy = tl.load(grad + t * g_t + o_c, mask=m_c & (t < T) & (t >= 0), other=0.0)
    place = tl.load(positions + t, mask=t < T, other=0) if PACKED else 0
    return x0, dy, place


@triton.jit(do_not_specialize=["T", "NT"])
def convolution_backward_kernel(
    x, weight, positions, grad, dx, dweight, T, NT, C, s_b, s_t, g_b, g_t,
    SKIP: tl.constexpr, PACKED: tl.constexpr, STRIP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Walk a strip with windows of the last three inputs and of their gradients, which later outputs complete.

    Rows are counted from the first output; the inputs that lie before it have rows -SKIP to -1. A strip owns the
    gradients of its own rows and reads three rows on either side of them.
    """
    i_c, i_bt = tl.program_id(0) % tl.cdiv(C, BC), tl.program_id(0) // tl.cdiv(C, BC)
    i_b, i_n = (i_bt // NT).to(tl.int64), i_bt % NT
    o_c = i_c * BC + tl.arange(0, BC)
    m_c = o_c < C
    first = i_n.to(tl.int64) * STRIP - SKIP
    b_x, b_g, b_dx = x + i_b * s_b + SKIP * s_t, grad + i_b * g_b, dx + (i_b * (T + SKIP) + SKIP) * C
    w0 = tl.load(weight + o_c * 4 + 3, mask=m_c, other=0.0).to(tl.float32)
    w1 = tl.load(weight + o_c * 4 + 2, mask=m_c, other=0.0).to(tl.float32)
    w2 = tl.load(weight + o_c * 4 + 1, mask=m_c, other=0.0).to(tl.float32)
    w3 = tl.load(weight + o_c * 4, mask=m_c, other=0.0).to(tl.float32)
    x1 = tl.load(b_x + (first - 1) * s_t + o_c, mask=m_c & (first - 1 >= -SKIP), other=0.0).to(tl.float32)
    x2 = tl.load(b_x + (first - 2) * s_t + o_c, mask=m_c & (first - 2 >= -SKIP), other=0.0).to(tl.float32)
    x3 = tl.load(b_x + (first - 3) * s_t + o_c, mask=m_c & (first - 3 >= -SKIP), other=0.0).to(tl.float32)
    zero = tl.zeros([BC], tl.float32)
    state, sums, weights = (x1, x2, x3, zero, zero, zero), (zero, zero, zero, zero), (w0, w1, w2, w3)
    # four tokens ahead: a load may not pass the stores between it and its use
    n0 = _fetch(b_x, b_g, positions, first, s_t, g_t, o_c, m_c, T, PACKED)
    n1 = _fetch(b_x, b_g, positions, first + 1, s_t, g_t, o_c, m_c, T, PACKED)
    n2 = _fetch(b_x, b_g, positions, first + 2, s_t, g_t, o_c, m_c, T, PACKED)
    n3 = _fetch(b_x, b_g, positions, first + 3, s_t, g_t, o_c, m_c, T, PACKED)
    for start in range(0, STRIP + 3, 4):
        now = (n0, n1, n2, n3)
        t = first + start
        n0 = _fetch(b_x, b_g, positions, t + 4, s_t, g_t, o_c, m_c, T, PACKED)
        n1 = _fetch(b_x, b_g, positions, t + 5, s_t, g_t, o_c, m_c, T, PACKED)
        n2 = _fetch(b_x, b_g, positions, t + 6, s_t, g_t, o_c, m_c, T, PACKED)
        n3 = _fetch(b_x, b_g, positions, t + 7, s_t, g_t, o_c, m_c, T, PACKED)
        for step in tl.static_range(4):
            x0, dy, place = now[step]
            own = start + step < STRIP
            done, state, sums = _step(state, sums, weights, x0.to(tl.float32), dy.to(tl.float32), place, own, PACKED)
            m_out = m_c & (start + step >= 3) & (t + step - 3 < T)
            tl.store(b_dx + (t + step - 3) * C + o_c, done.to(dx.dtype.element_ty), mask=m_out)
    part = dweight + (i_bt.to(tl.int64) * C + o_c) * 4
    for lag in tl.static_range(4):
        tl.store(part + (3 - lag), sums[lag], mask=m_c)


def forward(x: Tensor, weight: Tensor, positions: Tensor | None, skip: int) -> Tensor:
    """``[B, skip + T, C]`` to ``[B, T, C]``; ``skip`` is 0 (zeros before the first row) or 3."""
    x, (B, T, C) = _dense(x), x.shape
    T -= skip
    y = x.new_empty((B, T, C))
    BC = min(FORWARD_CHANNELS, triton.next_power_of_2(C))
    NT = triton.cdiv(T, FORWARD_TOKENS)
    with torch.cuda.device_of(x):
        convolution_kernel[(B * NT * triton.cdiv(C, BC),)](
            x, weight.contiguous(), None if positions is None else positions.contiguous(), y, T, NT, C,
            x.stride(0), x.stride(1), SKIP=skip, PACKED=positions is not None, BT=FORWARD_TOKENS, BC=BC,
            num_warps=FORWARD_WARPS,
        )  # fmt: skip
    return y


def backward(x: Tensor, weight: Tensor, positions: Tensor | None, grad: Tensor, skip: int) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight; each program's weight gradient is added up afterwards in a fixed order."""
    x, grad, (B, T, C) = _dense(x), _dense(grad), x.shape
    T -= skip
    dx = x.new_empty(x.shape)
    BC = min(BACKWARD_CHANNELS, triton.next_power_of_2(C))
    NT = triton.cdiv(T + skip, STRIP)
    parts = x.new_empty((B * NT, C, WIDTH), dtype=torch.float32)
    with torch.cuda.device_of(x):
        convolution_backward_kernel[(B * NT * triton.cdiv(C, BC),)](
            x, weight.contiguous(), None if positions is None else positions.contiguous(), grad, dx, parts, T, NT, C,
            x.stride(0), x.stride(1), grad.stride(0), grad.stride(1),
            SKIP=skip, PACKED=positions is not None, STRIP=STRIP, BC=BC, num_warps=BACKWARD_WARPS,
        )  # fmt: skip
    return dx, parts.sum(0).to(weight.dtype)


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
