"""Forward kernels of the gated delta rule; the derivation is in docs/kernels.md.

``prepare`` is parallel over chunks of 16 tokens and writes what the recurrence over chunks needs; ``walk`` carries the
state over the chunks of a segment; ``join`` hands the state from segment to segment when a sequence is split.

Names: K key and V value width, C tokens of a chunk, i_ index, o_ offsets, m_ mask, b_ block. Chunk operands lie head by
head, ``[H, B*T, .]``, states as ``[., H, V, K]``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from qed.ops.arms import Arm
from qed.ops.tiles import BLOCK, CHUNK, Plan, card, plan_for, segment_length
from qed.ops.triton_decay import FAR, LIMIT, SMALLEST, log2_decay, pair_decay, pairs_of, split, sums
from qed.ops.triton_inputs import parameters, random_direction, row_scales, row_sums, scaled

C = tl.constexpr(CHUNK)
B = tl.constexpr(BLOCK)
# No direction: `prepare` is given erase vectors.
PLAIN = Arm("none")
# The number of documents and what follows from it: batches of one total length share every compiled kernel.
UNSPECIALIZED = ("N", "SEARCH")


@triton.jit
def locate(i_unit, cu, T, N, SEARCH, UNIT: tl.constexpr, PACKED: tl.constexpr):
    """Document ``n``, its bounds and the first token of unit ``i_unit`` (one or several); units never cross documents.

    Packed, document n owns units from ``cu[n] // UNIT + n`` on: distinct for all documents, with gaps without tokens.
    """
    if PACKED:
        n = i_unit * 0
        top = n + N
        for _ in range(SEARCH):
            middle = (n + top) // 2
            below = (tl.load(cu + middle).to(tl.int32) // UNIT + middle) <= i_unit
            n = tl.where(below, middle, n)
            top = tl.where(below, top, middle)
        begin = tl.load(cu + n).to(tl.int64)
        end = tl.load(cu + n + 1).to(tl.int64)
        start = begin + (i_unit - (begin // UNIT + n)).to(tl.int64) * UNIT
    else:
        units = tl.cdiv(T, UNIT)
        n = i_unit // units
        begin = n.to(tl.int64) * T
        end = begin + T
        start = begin + (i_unit - n * units).to(tl.int64) * UNIT
    return n, begin, end, start


@triton.jit
def first_unit(n, begin, T, UNIT: tl.constexpr, PACKED: tl.constexpr):
    """Index of a document's first unit."""
    unit = begin // UNIT + n if PACKED else n.to(tl.int64) * tl.cdiv(T, UNIT)
    return unit


@triton.jit
def terms(x, DT: tl.constexpr):
    """``x`` cut after 8 bits, and 8 bits of the rest."""
    high = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return high.to(DT), (x - high).to(DT)


@triton.jit
def exact_dot(x, y, DT: tl.constexpr):
    """``x @ y^T`` to float32's accuracy, or for 16-bit operands elsewhere to 15 bits."""
    if DT == tl.float32:
        p = tl.dot(x, tl.trans(y), input_precision="tf32x3")
    else:
        x_high, x_low = terms(x, DT)
        y_high, y_low = terms(tl.trans(y), DT)
        p = tl.dot(x_high, y_high, tl.dot(x_high, y_low, tl.dot(x_low, y_high)))
    return p


