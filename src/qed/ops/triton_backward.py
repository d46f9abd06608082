"""Backward kernels of the gated delta rule; the derivation is in docs/kernels.md.

``reverse`` carries the state's gradient back over the chunks and yields dv. With the residuals and dv known what is
left needs no inverse, it is the backward of linear attention, parallel over blocks of 64 tokens: ``scores`` for their
pairs, ``gradient`` for what reads the state (q, a) and again for what writes it (k). Names and layouts as in
triton_chunks.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qed.ops.tiles import BLOCK, Plan
from qed.ops.triton_chunks import UNSPECIALIZED, C, Problem, first_unit, locate, precision, prepare, width
from qed.ops.triton_decay import HALF, log2_decay, pair_decay, pairs_of, span, split, sums
from qed.ops.triton_forward import join, walk

B = tl.constexpr(BLOCK)
# Below this log-decay (base 2) a token's own decay is under float32 resolution, and so is its gradient.
VANISHED = tl.constexpr(-24.5)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def reverse_kernel(
    grad_o, p_q, p_a, p_k, p_m, p_d, last, grad_v, states, first, cu, T, N, SEARCH, TOKENS,
    so_t, so_h, sl_v, sl_k,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, UNIT: tl.constexpr,
    SEGMENT: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr, PACKED: tl.constexpr, PHASE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """BV rows of the transposed state's gradient, back over one segment.

    PHASE "whole": from the given gradient ``last``; writes dv, the gradient after each block of 64 tokens and the
    initial state's. "first": from zero; writes only what reaches the segment's start.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    i_v = pid % NV
    i_h = ((pid // NV) % H).to(tl.int64)
    i_s = pid // (NV * H)
    n, begin, end, start = locate(i_s, cu, T, N, SEARCH, UNIT, PACKED)
    if start >= end:
        return
    stop = tl.minimum(start + UNIT, end)
    if PHASE == "first":
        if start == begin:
            return
    i = tl.arange(0, C)
    o_c = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    m_c = (o_c < K)[None, :]
    m_v = (o_v < V)[:, None]
    if PHASE == "first":
        b_s = tl.zeros([BV, BK], tl.float32)
    else:
        i_i = i_s if SEGMENT else n
        p_l = last + (i_i.to(tl.int64) * H + i_h) * K * V + o_v[:, None] * sl_v + o_c[None, :] * sl_k
        b_s = tl.load(p_l, mask=m_v & m_c, other=0.0).to(tl.float32)
    i_d = first_unit(n, begin, T, C, PACKED) + (start - begin) // C
    i_b = first_unit(n, begin, T, B, PACKED) + (start - begin) // B
    head = i_h * TOKENS + start
    at = i[:, None] * K + o_c[None, :]
    count = tl.cdiv((stop - start).to(tl.int32), C)
    for step in tl.range(0, count, num_stages=STAGES):
        i_c = count - 1 - step
        left = (stop - start).to(tl.int32) - i_c * C
        m_t = i < left
        m = m_t[:, None] & m_c
        m_vt = m_v & m_t[None, :]
        base = head + i_c * C
        b_k = tl.load(p_k + base * K + at, mask=m, other=0.0)
        b_a = tl.load(p_a + base * K + at, mask=m, other=0.0)
        b_q = tl.load(p_q + base * K + at, mask=m, other=0.0)
        b_m = tl.load(p_m + base * C + i[:, None] * C + i[None, :], mask=m_t[:, None], other=0.0)
        b_d = tl.load(p_d + ((i_d + i_c) * H + i_h) * K + o_c, mask=o_c < K, other=0.0)
        token = start + i_c * C
        p_o = grad_o + token * so_t + i_h * so_h + i[None, :] * so_t + o_v[:, None]
        b_o = tl.load(p_o, mask=m_vt, other=0.0).to(DT)
        b_x = b_s.to(DT)
        if PHASE == "whole":
            if (i_c % 4 == 3) | (step == 0):
                p_s = states + (((i_b + i_c // 4) * H + i_h) * V + o_v[:, None]) * K + o_c[None, :]
                tl.store(p_s, b_x, mask=m_v & m_c)
        b_v = tl.dot(b_o, b_m, input_precision=PREC)
        b_v = tl.dot(b_x, tl.trans(b_k), b_v, input_precision=PREC)
        if PHASE == "whole":
            p_v = grad_v + (token * H + i_h) * V + i[None, :] * (H * V) + o_v[:, None]
            tl.store(p_v, b_v.to(grad_v.dtype.element_ty), mask=m_vt)
        b_s = tl.dot(b_o, b_q, b_s * b_d[None, :], input_precision=PREC)
        b_s = tl.dot(b_v.to(DT), b_a, b_s, input_precision=PREC)
    if PHASE == "first":
        p_f = first + ((i_s.to(tl.int64) * H + i_h) * V + o_v[:, None]) * K + o_c[None, :]
        tl.store(p_f, b_s, mask=m_v & m_c)
    else:
        if start == begin:
            p_f = first + (n.to(tl.int64) * H + i_h) * K * V + o_v[:, None] + o_c[None, :] * V
            tl.store(p_f, b_s, mask=m_v & m_c)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def scores_kernel(
    grad_o, grad_v, residual, reads, erases, own, cu, T, N, SEARCH, TOKENS, so_t, so_h,
    H: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    DT: tl.constexpr, PREC: tl.constexpr, PACKED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``do_i . r_j`` and ``dv_i . r_j`` of 64 tokens for j < i, else zero; ``do_i . r_i`` into ``own``.

    A token's own pair is kept apart: no decay lies in it, and without it dg is no difference of large terms where the
    decay is strong.
    """
    pid = tl.program_id(0)
    i_h = (pid % H).to(tl.int64)
    i_b = pid // H
    _, _, end, start = locate(i_b, cu, T, N, SEARCH, B, PACKED)
    if start >= end:
        return
    i = tl.arange(0, B)
    r, c = i[:, None], i[None, :]
    o_v = tl.arange(0, BV)
    m_t = (i < end - start)[:, None]
    p_o = grad_o + start * so_t + i_h * so_h + r * so_t
    p_v = grad_v + (start * H + i_h) * V + r * (H * V)
    p_r = residual + (i_h * TOKENS + start) * V + r * V
    b_x = tl.zeros([B, B], tl.float32)
    b_y = tl.zeros([B, B], tl.float32)
    for i_v in tl.range(0, (V + BV - 1) // BV, num_stages=STAGES):
        x_v = (i_v * BV + o_v)[None, :]
        m_v = m_t & (x_v < V)
        b_o = tl.load(p_o + x_v, mask=m_v, other=0.0).to(DT)
        b_v = tl.load(p_v + x_v, mask=m_v, other=0.0).to(DT)
        b_r = tl.load(p_r + x_v, mask=m_v, other=0.0)
        b_x = tl.dot(b_o, tl.trans(b_r), b_x, input_precision=PREC)
        b_y = tl.dot(b_v, tl.trans(b_r), b_y, input_precision=PREC)
    at = (i_b.to(tl.int64) * H + i_h) * B
    tl.store(own + at + i, tl.sum(tl.where(r == c, b_x, 0.0), 1))
    tl.store(reads + at * B + r * B + c, tl.where(r > c, b_x, 0.0).to(DT))
    tl.store(erases + at * B + r * B + c, tl.where(r > c, b_y, 0.0).to(DT))


@triton.jit(do_not_specialize=UNSPECIALIZED)
def gradient_kernel(
    q, k, a, g, grad_o, grad_v, residual, states, grad_states, reads, erases, own, later,
    grad_q, grad_k, grad_a, grad_g, cu, T, N, SEARCH, TOKENS,
    sq_t, sq_h, sk_t, sk_h, sa_t, sa_h, sg_t, sg_h, so_t, so_h,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, sg_k: tl.constexpr,
    DT: tl.constexpr, PREC: tl.constexpr, PACKED: tl.constexpr, PHASE: tl.constexpr, STAGES: tl.constexpr,
    NEAR: tl.constexpr,
):  # fmt: skip
    """BK channels of 64 tokens.

    PHASE "reads": dq and da, ``q dq + a da`` into ``grad_g``, ``exp(G_C) sum_v S dS`` into ``later``. Then "writes":
    dk, and dg from what is there. NEAR: all pairs may be one product where the decay allows it.
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    pid = tl.program_id(0)
    i_k = pid % NK
    i_h = ((pid // NK) % H).to(tl.int64)
    i_b = pid // (NK * H)
    _, _, end, start = locate(i_b, cu, T, N, SEARCH, B, PACKED)
    if start >= end:
        return
    i = tl.arange(0, B)
    r, c = i[:, None], i[None, :]
    o_c = i_k * BK + tl.arange(0, BK)
    o_v = tl.arange(0, BV)
    m_t = (i < end - start)[:, None]
    m_c = (o_c < K)[None, :]
    m = m_t & m_c
    p_g = g + start * sg_t + i_h * sg_h + r * sg_t + (o_c * sg_k)[None, :]
    p_q = q + start * sq_t + i_h * sq_h + r * sq_t + o_c[None, :]
    p_k = k + start * sk_t + i_h * sk_h + r * sk_t + o_c[None, :]
    p_a = a + start * sa_t + i_h * sa_h + r * sa_t + o_c[None, :]
    p_o = grad_o + start * so_t + i_h * so_h + r * so_t
    p_v = grad_v + (start * H + i_h) * V + r * (H * V)
    p_r = residual + (i_h * TOKENS + start) * V + r * V
    block = i_b.to(tl.int64) * H + i_h
    at_s = block * V * K
    at_x = block * B * B + r * B + c
    at_k = (start * H + i_h) * K + r * (H * K) + o_c[None, :]
    b_own = tl.load(own + block * B + i)[:, None]
    # Here and below, loads stand before the stores and products that they need not wait for: the compiler moves none
    b_g = log2_decay(tl.load(p_g, mask=m, other=0.0))
    if PHASE == "reads":
        b_dq = tl.zeros([B, BK], tl.float32)
        b_da = tl.zeros([B, BK], tl.float32)
        b_l = tl.zeros([BK], tl.float32)
        for i_v in tl.range(0, (V + BV - 1) // BV, num_stages=STAGES):
            x_v = i_v * BV + o_v
            m_v = m_t & (x_v < V)[None, :]
            b_o = tl.load(p_o + x_v[None, :], mask=m_v, other=0.0).to(DT)
            b_v = tl.load(p_v + x_v[None, :], mask=m_v, other=0.0).to(DT)
            at = at_s + x_v[:, None] * K + o_c[None, :]
            b_s = tl.load(states + at, mask=(x_v < V)[:, None] & m_c, other=0.0)
            b_z = tl.load(grad_states + at, mask=(x_v < V)[:, None] & m_c, other=0.0)
            b_dq = tl.dot(b_o, b_s, b_dq, input_precision=PREC)
            b_da = tl.dot(b_v, b_s, b_da, input_precision=PREC)
            b_l += tl.sum(b_s.to(tl.float32) * b_z.to(tl.float32), 0)
        total = tl.sum(b_g, 0)
        tl.store(later + block * K + o_c, b_l * tl.exp2(total), mask=o_c < K)
        b_c = tl.cumsum(b_g, 0)
        b_dq *= tl.exp2(b_c)
        b_da *= tl.exp2(b_c)
        if NEAR and tl.min(total) > -2 * HALF:
            middle = 0.5 * total[None, :]
            b_k = tl.load(p_k, mask=m, other=0.0)
            b_x = tl.load(reads + at_x)
            b_e = tl.load(erases + at_x)
            b_y = (b_k.to(tl.float32) * tl.exp2(middle - b_c)).to(DT)
            reader = tl.exp2(b_c - middle)
            b_dq += reader * tl.dot(b_x, b_y, input_precision=PREC)
            b_da += reader * tl.dot(b_e, b_y, input_precision=PREC)
        else:
            b_g = log2_decay(tl.load(p_g, mask=m, other=0.0))
            SPAN = span(b_g)
            g_high, g_low = split(b_g, DT)
            for LEVEL in tl.range(SPAN, 7, num_stages=1):
                reader, writer = pair_decay(g_high, g_low, i, LEVEL, SPAN, DT, PREC)
                pairs = pairs_of(i, LEVEL, SPAN)
                b_y = (tl.load(p_k, mask=m, other=0.0).to(tl.float32) * writer).to(DT)
                b_dq += reader * tl.dot(tl.where(pairs, tl.load(reads + at_x), 0.0), b_y, input_precision=PREC)
                b_da += reader * tl.dot(tl.where(pairs, tl.load(erases + at_x), 0.0), b_y, input_precision=PREC)
        b_k = tl.load(p_k, mask=m, other=0.0).to(tl.float32)
        b_q = tl.load(p_q, mask=m, other=0.0).to(tl.float32)
        b_a = tl.load(p_a, mask=m, other=0.0).to(tl.float32)
        tl.store(grad_q + at_k, (b_dq + b_k * b_own).to(grad_q.dtype.element_ty), mask=m)
        tl.store(grad_a + at_k, (-b_da).to(grad_a.dtype.element_ty), mask=m)
        tl.store(grad_g + at_k, b_q * b_dq - b_a * b_da, mask=m)
    else:
        b_dk = tl.zeros([B, BK], tl.float32)
        for i_v in tl.range(0, (V + BV - 1) // BV, num_stages=STAGES):
            x_v = i_v * BV + o_v
            b_r = tl.load(p_r + x_v[None, :], mask=m_t & (x_v < V)[None, :], other=0.0)
            p_z = grad_states + at_s + x_v[:, None] * K + o_c[None, :]
            b_z = tl.load(p_z, mask=(x_v < V)[:, None] & m_c, other=0.0)
            b_dk = tl.dot(b_r, b_z, b_dk, input_precision=PREC)
        total = tl.sum(b_g, 0)
        if NEAR and tl.min(total) > -2 * HALF:
            middle = 0.5 * total[None, :]
            b_c = tl.cumsum(b_g, 0) - middle
            b_dk *= tl.exp2(middle - b_c)
            reader = tl.exp2(b_c)
            b_q = tl.load(p_q, mask=m, other=0.0)
            b_a = tl.load(p_a, mask=m, other=0.0)
            b_x = tl.load(reads + at_x)
            b_e = tl.load(erases + at_x)
            b_y = (b_q.to(tl.float32) * reader).to(DT)
            b_w = tl.dot(tl.trans(b_x), b_y, input_precision=PREC)
            b_y = (b_a.to(tl.float32) * -reader).to(DT)
            b_w = tl.dot(tl.trans(b_e), b_y, b_w, input_precision=PREC)
            b_w *= tl.exp2(-b_c)
        else:
            b_g = log2_decay(tl.load(p_g, mask=m, other=0.0))
            SPAN = span(b_g)
            g_high, g_low = split(b_g, DT)
            b_dk *= tl.exp2(sums(c > r, g_high, g_low, DT, PREC))
            b_w = tl.zeros([B, BK], tl.float32)
            for LEVEL in tl.range(SPAN, 7, num_stages=1):
                reader, writer = pair_decay(g_high, g_low, i, LEVEL, SPAN, DT, PREC)
                pairs = pairs_of(i, LEVEL, SPAN)
                b_x = tl.trans(tl.where(pairs, tl.load(reads + at_x), 0.0))
                b_y = (tl.load(p_q, mask=m, other=0.0).to(tl.float32) * reader).to(DT)
                b_u = tl.dot(b_x, b_y, input_precision=PREC)
                b_x = tl.trans(tl.where(pairs, tl.load(erases + at_x), 0.0))
                b_y = (tl.load(p_a, mask=m, other=0.0).to(tl.float32) * -reader).to(DT)
                b_u = tl.dot(b_x, b_y, b_u, input_precision=PREC)
                b_w += writer * b_u
        b_q = tl.load(p_q, mask=m, other=0.0).to(tl.float32)
        b_k = tl.load(p_k, mask=m, other=0.0).to(tl.float32)
        b_dg = tl.load(grad_g + at_k, mask=m, other=0.0)
        b_l = tl.load(later + block * K + o_c, mask=o_c < K, other=0.0)
        b_g = log2_decay(tl.load(p_g, mask=m, other=0.0))
        tl.store(grad_k + at_k, (b_dk + b_w + b_q * b_own).to(grad_k.dtype.element_ty), mask=m)
        b_dg -= b_k * b_w
        b_l += tl.sum(b_dg, 0)
        b_dg -= b_k * b_dk
        b_dg += b_l[None, :] - tl.cumsum(b_dg, 0)
        tl.store(grad_g + at_k, tl.where(b_g < VANISHED, 0.0, b_dg), mask=m)


def backward(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, g: Tensor, initial: Tensor, cu: Tensor | None,
    starts: Tensor, transition: Tensor, grad_o: Tensor, grad_final: Tensor, problem: Problem, plan: Plan,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of ``q, k, v, a, g`` and the initial state; chunk operands, residuals and states are recomputed."""
    H, K, V, tokens = problem.num_heads, problem.K, problem.V, problem.tokens
    BK, BV = width(K), width(V)
    by_segment = problem.split
    chunks: tuple[Tensor, ...] = prepare(q, k, a, g, cu, problem, plan, inverse=True)
    residual = q.new_empty(H, tokens, V, dtype=plan.operand)
    states = q.new_empty(problem.units(BLOCK), H, V, K, dtype=plan.operand)
    source = starts if by_segment else initial
    walk("states", v, chunks, source, (None, states, residual, None), cu, problem, plan, by_segment=by_segment)

    def reverse(phase: str, last: Tensor, outputs: tuple[Tensor | None, ...]) -> None:
        p_q, p_a, p_k, p_m, _, p_d = chunks
        rows = min(plan.reverse_rows, BV)
        sl_v, sl_k = (K, 1) if by_segment else (1, V)
        reverse_kernel[(problem.units(problem.segment) * H * triton.cdiv(V, rows),)](
            grad_o, p_q, p_a, p_k, p_m, p_d, last, *outputs, cu,
            problem.length, problem.num_docs, problem.search, tokens,
            grad_o.stride(1), grad_o.stride(2), sl_v, sl_k,
            H=H, K=K, V=V, BK=BK, BV=rows, UNIT=problem.segment, SEGMENT=by_segment, PACKED=problem.packed, PHASE=phase,
            STAGES=plan.reverse_stages, num_warps=plan.reverse_warps, **precision(plan),
        )  # fmt: skip

    last = grad_final
    if by_segment:
        moved = torch.empty_like(starts)
        reverse("first", grad_final, (None, None, moved))
        last = join(grad_final, moved, transition, cu, problem, plan, reverse=True)
    grad_v = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    grad_states = torch.empty_like(states)
    grad_initial = torch.empty_like(initial)
    reverse("whole", last, (grad_v, grad_states, grad_initial))
    chunks = ()

    grad_q, grad_k, grad_a = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, a))
    grad_g = torch.empty(g.shape, dtype=torch.float32, device=g.device)
    # Tiles under 128 bytes wide are compiled wrongly for Hopper (Triton 3.6): narrow heads are padded
    channels = max(min(64, plan.gradient_channels), min(plan.gradient_channels, BK))
    units = cu, problem.length, problem.num_docs, problem.search, tokens
    so_t, so_h = grad_o.stride(1), grad_o.stride(2)
    # Float32 products of the short form are compiled wrongly for Hopper (Triton 3.6); interpreted, it is checked
    near = plan.operand is torch.bfloat16 or not q.is_cuda
    options = {
        "H": H, "V": V, "BV": min(plan.gradient_rows, max(64, BV)), "PACKED": problem.packed,
        "STAGES": plan.gradient_stages, "num_warps": plan.gradient_warps, **precision(plan),
    }  # fmt: skip
    blocks = problem.units(BLOCK)
    reads, erases = (q.new_empty(blocks, H, BLOCK, BLOCK, dtype=plan.operand) for _ in range(2))
    own = q.new_empty(blocks, H, BLOCK, dtype=torch.float32)
    later = q.new_empty(blocks, H, K, dtype=torch.float32)
    scores_kernel[(blocks * H,)](grad_o, grad_v, residual, reads, erases, own, *units, so_t, so_h, **options)
    for phase in ("reads", "writes"):
        gradient_kernel[(blocks * H * triton.cdiv(K, channels),)](
            q, k, a, g, grad_o, grad_v, residual, states, grad_states, reads, erases, own, later,
            grad_q, grad_k, grad_a, grad_g, *units,
            q.stride(1), q.stride(2), k.stride(1), k.stride(2), a.stride(1), a.stride(2), g.stride(1), g.stride(2),
            so_t, so_h, K=K, BK=channels, sg_k=g.stride(3), NEAR=near, PHASE=phase, **options,
        )  # fmt: skip
    return grad_q, grad_k, grad_v, grad_a, grad_g, grad_initial
