"""Forward from raw projections where no gradient is wanted: the prologue writes chunk operands itself.

Against :mod:`qed.ops.triton_inputs` followed by :mod:`qed.ops.triton_forward`, the decay is never written, q, k and the
erase vector are written once, already decayed, and ``prepare`` is left with products of what it reads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qed.ops.arms import Arm
from qed.ops.tiles import CHUNK
from qed.ops.triton_chunks import UNSPECIALIZED, chunk_operands, describe, locate, prepare, rows, width
from qed.ops.triton_decay import FAR, FLOOR
from qed.ops.triton_forward import walk_all
from qed.ops.triton_inputs import parameters, prologue, sigmoid

C = tl.constexpr(CHUNK)
# Elements of one token's tile over all chunks of a program, its warps, and steps that loads run ahead. H200, B16 T2048
# H6 K = V = 128, in ms: (512, 4, 3) 0.127, (512, 4, 4) 0.126, (256, 2, 4) 0.126, (512, 2, 4) 0.129, (1024, 4, 3) 0.131,
# (1024, 4, 4) 0.129, (1024, 8, 3) 0.130; a development version (1024, 4, 1) 0.148, (1024, 4, 2) 0.139.
TILE, WARPS, STAGES = 512, 4, 3


@triton.jit(do_not_specialize=UNSPECIALIZED)
def decayed_kernel(
    q, k, v, decay, erase, write, A_log, dt_bias, strength, z, o_q, o_a, o_k, o_d, o_v,
    cu, T, N, SEARCH, TOKENS,
    sq_t, sq_h, sk_t, sk_h, sv_t, sv_h, sd_t, sd_h, se_t, se_h, sw_t, sw_h,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, G: tl.constexpr,
    PACKED: tl.constexpr, DIRECTION: tl.constexpr, GATE: tl.constexpr, PROJECT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """G chunks of one head side by side, token by token: decay (base 2) since a chunk began is a sum in registers."""
    pid = tl.program_id(0)
    i_h = (pid % H).to(tl.int64)
    i_c = (pid // H) * G + tl.arange(0, G)
    _, _, end, start = locate(i_c, cu, T, N, SEARCH, C, PACKED)
    # a program's last chunks may lie beyond all tokens
    end = tl.minimum(end, TOKENS)
    o_c, o_x = tl.arange(0, BK), tl.arange(0, BV)[None, :]
    m_c = (o_c < K)[None, :]
    row = o_c[None, :]
    rate, bias, lam, b_z = parameters(A_log, dt_bias, strength, z, i_h, o_c, K, DIRECTION)
    rate *= 1.4426950408889634
    b_s = tl.zeros([G, BK], tl.float32)
    for i in tl.range(0, C, num_stages=STAGES):
        token = start + i
        m_t = (token < end)[:, None]
        m, m_v = m_t & m_c, m_t & (o_x < V)
        t = token[:, None]
        b_q = tl.load(q + i_h * sq_h + t * sq_t + row, mask=m, other=0.0).to(tl.float32)
        b_k = tl.load(k + i_h * sk_h + t * sk_t + row, mask=m, other=0.0).to(tl.float32)
        b_e = tl.load(erase + i_h * se_h + t * se_t + row, mask=m, other=0.0).to(tl.float32)
        b_d = tl.load(decay + i_h * sd_h + t * sd_t + row, mask=m, other=0.0).to(tl.float32)
        b_v = tl.load(v + i_h * sv_h + t * sv_t + o_x, mask=m_v, other=0.0).to(tl.float32)
        b_w = tl.load(write + i_h * sw_h + t * sw_t + o_x, mask=m_v, other=0.0).to(tl.float32)
        rates = tl.where(m_t, rate, 0.0)
        b_q, b_k, b_a, b_g = prologue(b_q, b_k, b_e, b_d, rates, bias, lam, b_z, DIRECTION, GATE, PROJECT)
        b_s += tl.maximum(b_g, -FLOOR)
        since = tl.exp2(b_s)
        at = (i_h * TOKENS + t) * K + row
        tl.store(o_q + at, (b_q * since).to(o_q.dtype.element_ty), mask=m)
        tl.store(o_a + at, (-b_a * since).to(o_a.dtype.element_ty), mask=m)
        tl.store(o_k + at, (b_k * tl.exp2(tl.minimum(-b_s, FAR))).to(o_k.dtype.element_ty), mask=m)
        tl.store(o_v + (t * H + i_h) * V + o_x, (b_v * sigmoid(b_w)).to(o_v.dtype.element_ty), mask=m_v)
    p_d = o_d + (i_c.to(tl.int64) * H + i_h)[:, None] * K + row
    tl.store(p_d, tl.exp2(b_s), mask=(start < end)[:, None] & m_c)


def forward(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, erase: Tensor, write: Tensor,
    A_log: Tensor, dt_bias: Tensor, strength: Tensor, z: Tensor | None,
    initial: Tensor | None, cu: Tensor | None, arm: Arm,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``o`` and ``final_state``; arguments as in :func:`qed.ops.prefill.gated_delta_rule_from_projections`."""
    q, k, v, decay, erase, write = streams = [rows(x) for x in (q, k, v, decay, erase, write)]
    parameters = tuple(None if x is None else x.contiguous() for x in (A_log, dt_bias, strength, z))
    with torch.cuda.device_of(q):
        problem, plan = describe(q, k, v, erase, cu)
        H, K, V = problem.num_heads, problem.K, problem.V
        decayed = chunk_operands(q, problem, plan)
        values = q.new_empty(v.shape)
        BK, BV = width(K), width(V)
        chunks = max(1, TILE // max(BK, BV))
        decayed_kernel[(triton.cdiv(problem.units(CHUNK), chunks) * H,)](
            *streams, *parameters, *decayed, values,
            cu, problem.length, problem.num_docs, problem.search, problem.tokens,
            *(x.stride(i) for x in streams for i in (1, 2)),
            H=H, K=K, V=V, BK=BK, BV=BV, G=chunks, PACKED=problem.packed,
            DIRECTION=arm.direction, GATE=arm.gate, PROJECT=arm.project, STAGES=STAGES, num_warps=WARPS,
        )  # fmt: skip
        operands = prepare(q, k, erase, decay, cu, problem, plan, decayed=decayed, parameters=parameters, arm=arm)
        o, final, _, _ = walk_all(values, operands, initial, cu, problem, plan)
        return o, final