@triton.jit
def chunk_scales(
    q, k, erase, z, i_h, i, m_t, sq_t, sk_t, se_t, K: tl.constexpr, DIRECTION: tl.constexpr, GATE: tl.constexpr
):
    """:func:`row_scales` of one chunk's tokens, from projections, few channels at a time."""
    sum_q = tl.zeros([C, 1], tl.float32)
    sum_k = tl.zeros([C, 1], tl.float32)
    sum_u = tl.zeros([C, 1], tl.float32)
    for i_x in tl.range(0, (K + C - 1) // C, num_stages=1):
        o_x = i_x * C + i
        m_x = m_t & (o_x < K)[None, :]
        x_q = tl.load(q + i[:, None] * sq_t + o_x[None, :], mask=m_x, other=0.0).to(tl.float32)
        x_k = tl.load(k + i[:, None] * sk_t + o_x[None, :], mask=m_x, other=0.0).to(tl.float32)
        x_e = tl.load(erase + i[:, None] * se_t + o_x[None, :], mask=m_x, other=0.0).to(tl.float32)
        b_z = random_direction(z, i_h, o_x, K, DIRECTION)
        part_q, part_k, part_u = row_sums(x_q, x_k, x_e, b_z, DIRECTION, GATE)
        sum_q += part_q
        sum_k += part_k
        sum_u += part_u
    return row_scales(sum_q, sum_k, sum_u, DIRECTION)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def prepare_kernel(
    q, k, a, g, A_log, dt_bias, strength, z, o_q, o_a, o_k, o_m, o_t, o_d, cu, T, N, SEARCH, TOKENS,
    sq_t, sq_h, sk_t, sk_h, sa_t, sa_h, sg_t, sg_h,
    H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, sg_k: tl.constexpr,
    DT: tl.constexpr, PREC: tl.constexpr, PACKED: tl.constexpr, INVERSE: tl.constexpr,
    RAW: tl.constexpr, DIRECTION: tl.constexpr, GATE: tl.constexpr, PROJECT: tl.constexpr,
):  # fmt: skip
    """One chunk of one head: decayed rows and columns, the chunk's inverse and everything it multiplies.

    RAW: the first are there already (``triton_prefill``), columns in place of k; a and g are the erase gate's and the
    decay's projections, and what the four give is formed again where one factor cannot hold the decay.
    """
    pid = tl.program_id(0)
    i_h = (pid % H).to(tl.int64)
    i_c = pid // H
    _, _, end, start = locate(i_c, cu, T, N, SEARCH, C, PACKED)
    if start >= end:
        return
    i = tl.arange(0, C)
    m_t = (i < end - start)[:, None]
    r, c = i[:, None], i[None, :]
    first = i_h * TOKENS + start
    q += start * sq_t + i_h * sq_h
    k += start * sk_t + i_h * sk_h
    a += start * sa_t + i_h * sa_h
    g += start * sg_t + i_h * sg_h
    o_q += first * K
    o_k += first * K
    o_a += first * K
    o_d += (i_c.to(tl.int64) * H + i_h) * K
    reads = tl.zeros([C, C], tl.float32)
    erases = tl.zeros([C, C], tl.float32)
    for i_k in tl.range(0, (K + BK - 1) // BK, num_stages=1):
        o_c = i_k * BK + tl.arange(0, BK)
        m = m_t & (o_c < K)[None, :]
        at = r * K + o_c[None, :]
        if RAW:
            # loaded inside the products, each would wait for the one before
            b_d = tl.load(o_d + o_c, mask=o_c < K, other=1.0)
            b_q = tl.load(o_q + at, mask=m, other=0.0)
            b_a = tl.load(o_a + at, mask=m, other=0.0)
            columns = tl.trans(tl.load(o_k + at, mask=m, other=0.0))
            near_reads = tl.dot(b_q, columns, input_precision=PREC)
            near_erases = -tl.dot(b_a, columns, input_precision=PREC)
            outside = tl.min(b_d, 0) < SMALLEST
        else:
            b_g = log2_decay(tl.load(g + r * sg_t + (o_c * sg_k)[None, :], mask=m, other=0.0))
            b_k = tl.load(k + r * sk_t + o_c[None, :], mask=m, other=0.0)
            b_q = tl.load(q + r * sq_t + o_c[None, :], mask=m, other=0.0)
            b_a = tl.load(a + r * sa_t + o_c[None, :], mask=m, other=0.0)
            b_s = tl.cumsum(b_g, 0)
            total = tl.sum(b_g, 0)
            tl.store(o_d + o_c, tl.exp2(total), mask=o_c < K)
            b_k = b_k * tl.exp2(tl.minimum(-b_s, FAR))
            columns = tl.trans(b_k.to(DT))
            b_k = (b_k * tl.exp2(total)[None, :]).to(DT)
            since = tl.exp2(b_s)
            b_q = (b_q * since).to(DT)
            b_a = (b_a * since).to(DT)
            tl.store(o_q + at, b_q, mask=m)
            tl.store(o_a + at, -b_a, mask=m)
            tl.store(o_k + at, b_k, mask=m)
            near_reads = tl.dot(b_q, columns, input_precision=PREC)
            near_erases = tl.dot(b_a, columns, input_precision=PREC)
            outside = tl.min(total, 0) < -LIMIT
        if outside:
            # Rows whose decay since the chunk began is out of the range of one factor; a fact of their past alone
            if RAW:
                far = (i < 0)[:, None]
                r_q, r_k, along = chunk_scales(q, k, a, z, i_h, i, m_t, sq_t, sk_t, sa_t, K, DIRECTION, GATE)
            else:
                far = (tl.min(b_s, 1) < -FAR)[:, None]
            far_reads = tl.zeros([C, C], tl.float32)
            far_erases = tl.zeros([C, C], tl.float32)
            for i_x in tl.range(0, BK // C, num_stages=1):
                o_x = i_k * BK + i_x * C + i
                m_x = m_t & (o_x < K)[None, :]
                x_g = tl.load(g + r * sg_t + (o_x * sg_k)[None, :], mask=m_x, other=0.0)
                x_k = tl.load(k + r * sk_t + o_x[None, :], mask=m_x, other=0.0)
                x_q = tl.load(q + r * sq_t + o_x[None, :], mask=m_x, other=0.0)
                x_a = tl.load(a + r * sa_t + o_x[None, :], mask=m_x, other=0.0)
                if RAW:
                    rate, bias, lam, b_z = parameters(A_log, dt_bias, strength, z, i_h, o_x, K, DIRECTION)
                    x_q, x_k, x_a, x_g = scaled(
                        x_q.to(tl.float32), x_k.to(tl.float32), x_a.to(tl.float32), x_g.to(tl.float32),
                        r_q, r_k, along, rate, bias, lam, b_z, DIRECTION, GATE, PROJECT,
                    )  # fmt: skip
                    x_g = tl.where(m_x, x_g, 0.0)
                x_g = log2_decay(x_g)
                if RAW:
                    far = far | (tl.min(tl.cumsum(x_g, 0), 1) < -FAR)[:, None]
                own = tl.dot(x_q.to(DT), tl.trans(x_k.to(DT)), input_precision=PREC)
                far_reads += tl.where(r == c, own, 0.0)
                high, low = split(x_g, DT)
                for LEVEL in tl.range(1, 5):
                    reader, writer = pair_decay(high, low, i, LEVEL, 0, DT, PREC)
                    pairs = pairs_of(i, LEVEL, 0)
                    x_c = tl.trans((x_k * writer).to(DT))
                    far_reads += tl.where(pairs, tl.dot((x_q * reader).to(DT), x_c, input_precision=PREC), 0.0)
                    far_erases += tl.where(pairs, tl.dot((x_a * reader).to(DT), x_c, input_precision=PREC), 0.0)
                until = tl.exp2(sums(c > r, high, low, DT, PREC))
                # other threads have stored there before
                tl.debug_barrier()
                tl.store(o_k + r * K + o_x[None, :], (x_k * until).to(DT), mask=m_x)
            near_reads = tl.where(far, far_reads, near_reads)
            near_erases = tl.where(far, far_erases, near_erases)
        reads += near_reads
        erases += near_erases
    reads = tl.where(r >= c, reads, 0.0)
    erases = tl.where(r > c, erases, 0.0)
    # Blocks of 1, 2, 4, 8 tokens merge in pairs: (D + L)^-1 = D^-1 - D^-1 L D^-1, exact since L D^-1 L = 0. The
    # transpose is kept beside: a product's result is a right operand in the registers it lies in only transposed.
    inverse = tl.where(r == c, 1.0, 0.0) - tl.where(pairs_of(i, 1, 0), erases, 0.0)
    transposed = tl.trans(inverse)
    for LEVEL in tl.static_range(2, 5):
        below = tl.where(pairs_of(i, LEVEL, 0), erases, 0.0)
        right = exact_dot(transposed, below, DT)
        change = exact_dot(inverse, right, DT)
        transposed -= exact_dot(right, inverse, DT)
        inverse -= change
    reads = tl.dot(reads.to(DT), tl.trans(transposed).to(DT), input_precision=PREC)
    tl.store(o_m + first * C + r * C + c, reads.to(DT), mask=m_t)
    if INVERSE:
        tl.store(o_t + first * C + r * C + c, inverse.to(DT), mask=m_t)
    # o_k is read back, by other threads
    tl.debug_barrier()
    transposed = transposed.to(DT)
    for i_k in tl.range(0, (K + BK - 1) // BK, num_stages=1):
        o_c = i_k * BK + tl.arange(0, BK)
        m = m_t & (o_c < K)[None, :]
        at = r * K + o_c[None, :]
        b_k = tl.dot(transposed, tl.load(o_k + at, mask=m, other=0.0), input_precision=PREC)
        if RAW:
            b_d = tl.load(o_d + o_c, mask=o_c < K, other=1.0)
            b_k *= tl.where(tl.min(b_d) < SMALLEST, 1.0, b_d)[None, :]
        tl.store(o_k + at, b_k.to(DT), mask=m)


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


@dataclass(frozen=True)
class Problem:
    """Sizes of one call; ``num_docs`` documents of ``length`` tokens, or packed into ``length`` tokens."""

    num_docs: int
    length: int
    num_heads: int
    K: int
    V: int
    tokens: int
    packed: bool
    segment: int

    def units(self, size: int) -> int:
        """Units of ``size`` tokens, none of which crosses documents (an upper bound when packed)."""
        return self.length // size + self.num_docs if self.packed else self.num_docs * triton.cdiv(self.length, size)

    @property
    def split(self) -> bool:
        return self.segment < self.length

    @property
    def search(self) -> int:
        """Bisections that find a document."""
        return self.num_docs.bit_length()


def describe(q: Tensor, k: Tensor, v: Tensor, a: Tensor, cu: Tensor | None) -> tuple[Problem, Plan]:
    """Sizes and tiles of one call; functions of shapes, dtypes and the card alone."""
    B, T, H, K = q.shape
    V = v.shape[3]
    packed = cu is not None
    num_docs = cu.numel() - 1 if cu is not None else B
    segment = segment_length(num_docs, T, H, V, packed=packed)
    dtype = q.dtype
    for x in (k, v, a):
        dtype = torch.promote_types(dtype, x.dtype)
    return Problem(num_docs, T, H, K, V, B * T, packed, segment), plan_for(dtype, K, V, card(q.device))


def rows(x: Tensor) -> Tensor:
    """``x`` if a token's stride is one number for the whole batch and its channels are dense or equal, else a copy."""
    uniform = x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)
    return x if uniform and x.stride(-1) == 1 else x.contiguous()


def decay_rows(g: Tensor) -> Tensor:
    """Like :func:`rows`, with one decay for all channels left as it is."""
    uniform = g.shape[0] == 1 or g.stride(0) == g.shape[1] * g.stride(1)
    return g if uniform and g.stride(-1) in (0, 1) else g.contiguous()


def width(size: int) -> int:
    """A tile's width for ``size`` channels."""
    return max(16, triton.next_power_of_2(size))


def precision(plan: Plan) -> dict:
    """Kernel arguments that say how products are formed."""
    return {"DT": tl.bfloat16 if plan.operand is torch.bfloat16 else tl.float32, "PREC": plan.precision}


def chunk_operands(q: Tensor, problem: Problem, plan: Plan) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Uninitialised ``(q, a, k, decay)`` of :func:`prepare`'s result; q lies behind a, for ``walk`` to load as one."""
    H, K = problem.num_heads, problem.K
    o_a, o_q = q.new_empty(2, H, problem.tokens, K, dtype=plan.operand)
    o_k = torch.empty_like(o_a)
    return o_q, o_a, o_k, q.new_empty(problem.units(CHUNK), H, K, dtype=torch.float32)


def prepare(
    q: Tensor, k: Tensor, a: Tensor, g: Tensor, cu: Tensor | None, problem: Problem, plan: Plan, *,
    inverse: bool = False, decayed: tuple[Tensor, ...] | None = None,
    parameters: tuple[Tensor | None, ...] = (None, None, None, None), arm: Arm = PLAIN,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Chunk operands ``(q, a, k, reads, inverse, decay)``.

    ``decayed``: :func:`chunk_operands` as ``triton_prefill`` fills them; q, k, a and g are then projections.
    """
    H, K = problem.num_heads, problem.K
    o_q, o_a, o_k, o_d = decayed or chunk_operands(q, problem, plan)
    o_m = q.new_empty(H, problem.tokens, CHUNK, dtype=plan.operand)
    o_t = torch.empty_like(o_m) if inverse else o_m
    # H200, decayed: 128 channels 0.065 ms, 64 0.077
    BK = min(2 * plan.prepare_channels if decayed else plan.prepare_channels, width(K))
    prepare_kernel[(problem.units(CHUNK) * H,)](
        q, k, a, g, *parameters, o_q, o_a, o_k, o_m, o_t, o_d,
        cu, problem.length, problem.num_docs, problem.search, problem.tokens,
        q.stride(1), q.stride(2), k.stride(1), k.stride(2), a.stride(1), a.stride(2), g.stride(1), g.stride(2),
        H=H, K=K, BK=BK, sg_k=g.stride(3), PACKED=problem.packed, INVERSE=inverse,
        RAW=decayed is not None, DIRECTION=arm.direction, GATE=arm.gate, PROJECT=arm.project,
        num_warps=plan.prepare_warps, **precision(plan),
    )  # fmt: skip
    return o_q, o_a, o_k, o_m, o_t, o_d


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
