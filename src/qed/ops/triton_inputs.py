"""The prologue in one pass, forward and backward: norms, decay, gates, erase vector and gated value.

One program takes BT tokens of one head. Everything is computed in float32 and rounded once on the way out.
Bytes a token-head in bf16 (g in float32): forward 18K + 6V, backward 26K + 10V.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qed.ops.arms import Arm

NORM_EPS = tl.constexpr(1e-6)
A_LOG_MAX = tl.constexpr(80.0)

# Elements of one [BT, BK] tile and warps. H200, B16 T2048 H6 K = V = 128, forward in ms: 512 with 2 warps 0.151, 1024
# with 2 0.152, with 4 0.151, 2048 with 4 0.152, 4096 with 8 0.167; backward, before its loads were moved to the front:
# 512 with 2 0.303, 1024 with 4 0.300, 2048 with 8 0.327.
FORWARD_TILE, FORWARD_WARPS = 1024, 4
BACKWARD_TILE, BACKWARD_WARPS = 1024, 4
# Tokens whose parameter gradients one backward program sums before it writes them: 32 0.318, 64 0.312, 128 0.300 ms.
BACKWARD_TOKENS = 128


@triton.jit
def _softplus(x):
    """log(1 + exp x) and its derivative, both to float32 accuracy for every finite x."""
    e = tl.exp(-tl.abs(x))
    # log1p(e) / e as a polynomial, 1.5e-7 off at most on [0, 1]; without a division, and exact where 1 + e would cancel
    p = 0.019542528 - 0.0031760571 * e
    p = 0.10543624 + e * (-0.056373615 + e * p)
    p = 0.19663274 + e * (-0.15269667 + e * p)
    p = 0.3332971 + e * (-0.24951616 + e * p)
    p = 1.0 + e * (-0.49999893 + e * p)
    slope = tl.where(x >= 0, 1.0, e) / (1.0 + e)
    return tl.maximum(x, 0.0) + e * p, slope


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _load(p, s_b, s_t, s_h, i_b, o_t, i_h, o_d, m):
    """A [BT, BD] tile of a [B, T, H, D] tensor whose last axis is dense, in float32."""
    base = i_b.to(tl.int64) * s_b + i_h.to(tl.int64) * s_h
    return tl.load(p + base + o_t.to(tl.int64)[:, None] * s_t + o_d[None, :], mask=m, other=0.0).to(tl.float32)


@triton.jit
def _store(p, T, H, D: tl.constexpr, i_b, o_t, i_h, o_d, m, x):
    row = (i_b.to(tl.int64) * T + o_t.to(tl.int64)) * H + i_h
    tl.store(p + row[:, None] * D + o_d[None, :], x.to(p.dtype.element_ty), mask=m)


@triton.jit
def _direction(x_q, x_k, b, b_z, DIRECTION: tl.constexpr, GATE: tl.constexpr, PROJECT: tl.constexpr):
    """The source x, the gated direction u, its component along the key, and d; [BT, BK] but for the component."""
    x = x_q if DIRECTION == "query" else tl.broadcast_to(b_z[None, :], x_q.shape)
    u = b * x if GATE else x
    along = tl.sum(x_k * u, 1)
    d = u - x_k * along[:, None] if PROJECT else u
    return x, u, along, d


@triton.jit
def random_direction(z, i_h, o_k, K: tl.constexpr, DIRECTION: tl.constexpr):
    """Some channels of one head's direction; zeros for an arm without."""
    b_z = tl.zeros(o_k.shape, tl.float32)
    if DIRECTION == "random":
        b_z = tl.load(z + i_h * K + o_k, mask=o_k < K, other=0.0).to(tl.float32)
    return b_z


@triton.jit
def parameters(A_log, dt_bias, strength, z, i_h, o_k, K: tl.constexpr, DIRECTION: tl.constexpr):
    """Of one head: decay rate, bias, strength and random direction (zeros where the arm has none)."""
    m_k = o_k < K
    rate = tl.exp(tl.minimum(tl.load(A_log + i_h).to(tl.float32), A_LOG_MAX))
    bias = tl.load(dt_bias + i_h * K + o_k, mask=m_k, other=0.0).to(tl.float32)
    lam = 0.0
    if DIRECTION != "none":
        lam = tl.load(strength + i_h).to(tl.float32)
    return rate, bias, lam, random_direction(z, i_h, o_k, K, DIRECTION)


@triton.jit
def _source(b_q, b_e, b_z, DIRECTION: tl.constexpr, GATE: tl.constexpr):
    """The direction before norms and projection."""
    u = b_q if DIRECTION == "query" else b_z + tl.zeros_like(b_q)
    return u * sigmoid(b_e) if GATE else u


