"""A call's sizes and units, and ``prepare``: what the recurrence over chunks needs of each; see docs/kernels.md.

``prepare`` is parallel over chunks of 16 tokens and heads. Names: K key and V value width, C tokens of a chunk, i_
index, o_ offsets, m_ mask, b_ block. Chunk operands lie head by head, ``[H, B*T, .]``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from qed.ops.arms import Arm
from qed.ops.tiles import CHUNK, Plan, card, plan_for, segment_length
from qed.ops.triton_decay import FAR, LIMIT, SMALLEST, log2_decay, pair_decay, pairs_of, split, sums
from qed.ops.triton_inputs import parameters, random_direction, row_scales, row_sums, scaled

C = tl.constexpr(CHUNK)
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
    """``x`` cut after 8 bits, and 8 bits of the rest; rounded, as :func:`split` does, they convert one by one."""
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
