"""Forward kernels of the gated delta rule over chunks that ``triton_chunks`` prepares; see docs/kernels.md.

``walk`` carries the state over the chunks of a segment; ``join`` hands the state from segment to segment when a
sequence is split. Names as in ``triton_chunks``; states are ``[., H, V, K]``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qed.ops.tiles import BLOCK, Plan
from qed.ops.triton_chunks import UNSPECIALIZED, C, Problem, first_unit, locate, precision, prepare, width

B = tl.constexpr(BLOCK)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def walk_kernel(
    v, p_a, p_k, p_m, p_t, p_d, initial, o, states, residual, final, cu, T, N, SEARCH, TOKENS,
    sv_t, sv_h, si_v, si_k,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, UNIT: tl.constexpr,
    SEGMENT: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr, PACKED: tl.constexpr, PHASE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """BV rows of the transposed state over one segment.

    PHASE "whole": from the given state, writes o and the final state. "first": from zero, with K more rows that start
    as the identity and so end as the segment's transition. "states": from the given state, writes the state before
    each 64 tokens and the residuals. SEGMENT: the given states belong to segments, not documents.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    NR: tl.constexpr = NV + (K + BV - 1) // BV if PHASE == "first" else NV
    pid = tl.program_id(0)
    i_v = pid % NR
    i_h = ((pid // NR) % H).to(tl.int64)
    i_s = pid // (NR * H)
    n, begin, end, start = locate(i_s, cu, T, N, SEARCH, UNIT, PACKED)
    if start >= end:
        return
    stop = tl.minimum(start + UNIT, end)
    if PHASE == "first":
        if stop - start == end - begin:
            return
    i = tl.arange(0, C)
    o_c = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    m_c = (o_c < K)[None, :]
    m_v = (o_v < V)[:, None]
    head = i_h * TOKENS + start
    if PHASE == "first":
        b_s = tl.where((o_v - NV * BV)[:, None] == o_c[None, :], 1.0, 0.0)
    elif initial is None:
        b_s = tl.zeros([BV, BK], tl.float32)
    else:
        i_i = i_s if SEGMENT else n
        p_i = initial + (i_i.to(tl.int64) * H + i_h) * K * V + o_v[:, None] * si_v + o_c[None, :] * si_k
        b_s = tl.load(p_i, mask=m_v & m_c, other=0.0).to(tl.float32)
    i_d = first_unit(n, begin, T, C, PACKED) + (start - begin) // C
    i_b = first_unit(n, begin, T, B, PACKED) + (start - begin) // B
    at = i[:, None] * K + o_c[None, :]
    size = (stop - start).to(tl.int32)
    # rows of -a, then of q
    j = tl.arange(0, 2 * C)
    at_both = (j // C).to(tl.int64)[:, None] * (H * K) * TOKENS + (j % C)[:, None] * K + o_c[None, :]
    eye = tl.where(i[:, None] == i[None, :], 1.0, 0.0).to(DT)
    eye_both = tl.where(i[:, None] == j[None, :], 1.0, 0.0).to(DT)
    for i_c in tl.range(0, tl.cdiv(size, C), num_stages=STAGES):
        m_t = i < size - i_c * C
        m = m_t[:, None] & m_c
        m_vt = m_t[:, None] & (o_v < V)[None, :]
        token = start + i_c * C
        base = head + i_c * C
        b_k = tl.load(p_k + base * K + at, mask=m, other=0.0)
        b_d = tl.load(p_d + ((i_d + i_c) * H + i_h) * K + o_c, mask=o_c < K, other=0.0)
        b_v = tl.load(v + token * sv_t + i_h * sv_h + i[:, None] * sv_t + o_v[None, :], mask=m_vt, other=0.0)
        b_x = b_s.to(DT)
        if PHASE == "states":
            if i_c % 4 == 0:
                p_s = states + (((i_b + i_c // 4) * H + i_h) * V + o_v[:, None]) * K + o_c[None, :]
                tl.store(p_s, b_x, mask=m_v & m_c)
        # v through a product with the identity: an operand is fetched ahead, an addend is waited for
        if PHASE == "whole":
            b_a = tl.load(p_a + base * K + at_both, mask=(j % C < size - i_c * C)[:, None] & m_c, other=0.0)
            b_y = tl.dot(tl.trans(b_v.to(DT)), eye_both, input_precision=PREC)
            b_y = tl.dot(b_x, tl.trans(b_a), b_y, input_precision=PREC)
            b_r, b_o = tl.split(tl.permute(tl.reshape(b_y, [BV, 2, C]), (0, 2, 1)))
            b_r = b_r.to(DT)
            b_m = tl.load(p_m + base * C + i[:, None] * C + i[None, :], mask=m_t[:, None], other=0.0)
            # a plain sum would make half of one product's result the start of the next: ptxas then serialises them all
            b_o = tl.fma(tl.dot(b_r, tl.trans(b_m), input_precision=PREC), 1.0, b_o)
            p_o = o + (token * H + i_h) * V + i[:, None] * (H * V) + o_v[None, :]
            tl.store(p_o, tl.trans(b_o.to(o.dtype.element_ty)), mask=m_vt)
        else:
            b_a = tl.load(p_a + base * K + at, mask=m, other=0.0)
            b_r = tl.dot(tl.trans(b_v.to(DT)), eye, input_precision=PREC)
            b_r = tl.dot(b_x, tl.trans(b_a), b_r, input_precision=PREC).to(DT)
        if PHASE == "states":
            b_t = tl.load(p_t + base * C + i[:, None] * C + i[None, :], mask=m_t[:, None], other=0.0)
            b_w = tl.dot(b_r, tl.trans(b_t), input_precision=PREC)
            tl.store(residual + base * V + i[:, None] * V + o_v[None, :], tl.trans(b_w.to(DT)), mask=m_vt)
        b_s = tl.dot(b_r, b_k, b_s * b_d[None, :], input_precision=PREC)
    if PHASE == "first":
        if i_v < NV:
            p_f = final + ((i_s.to(tl.int64) * H + i_h) * V + o_v[:, None]) * K + o_c[None, :]
            tl.store(p_f, b_s, mask=m_v & m_c)
        else:
            o_r = o_v - NV * BV
            p_f = states + ((i_s.to(tl.int64) * H + i_h) * K + o_r[:, None]) * K + o_c[None, :]
            tl.store(p_f, b_s, mask=(o_r < K)[:, None] & m_c)
    if PHASE == "whole":
        if stop == end:
            p_f = final + (n.to(tl.int64) * H + i_h) * K * V + o_v[:, None] + o_c[None, :] * V
            tl.store(p_f, b_s, mask=m_v & m_c)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def join_kernel(
    outer, moved, transition, inner, cu, T, N, TOKENS, so_v, so_k,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
    UNIT: tl.constexpr, PREC: tl.constexpr, PACKED: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """BR rows of one document's state from segment to segment: ``state @ transition + moved``.

    ``inner`` receives the state each segment starts from; in reverse, its gradient at each segment's end.
    """
    NR: tl.constexpr = (V + BR - 1) // BR
    pid = tl.program_id(0)
    i_r = pid % NR
    i_h = ((pid // NR) % H).to(tl.int64)
    n = pid // (NR * H)
    if PACKED:
        begin = tl.load(cu + n).to(tl.int64)
        end = tl.load(cu + n + 1).to(tl.int64)
    else:
        begin = n.to(tl.int64) * T
        end = begin + T
    count = tl.cdiv((end - begin).to(tl.int32), UNIT)
    i_s = first_unit(n, begin, T, UNIT, PACKED)
    step = 1
    if REVERSE:
        i_s += count - 1
        step = -1
    o_c = tl.arange(0, BK)
    o_r = i_r * BR + tl.arange(0, BR)
    o_b = tl.arange(0, BC)
    m = (o_r < V)[:, None] & (o_c < K)[None, :]
    b_s = tl.zeros([BR, BK], tl.float32)
    if outer is not None:
        p = outer + (n.to(tl.int64) * H + i_h) * K * V + o_r[:, None] * so_v + o_c[None, :] * so_k
        b_s = tl.load(p, mask=m, other=0.0).to(tl.float32)
    for _ in range(count - 1):
        at = (i_s * H + i_h) * V * K
        tl.store(inner + at + o_r[:, None] * K + o_c[None, :], b_s, mask=m)
        tl.debug_barrier()
        b_s = tl.load(moved + at + o_r[:, None] * K + o_c[None, :], mask=m, other=0.0)
        for i_b in range(0, tl.cdiv(K, BC)):
            o_x = i_b * BC + o_b
            m_x = (o_r < V)[:, None] & (o_x < K)[None, :]
            b_x = tl.load(inner + at + o_r[:, None] * K + o_x[None, :], mask=m_x, other=0.0)
            p_w = transition + (i_s * H + i_h) * K * K
            if REVERSE:
                p_w += o_c[None, :] * K + o_x[:, None]
            else:
                p_w += o_x[:, None] * K + o_c[None, :]
            b_w = tl.load(p_w, mask=(o_x < K)[:, None] & (o_c < K)[None, :], other=0.0)
            b_s = tl.dot(b_x, b_w, b_s, input_precision=PREC)
        i_s += step
    tl.store(inner + (i_s * H + i_h) * V * K + o_r[:, None] * K + o_c[None, :], b_s, mask=m)


def walk(
    phase: str, v: Tensor, chunks: tuple[Tensor, ...], initial: Tensor | None, outputs: tuple[Tensor | None, ...],
    cu: Tensor | None, problem: Problem, plan: Plan, *, by_segment: bool,
) -> None:  # fmt: skip
    """Run ``walk_kernel``; ``outputs`` are its ``(o, states, residual, final)``."""
    _, p_a, p_k, p_m, p_t, p_d = chunks
    o, states, residual, final = outputs
    H, K, V = problem.num_heads, problem.K, problem.V
    BK, BV = width(K), min(plan.walk_rows, width(V))
    blocks = triton.cdiv(V, BV) + (triton.cdiv(K, BV) if phase == "first" else 0)
    # by segment, states are [., H, V, K]; a caller's are [., H, K, V]
    si_v, si_k = (K, 1) if by_segment else (1, V)
    walk_kernel[(problem.units(problem.segment) * H * blocks,)](
        v, p_a, p_k, p_m, p_t, p_d, initial, o, states, residual, final, cu,
        problem.length, problem.num_docs, problem.search, problem.tokens,
        v.stride(1), v.stride(2), si_v, si_k,
        H=H, K=K, V=V, BK=BK, BV=BV, UNIT=problem.segment, SEGMENT=by_segment, PACKED=problem.packed, PHASE=phase,
        STAGES=plan.walk_stages, num_warps=plan.walk_warps, **precision(plan),
    )  # fmt: skip


def join(
    outer: Tensor | None, moved: Tensor, transition: Tensor, cu: Tensor | None, problem: Problem, plan: Plan, *,
    reverse: bool,
) -> Tensor:  # fmt: skip
    """State that each segment starts from, or in reverse its gradient where each ends; ``[segments, H, V, K]``.

    ``outer`` is the state before the sequence (zero if ``None``), or its gradient after it.
    """
    H, K, V = problem.num_heads, problem.K, problem.V
    inner = torch.empty_like(moved)
    BR = min(plan.join_rows, width(V))
    BK = width(K)
    join_kernel[(problem.num_docs * H * triton.cdiv(V, BR),)](
        outer, moved, transition, inner, cu, problem.length, problem.num_docs, problem.tokens, 1, V,
        H=H, K=K, V=V, BK=BK, BR=BR, BC=min(BK, plan.join_channels), UNIT=problem.segment, PREC=plan.exact,
        PACKED=problem.packed, REVERSE=reverse, num_warps=plan.join_warps,
    )  # fmt: skip
    return inner


def forward(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, g: Tensor, initial: Tensor, cu: Tensor | None,
    problem: Problem, plan: Plan,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """``o``, ``final_state``, and where the sequence is split the segments' start states and transitions."""
    return walk_all(v, prepare(q, k, a, g, cu, problem, plan), initial, cu, problem, plan)


def walk_all(
    v: Tensor, chunks: tuple[Tensor, ...], initial: Tensor | None, cu: Tensor | None, problem: Problem, plan: Plan
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`forward` from chunk operands on."""
    H, K, V = problem.num_heads, problem.K, problem.V
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    final = v.new_empty(problem.num_docs, H, K, V, dtype=torch.float32)
    starts, transition = final.new_empty(0), final.new_empty(0)
    if problem.split:
        segments = problem.units(problem.segment)
        transition = final.new_empty(segments, H, K, K)
        moved = final.new_empty(segments, H, V, K)
        walk("first", v, chunks, initial, (None, transition, None, moved), cu, problem, plan, by_segment=False)
        starts = join(initial, moved, transition, cu, problem, plan, reverse=False)
    source = starts if problem.split else initial
    walk("whole", v, chunks, source, (o, None, None, final), cu, problem, plan, by_segment=problem.split)
    return o, final, starts, transition