@triton.jit
def _sum(x):
    """Over the channels: ``[rows, 1]``, of one row a number."""
    return tl.sum(x, 1, True) if len(x.shape) == 2 else tl.sum(x, 0)


@triton.jit
def row_sums(b_q, b_k, b_e, b_z, DIRECTION: tl.constexpr, GATE: tl.constexpr):
    """Sums over the channels of raw ``[rows, BK]`` or ``[BK]`` tiles: q^2, k^2 and the unscaled direction times k."""
    return _sum(b_q * b_q), _sum(b_k * b_k), _sum(_source(b_q, b_e, b_z, DIRECTION, GATE) * b_k)


@triton.jit
def row_scales(sum_q, sum_k, sum_u, DIRECTION: tl.constexpr):
    """From :func:`row_sums`: reciprocal norms of q and k, and the direction's component along unit k."""
    r_q, r_k = tl.rsqrt(sum_q + NORM_EPS), tl.rsqrt(sum_k + NORM_EPS)
    along = sum_u * r_k
    if DIRECTION == "query":
        along *= r_q
    return r_q, r_k, along


@triton.jit
def scaled(
    b_q, b_k, b_e, b_d, r_q, r_k, along, rate, bias, lam, b_z,
    DIRECTION: tl.constexpr, GATE: tl.constexpr, PROJECT: tl.constexpr,
):  # fmt: skip
    """Unit q and k, erase vector and log-decay of some channels of raw tiles, in float32."""
    x_q, x_k, b = b_q * r_q, b_k * r_k, sigmoid(b_e)
    # the gate of k, less what projection takes
    c = b - lam * along if DIRECTION != "none" and PROJECT else b
    a = c * x_k
    if DIRECTION != "none":
        u = _source(b_q, b_e, b_z, DIRECTION, GATE)
        a += u * (lam * r_q) if DIRECTION == "query" else u * lam
    soft, _ = _softplus(b_d + bias)
    return x_q, x_k, a, -rate * soft


@triton.jit
def prologue(
    b_q, b_k, b_e, b_d, rate, bias, lam, b_z, DIRECTION: tl.constexpr, GATE: tl.constexpr, PROJECT: tl.constexpr
):
    """Unit q and k, erase vector and log-decay of raw ``[rows, BK]`` or ``[BK]`` tiles of one head, in float32."""
    sum_q, sum_k, sum_u = row_sums(b_q, b_k, b_e, b_z, DIRECTION, GATE)
    r_q, r_k, along = row_scales(sum_q, sum_k, sum_u, DIRECTION)
    return scaled(b_q, b_k, b_e, b_d, r_q, r_k, along, rate, bias, lam, b_z, DIRECTION, GATE, PROJECT)


