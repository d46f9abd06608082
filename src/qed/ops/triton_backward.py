"""Backward kernels of the gated delta rule; the derivation is in docs/kernels.md.

``reverse`` carries the state's gradient back over the chunks and yields dv; ``gradient`` is parallel over blocks of 64
tokens and, with the residuals and dv known, needs no inverse: it is the backward of linear attention. Names and layouts
as in triton_forward.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qed.ops.tiles import BLOCK, Plan
from qed.ops.triton_forward import (
    LIMIT,
    UNSPECIALIZED,
    C,
    Problem,
    first_unit,
    join,
    level_decay,
    level_pairs,
    locate,
    log2_decay,
    precision,
    prepare,
    sums,
    walk,
    width,
)

B = tl.constexpr(BLOCK)
# Below this log-decay a token's own decay is under float32 resolution, and so is its gradient.
VANISHED = tl.constexpr(-17.0)


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
        b_s = tl.dot((-b_v).to(DT), b_a, b_s, input_precision=PREC)
    if PHASE == "first":
        p_f = first + ((i_s.to(tl.int64) * H + i_h) * V + o_v[:, None]) * K + o_c[None, :]
        tl.store(p_f, b_s, mask=m_v & m_c)
    else:
        if start == begin:
            p_f = first + (n.to(tl.int64) * H + i_h) * K * V + o_v[:, None] + o_c[None, :] * V
            tl.store(p_f, b_s, mask=m_v & m_c)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def gradient_kernel(
    q, k, a, g, p_q, p_a, grad_o, grad_v, residual, states, grad_states, grad_q, grad_k, grad_a, grad_g,
    cu, T, N, SEARCH, TOKENS,
    sq_t, sq_h, sk_t, sk_h, sa_t, sa_h, sg_t, sg_h, so_t, so_h,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, sg_k: tl.constexpr,
    DT: tl.constexpr, PREC: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """BK channels of one block: forward over its chunks with the state (dq, da), back with its gradient (dk, dg)."""
    NK: tl.constexpr = (K + BK - 1) // BK
    pid = tl.program_id(0)
    i_k = pid % NK
    i_h = ((pid // NK) % H).to(tl.int64)
    i_b = pid // (NK * H)
    _, _, end, start = locate(i_b, cu, T, N, SEARCH, B, PACKED)
    if start >= end:
        return
    size = tl.minimum(end - start, B).to(tl.int32)
    count = tl.cdiv(size, C)
    i = tl.arange(0, C)
    r, c = i[:, None], i[None, :]
    o_c = i_k * BK + tl.arange(0, BK)
    o_v = tl.arange(0, BV)
    m_c = (o_c < K)[:, None]
    m_v = (o_v < V)[None, :]
    at_s = (i_b.to(tl.int64) * H + i_h) * V * K
    at = o_v[None, :] * K + o_c[:, None]
    b_s = tl.load(states + at_s + at, mask=m_c & m_v, other=0.0).to(tl.float32)
    q += start * sq_t + i_h * sq_h
    k += start * sk_t + i_h * sk_h
    a += start * sa_t + i_h * sa_h
    g += start * sg_t + i_h * sg_h
    grad_o += start * so_t + i_h * so_h
    grad_v += (start * H + i_h) * V
    head = i_h * TOKENS + start
    residual += head * V
    p_q += head * K
    p_a += head * K
    at_k = (start * H + i_h) * K
    grad_q += at_k
    grad_k += at_k
    grad_a += at_k
    grad_g += at_k
    # Not pipelined, either loop: Triton 3.6 does not compile it so
    for i_c in tl.range(0, count, num_stages=1):
        t = i_c * C + i
        m_t = t < size
        m = m_c & m_t[None, :]
        m_vt = m_t[:, None] & m_v
        b_g = log2_decay(tl.load(g + t[None, :] * sg_t + o_c[:, None] * sg_k, mask=m, other=0.0))
        b_q = tl.load(q + t[None, :] * sq_t + o_c[:, None], mask=m, other=0.0).to(tl.float32)
        b_k = tl.load(k + t[None, :] * sk_t + o_c[:, None], mask=m, other=0.0).to(tl.float32)
        b_a = tl.load(a + t[None, :] * sa_t + o_c[:, None], mask=m, other=0.0).to(tl.float32)
        b_o = tl.load(grad_o + t[:, None] * so_t + o_v[None, :], mask=m_vt, other=0.0).to(DT)
        b_v = tl.load(grad_v + t[:, None] * (H * V) + o_v[None, :], mask=m_vt, other=0.0).to(DT)
        b_r = tl.load(residual + t[:, None] * V + o_v[None, :], mask=m_vt, other=0.0)
        b_x = b_s.to(DT)
        b_dq = tl.dot(b_x, tl.trans(b_o), input_precision=PREC)
        b_da = tl.dot(b_x, tl.trans(b_v), input_precision=PREC)
        # Scores' gradients [j, i], row i and column j. A token's own is kept apart: no decay lies in it, and without it
        # dg is no difference of large terms where the decay is strong
        reads = tl.dot(b_r, tl.trans(b_o), input_precision=PREC)
        own = tl.sum(tl.where(r == c, reads, 0.0), 0)[None, :]
        reads = tl.where(r < c, reads, 0.0)
        erases = tl.where(r < c, tl.dot(b_r, tl.trans(b_v), input_precision=PREC), 0.0)
        b_c = sums(b_g, r <= c, DT, False)
        total = tl.sum(b_g, 1)
        since = tl.exp2(b_c)
        if tl.min(total, 0) < -LIMIT:
            b_dq *= since
            b_da *= since
            for LEVEL in range(4):
                b_e = level_decay(b_g, i, LEVEL, DT, True)
                pairs = level_pairs(i, LEVEL)
                b_y = (b_k * b_e).to(DT)
                x = tl.trans(tl.where(pairs, tl.trans(reads), 0.0))
                y = tl.trans(tl.where(pairs, tl.trans(erases), 0.0))
                b_dq += b_e * tl.dot(b_y, x.to(DT), input_precision=PREC)
                b_da += b_e * tl.dot(b_y, y.to(DT), input_precision=PREC)
            b_y = b_k * tl.exp2(sums(b_g, r > c, DT, False))
        else:
            b_y = (b_k * tl.exp2(-b_c)).to(DT)
            b_dq = since * tl.dot(b_y, reads.to(DT), b_dq, input_precision=PREC)
            b_da = since * tl.dot(b_y, erases.to(DT), b_da, input_precision=PREC)
            b_y = b_k * tl.exp2(total[:, None] - b_c)
        to = t[None, :] * (H * K) + o_c[:, None]
        tl.store(grad_q + to, (b_dq + b_k * own).to(grad_q.dtype.element_ty), mask=m)
        tl.store(grad_a + to, (-b_da).to(grad_a.dtype.element_ty), mask=m)
        tl.store(grad_g + to, b_q * b_dq - b_a * b_da, mask=m)
        b_s = tl.dot(b_y.to(DT), b_r, b_s * tl.exp2(total)[:, None], input_precision=PREC)
    b_z = tl.load(grad_states + at_s + at, mask=m_c & m_v, other=0.0).to(tl.float32)
    later = tl.sum(b_s * b_z, 1)
    # grad_g is read back below, by other threads
    tl.debug_barrier()
    for step in tl.range(0, count, num_stages=1):
        t = (count - 1 - step) * C + i
        m_t = t < size
        m = m_c & m_t[None, :]
        m_vt = m_t[:, None] & m_v
        x_g = tl.load(g + t[None, :] * sg_t + o_c[:, None] * sg_k, mask=m, other=0.0)
        b_g = log2_decay(x_g)
        b_k = tl.load(k + t[None, :] * sk_t + o_c[:, None], mask=m, other=0.0).to(tl.float32)
        x_q = tl.trans(tl.load(p_q + t[:, None] * K + o_c[None, :], mask=tl.trans(m), other=0.0))
        x_a = tl.trans(tl.load(p_a + t[:, None] * K + o_c[None, :], mask=tl.trans(m), other=0.0))
        b_o = tl.load(grad_o + t[:, None] * so_t + o_v[None, :], mask=m_vt, other=0.0).to(DT)
        b_v = tl.load(grad_v + t[:, None] * (H * V) + o_v[None, :], mask=m_vt, other=0.0).to(DT)
        b_r = tl.load(residual + t[:, None] * V + o_v[None, :], mask=m_vt, other=0.0)
        to = t[None, :] * (H * K) + o_c[:, None]
        b_dg = tl.load(grad_g + to, mask=m, other=0.0)
        b_dk = tl.dot(b_z.to(DT), tl.trans(b_r), input_precision=PREC)
        # [i, j] here
        reads = tl.dot(b_o, tl.trans(b_r), input_precision=PREC)
        own = tl.sum(tl.where(r == c, reads, 0.0), 0)[None, :]
        reads = tl.where(r > c, reads, 0.0)
        erases = tl.where(r > c, tl.dot(b_v, tl.trans(b_r), input_precision=PREC), 0.0)
        b_c = sums(b_g, r <= c, DT, False)
        total = tl.sum(b_g, 1)
        if tl.min(total, 0) < -LIMIT:
            b_q = tl.load(q + t[None, :] * sq_t + o_c[:, None], mask=m, other=0.0).to(tl.float32)
            b_a = tl.load(a + t[None, :] * sa_t + o_c[:, None], mask=m, other=0.0).to(tl.float32)
            b_dk *= tl.exp2(sums(b_g, r > c, DT, False))
            for LEVEL in range(4):
                b_e = level_decay(b_g, i, LEVEL, DT, True)
                pairs = level_pairs(i, LEVEL)
                x = tl.where(pairs, reads, 0.0).to(DT)
                y = tl.where(pairs, erases, 0.0).to(DT)
                b_w = tl.dot((b_q * b_e).to(DT), x, input_precision=PREC)
                b_dk += b_e * tl.dot((b_a * -b_e).to(DT), y, b_w, input_precision=PREC)
        else:
            b_w = tl.dot(x_q, reads.to(DT), input_precision=PREC)
            b_w = tl.dot(x_a, (-erases).to(DT), b_w, input_precision=PREC)
            b_dk = tl.exp2(total[:, None] - b_c) * b_dk + tl.exp2(-b_c) * b_w
        b_q = tl.load(q + t[None, :] * sq_t + o_c[:, None], mask=m, other=0.0).to(tl.float32)
        tl.store(grad_k + to, (b_dk + b_q * own).to(grad_k.dtype.element_ty), mask=m)
        b_dg -= b_k * b_dk
        x_g = tl.where(x_g < VANISHED, 0.0, sums(b_dg, r >= c, DT, False) + later[:, None])
        later += tl.sum(b_dg, 1)
        tl.store(grad_g + to, x_g, mask=m)
        b_z = tl.dot(x_q, b_o, b_z * tl.exp2(total)[:, None], input_precision=PREC)
        b_z = tl.dot(x_a, -b_v, b_z, input_precision=PREC)


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
    p_q, p_a = chunks[:2]
    chunks = ()

    grad_q, grad_k, grad_a = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, a))
    grad_g = torch.empty(g.shape, dtype=torch.float32, device=g.device)
    channels = min(plan.gradient_channels, BK)
    gradient_kernel[(problem.units(BLOCK) * H * triton.cdiv(K, channels),)](
        q, k, a, g, p_q, p_a, grad_o, grad_v, residual, states, grad_states, grad_q, grad_k, grad_a, grad_g, cu,
        problem.length, problem.num_docs, problem.search, tokens,
        q.stride(1), q.stride(2), k.stride(1), k.stride(2), a.stride(1), a.stride(2), g.stride(1), g.stride(2),
        grad_o.stride(1), grad_o.stride(2),
        H=H, K=K, V=V, BK=channels, BV=BV, sg_k=g.stride(3), PACKED=problem.packed,
        num_warps=plan.gradient_warps, **precision(plan),
    )  # fmt: skip
    return grad_q, grad_k, grad_v, grad_a, grad_g, grad_initial
