"""Decay between two tokens as a product of two factors, for the kernels; docs/kernels.md, "Decay".

Log-decays are in base 2 and finite here. "Reader" is the later token of a pair, "writer" the earlier one.
"""

import triton
import triton.language as tl

# Largest binary logarithm of a factor alone, and of one of two factors that both multiply sums; 2**-FLOOR is zero.
LIMIT = tl.constexpr(110.0)
SMALLEST = tl.constexpr(2.0**-110)
# A chunk leaves the range at LIMIT, a row of it at FAR: no rounding puts a row out of range whose chunk is within it.
FAR = tl.constexpr(111.0)
HALF = tl.constexpr(100.0)
FLOOR = tl.constexpr(160.0)


@triton.jit
def log2_decay(g):
    """Log-decay in base 2; what underflows anyway (-inf too) stays finite, so that sums and differences are defined."""
    return tl.maximum(g.to(tl.float32) * 1.4426950408889634, -FLOOR)


@triton.jit
def split(x, DT: tl.constexpr):
    """``x`` as two terms that are products' operands: 16 bits of it where DT is bfloat16, else all."""
    if DT == tl.float32:
        high = x.to(tl.int32, bitcast=True)
        high = (high & -8192).to(tl.float32, bitcast=True)
    else:
        high = x.to(DT)
    return high, (x - high.to(tl.float32)).to(DT)


@triton.jit
def sums(m, high, low, DT: tl.constexpr, PREC: tl.constexpr):
    """``m @ x`` for the :func:`split` terms of ``x`` and a matrix ``m`` of few bits."""
    m = m.to(DT)
    return tl.dot(m, low, tl.dot(m, high, input_precision="tf32"), input_precision=PREC)


@triton.jit
def span(g):
    """Binary logarithm of the largest blocks in which two factors hold every decay: 5 for 32 tokens, 0 for one."""
    weakest = tl.min(g)
    blocks = (weakest > -HALF).to(tl.int32)
    for level in tl.static_range(1, 5):
        blocks += (weakest > -HALF / (1 << level)).to(tl.int32)
    return blocks


@triton.jit
def pair_decay(high, low, i, LEVEL, SPAN, DT: tl.constexpr, PREC: tl.constexpr):
    """Factors ``[tokens, channels]`` at the reader and at the writer of the pairs that :func:`pairs_of` selects.

    At LEVEL = SPAN, pairs within a block of ``1 << SPAN`` tokens: decay since and until half of the block's decay has
    passed. Above it, pairs across two neighbouring blocks of ``1 << (LEVEL - 1)``: decay since the second began and
    until the first ends, neither above one.
    """
    within = LEVEL == SPAN
    size = tl.where(within, SPAN, LEVEL - 1)
    inside = (1 << size) - 1
    second = (i >> size) & 1
    past = tl.where(within, 0.5, second.to(tl.float32))[:, None]
    future = tl.where(within, -0.5, (1 - second).to(tl.float32))[:, None]
    c = i[None, :]
    m = tl.where(c <= i[:, None], past, future)
    m = tl.where((c >= (i & ~inside)[:, None]) & (c <= (i | inside)[:, None]), m, 0.0)
    s = sums(m, high, low, DT, PREC)
    return tl.exp2(s), tl.exp2(tl.where(within, -s, s))


@triton.jit
def pairs_of(i, LEVEL, SPAN):
    """``[tokens, tokens]``: whether the pair of a row's token, the reader, and a column's is LEVEL's.

    Levels from SPAN on hold every pair of a later reader and an earlier writer once.
    """
    within = LEVEL == SPAN
    size = tl.where(within, SPAN, LEVEL - 1)
    begin = (i >> size) << size
    end = begin + (1 << size)
    second = (i >> size) & 1 == 1
    first = tl.where(within, begin, tl.where(second, begin - (1 << size), end))
    last = tl.where(within, i, begin)
    c = i[None, :]
    return (c >= first[:, None]) & (c < last[:, None])