@triton.jit(do_not_specialize=["T", "NT", "H"])
def recurrence_inputs_kernel(
    q, k, v, decay, erase, write, A_log, dt_bias, strength, z,
    out_q, out_k, out_v, out_a, out_g,
    T, NT, H,
    sqb, sqt, sqh, skb, skt, skh, svb, svt, svh, sdb, sdt, sdh, seb, ste, seh, swb, swt, swh,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    DIRECTION: tl.constexpr, GATE: tl.constexpr, PROJECT: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    i_h, i_bt = pid % H, pid // H
    i_b, i_t = i_bt // NT, i_bt % NT
    o_t = i_t * BT + tl.arange(0, BT)
    o_k, o_v = tl.arange(0, BK), tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    m_tk = (o_t < T)[:, None] & m_k[None, :]
    m_tv = (o_t < T)[:, None] & m_v[None, :]

    b_q = _load(q, sqb, sqt, sqh, i_b, o_t, i_h, o_k, m_tk)
    b_k = _load(k, skb, skt, skh, i_b, o_t, i_h, o_k, m_tk)
    b_e = _load(erase, seb, ste, seh, i_b, o_t, i_h, o_k, m_tk)
    b_d = _load(decay, sdb, sdt, sdh, i_b, o_t, i_h, o_k, m_tk)
    b_v = _load(v, svb, svt, svh, i_b, o_t, i_h, o_v, m_tv)
    b_w = _load(write, swb, swt, swh, i_b, o_t, i_h, o_v, m_tv)

    rate, bias, lam, b_z = parameters(A_log, dt_bias, strength, z, i_h, o_k, K, DIRECTION)
    x_q, x_k, a, g = prologue(b_q, b_k, b_e, b_d, rate, bias, lam, b_z, DIRECTION, GATE, PROJECT)
    _store(out_q, T, H, K, i_b, o_t, i_h, o_k, m_tk, x_q)
    _store(out_k, T, H, K, i_b, o_t, i_h, o_k, m_tk, x_k)
    _store(out_a, T, H, K, i_b, o_t, i_h, o_k, m_tk, a)
    _store(out_g, T, H, K, i_b, o_t, i_h, o_k, m_tk, g)
    _store(out_v, T, H, V, i_b, o_t, i_h, o_v, m_tv, b_v * sigmoid(b_w))


@triton.jit(do_not_specialize=["T", "NT", "H"])
def recurrence_inputs_backward_kernel(
    q, k, v, decay, erase, write, A_log, dt_bias, strength, z,
    grad_q, grad_k, grad_v, grad_a, grad_g,
    dq, dk, dv, ddecay, derase, dwrite, sums,
    T, NT, H,
    sqb, sqt, sqh, skb, skt, skh, svb, svt, svh, sdb, sdt, sdh, seb, ste, seh, swb, swt, swh,
    gqb, gqt, gqh, gkb, gkt, gkh, gvb, gvt, gvh, gab, gat, gah, ggb, ggt, ggh,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, NB: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    DIRECTION: tl.constexpr, GATE: tl.constexpr, PROJECT: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    i_h, i_bt = pid % H, pid // H
    i_b, i_t = i_bt // NT, i_bt % NT
    o_k, o_v = tl.arange(0, BK), tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    rate, bias, lam, b_z = parameters(A_log, dt_bias, strength, z, i_h, o_k, K, DIRECTION)
    sum_A = tl.zeros([BT], tl.float32)
    sum_lam = tl.zeros([BT], tl.float32)
    sum_bias = tl.zeros([BT, BK], tl.float32)

    for i_n in range(NB):
        o_t = (i_t * NB + i_n) * BT + tl.arange(0, BT)
        m_tk = (o_t < T)[:, None] & m_k[None, :]
        m_tv = (o_t < T)[:, None] & m_v[None, :]

        # every load comes before the first store: the compiler may not move one past the other
        b_q = _load(q, sqb, sqt, sqh, i_b, o_t, i_h, o_k, m_tk)
        b_k = _load(k, skb, skt, skh, i_b, o_t, i_h, o_k, m_tk)
        b_e = _load(erase, seb, ste, seh, i_b, o_t, i_h, o_k, m_tk)
        b_ga = _load(grad_a, gab, gat, gah, i_b, o_t, i_h, o_k, m_tk)
        b_gq = _load(grad_q, gqb, gqt, gqh, i_b, o_t, i_h, o_k, m_tk)
        b_gk = _load(grad_k, gkb, gkt, gkh, i_b, o_t, i_h, o_k, m_tk)
        b_gg = _load(grad_g, ggb, ggt, ggh, i_b, o_t, i_h, o_k, m_tk)
        b_d = _load(decay, sdb, sdt, sdh, i_b, o_t, i_h, o_k, m_tk)
        b_gv = _load(grad_v, gvb, gvt, gvh, i_b, o_t, i_h, o_v, m_tv)
        b_v = _load(v, svb, svt, svh, i_b, o_t, i_h, o_v, m_tv)
        w = sigmoid(_load(write, swb, swt, swh, i_b, o_t, i_h, o_v, m_tv))

        # erase vector
        b = sigmoid(b_e)
        r_q = tl.rsqrt(tl.sum(b_q * b_q, 1) + NORM_EPS)[:, None]
        r_k = tl.rsqrt(tl.sum(b_k * b_k, 1) + NORM_EPS)[:, None]
        x_q, x_k = b_q * r_q, b_k * r_k
        b_db = b_ga * x_k
        b_gk += b_ga * b
        if DIRECTION != "none":
            x, u, along, d = _direction(x_q, x_k, b, b_z, DIRECTION, GATE, PROJECT)
            sum_lam += tl.sum(b_ga * d, 1)
            b_du = lam * b_ga
            if PROJECT:
                # d = u - k (k . u): u gets P(dd), k gets -(k . u) dd - (k . dd) u
                inner = tl.sum(x_k * b_du, 1)[:, None]
                b_gk -= along[:, None] * b_du + inner * u
                b_du -= inner * x_k
            if GATE:
                b_db += b_du * x
                b_du *= b
            if DIRECTION == "query":
                b_gq += b_du
        _store(derase, T, H, K, i_b, o_t, i_h, o_k, m_tk, b_db * b * (1.0 - b))

        # norms: x r with r = (x . x + eps)^-1/2
        b_dq = r_q * (b_gq - x_q * tl.sum(x_q * b_gq, 1)[:, None])
        b_dk = r_k * (b_gk - x_k * tl.sum(x_k * b_gk, 1)[:, None])
        _store(dq, T, H, K, i_b, o_t, i_h, o_k, m_tk, b_dq)
        _store(dk, T, H, K, i_b, o_t, i_h, o_k, m_tk, b_dk)

        # decay
        soft, slope = _softplus(b_d + bias[None, :])
        b_dd = -rate * slope * b_gg
        _store(ddecay, T, H, K, i_b, o_t, i_h, o_k, m_tk, b_dd)
        sum_bias += b_dd
        sum_A += tl.sum(soft * b_gg, 1)

        # written value
        _store(dv, T, H, V, i_b, o_t, i_h, o_v, m_tv, b_gv * w)
        _store(dwrite, T, H, V, i_b, o_t, i_h, o_v, m_tv, b_gv * b_v * w * (1.0 - w))

    # one partial sum a program, added up afterwards in a fixed order
    part = sums + (i_bt.to(tl.int64) * H + i_h) * (K + 2)
    tl.store(part + o_k, tl.sum(sum_bias, 0), mask=m_k)
    held = tl.load(A_log + i_h).to(tl.float32) > A_LOG_MAX
    tl.store(part + K, tl.where(held, 0.0, -rate * tl.sum(sum_A, 0)))
    tl.store(part + K + 1, tl.sum(sum_lam, 0))


def forward(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, erase: Tensor, write: Tensor,
    A_log: Tensor, dt_bias: Tensor, strength: Tensor, z: Tensor | None, arm: Arm,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Launch the forward kernel; arguments as in :func:`qed.ops.inputs.recurrence_inputs`."""
    (B, T, H, K), V = q.shape, v.shape[-1]
    streams = [_dense(x) for x in (q, k, v, decay, erase, write)]
    parameters = [None if x is None else x.contiguous() for x in (A_log, dt_bias, strength, z)]
    outputs = (
        q.new_empty(q.shape),
        q.new_empty(q.shape),
        q.new_empty(v.shape),
        q.new_empty(q.shape),
        q.new_empty(q.shape, dtype=torch.float32),
    )
    B, T, strides = _rows(B, T, streams)
    BK, BV = triton.next_power_of_2(K), triton.next_power_of_2(V)
    BT = max(1, FORWARD_TILE // max(BK, BV))
    NT = triton.cdiv(T, BT)
    with torch.cuda.device_of(q):
        recurrence_inputs_kernel[(B * NT * H,)](
            *streams, *parameters,
            *outputs, T, NT, H, *strides,
            K=K, V=V, BT=BT, BK=BK, BV=BV, DIRECTION=arm.direction, GATE=arm.gate, PROJECT=arm.project,
            num_warps=FORWARD_WARPS,
        )  # fmt: skip
    return outputs


def backward(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, erase: Tensor, write: Tensor,
    A_log: Tensor, dt_bias: Tensor, strength: Tensor, z: Tensor | None, gradients: tuple[Tensor, ...], arm: Arm,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of the six streams and of A_log, dt_bias and strength; no atomics, so the same bits every time."""
    (B, T, H, K), V = q.shape, v.shape[-1]
    streams = [_dense(x) for x in (q, k, v, decay, erase, write)]
    parameters = [None if x is None else x.contiguous() for x in (A_log, dt_bias, strength, z)]
    gradients = tuple(_dense(x) for x in gradients)
    outputs = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in streams]
    B, T, strides = _rows(B, T, [*streams, *gradients])
    BK, BV = triton.next_power_of_2(K), triton.next_power_of_2(V)
    BT = max(1, BACKWARD_TILE // max(BK, BV))
    NB = max(1, min(BACKWARD_TOKENS // BT, triton.next_power_of_2(triton.cdiv(T, BT))))
    NT = triton.cdiv(T, BT * NB)
    sums = q.new_empty((B * NT, H, K + 2), dtype=torch.float32)
    with torch.cuda.device_of(q):
        recurrence_inputs_backward_kernel[(B * NT * H,)](
            *streams, *parameters,
            *gradients, *outputs, sums, T, NT, H, *strides,
            K=K, V=V, BT=BT, NB=NB, BK=BK, BV=BV, DIRECTION=arm.direction, GATE=arm.gate, PROJECT=arm.project,
            num_warps=BACKWARD_WARPS,
        )  # fmt: skip
    bias, rate, strength_sum = sums.sum(0).split([K, 1, 1], -1)
    dA_log, dstrength = rate[:, 0].to(A_log.dtype, copy=True), strength_sum[:, 0].to(strength.dtype, copy=True)
    return *outputs, dA_log, bias.to(dt_bias.dtype, copy=True), dstrength


def _dense(x: Tensor) -> Tensor:
    """The kernels take any strides but a dense last axis."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _rows(B: int, T: int, tensors: list[Tensor]) -> tuple[int, int, list[int]]:
    """Fold batch into time where every layout allows it, so that short sequences still fill the tiles."""
    strides = [x.stride()[:3] for x in tensors]
    if B == 1 or all(s_b == T * s_t for s_b, s_t, _ in strides):
        return 1, B * T, [s for s_b, s_t, s_h in strides for s in (0, s_t, s_h)]
    return B, T, [s for triple in strides for s in triple]
