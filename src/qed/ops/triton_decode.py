"""One token: the state is read once, edited and written once, with the prologue inside on request.

One program takes one head and BV columns of its state, so it holds K x BV of it in registers and no program waits
for another. Bytes a head: 8 K V with a float32 state, 4 K V with a 16-bit one; everything else is O(K + V).
Arithmetic is in float32 whatever the state's dtype.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qed.ops.arms import Arm
from qed.ops.triton_inputs import parameters, prologue, sigmoid


@triton.jit
def _load_state(p, m, STREAM: tl.constexpr):
    """STREAM: the states together exceed the cache, so none of them should stay in it."""
    return tl.load(p, mask=m, other=0.0, eviction_policy="evict_first" if STREAM else "").to(tl.float32)


@triton.jit
def _store_state(p, m, b_s, STREAM: tl.constexpr):
    tl.store(p, b_s.to(p.dtype.element_ty), mask=m, eviction_policy="evict_first" if STREAM else "")


@triton.jit
def _step(b_s, decay, q, k, a, v):
    """Decay, edit along k, read. The read is S^T q = Sbar^T q + (q . k) r, so both sums over K share one pass."""
    b_s = b_s * decay[:, None]
    r = v - tl.sum(b_s * a[:, None], 0)
    o = tl.sum(b_s * q[:, None], 0) + tl.sum(q * k, 0) * r
    return b_s + k[:, None] * r[None, :], o


@triton.jit(do_not_specialize=["H", "NV"])
def decode_kernel(
    q, k, v, a, g, o, state, out_state, H, NV,
    sqb, sqh, skb, skh, svb, svh, sab, sah, sgb, sgh, ssb,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, STREAM: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    i_v, i_bh = pid % NV, (pid // NV).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    o_k, o_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    m_s = m_k[:, None] & m_v[None, :]
    o_s = i_h * (K * V) + o_k[:, None] * V + o_v[None, :]

    b_s = _load_state(state + i_b * ssb + o_s, m_s, STREAM)
    b_q = tl.load(q + i_b * sqb + i_h * sqh + o_k, mask=m_k, other=0.0).to(tl.float32)
    b_k = tl.load(k + i_b * skb + i_h * skh + o_k, mask=m_k, other=0.0).to(tl.float32)
    b_a = tl.load(a + i_b * sab + i_h * sah + o_k, mask=m_k, other=0.0).to(tl.float32)
    b_g = tl.load(g + i_b * sgb + i_h * sgh + o_k, mask=m_k, other=0.0).to(tl.float32)
    b_v = tl.load(v + i_b * svb + i_h * svh + o_v, mask=m_v, other=0.0).to(tl.float32)
    b_s, b_o = _step(b_s, tl.exp(b_g), b_q, b_k, b_a, b_v)
    _store_state(out_state + i_b * (H * K * V) + o_s, m_s, b_s, STREAM)
    tl.store(o + i_bh * V + o_v, b_o.to(o.dtype.element_ty), mask=m_v)


@triton.jit(do_not_specialize=["H", "NV"])
def decode_inputs_kernel(
    q, k, v, decay, erase, write, A_log, dt_bias, strength, z, o, state, H, NV,
    sqb, sqh, skb, skh, svb, svh, sdb, sdh, seb, seh, swb, swh,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, STREAM: tl.constexpr,
    DIRECTION: tl.constexpr, GATE: tl.constexpr, PROJECT: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    i_v, i_bh = pid % NV, (pid // NV).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    o_k, o_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    m_s = m_k[:, None] & m_v[None, :]
    p_s = state + i_bh * (K * V) + o_k[:, None] * V + o_v[None, :]

    b_s = _load_state(p_s, m_s, STREAM)
    b_q = tl.load(q + i_b * sqb + i_h * sqh + o_k, mask=m_k, other=0.0).to(tl.float32)
    b_k = tl.load(k + i_b * skb + i_h * skh + o_k, mask=m_k, other=0.0).to(tl.float32)
    b_e = tl.load(erase + i_b * seb + i_h * seh + o_k, mask=m_k, other=0.0).to(tl.float32)
    b_d = tl.load(decay + i_b * sdb + i_h * sdh + o_k, mask=m_k, other=0.0).to(tl.float32)
    b_v = tl.load(v + i_b * svb + i_h * svh + o_v, mask=m_v, other=0.0).to(tl.float32)
    b_w = tl.load(write + i_b * swb + i_h * swh + o_v, mask=m_v, other=0.0).to(tl.float32)

    rate, bias, lam, b_z = parameters(A_log, dt_bias, strength, z, i_h, o_k, K, DIRECTION)
    x_q, x_k, a, g = prologue(b_q, b_k, b_e, b_d, rate, bias, lam, b_z, DIRECTION, GATE, PROJECT)
    b_s, b_o = _step(b_s, tl.exp(g), x_q, x_k, a, b_v * sigmoid(b_w))
    _store_state(p_s, m_s, b_s, STREAM)
    tl.store(o + i_bh * V + o_v, b_o.to(o.dtype.element_ty), mask=m_v)


# States of this many bytes together do not stay in the cache from one token to the next.
STREAM_BYTES = 32 * 2**20


def tile(num_heads: int, K: int, V: int) -> tuple[int, int]:
    """Columns of the state a program takes, and its warps.

    H200, K = V = 128, float32 state, us a step: 6 heads, 16 columns 2.5, 32 columns 3.2; 1536 heads, 16 columns
    60.3, 32 columns 56.5, 64 columns 58.7.
    """
    few = num_heads * V < 16 * 1024
    # 64 elements of the state a thread
    columns = 16 if few else max(16, min(32, 4096 // triton.next_power_of_2(K)))
    return min(columns, triton.next_power_of_2(V)), 2


def inputs_tile(num_heads: int, K: int, V: int) -> tuple[int, int]:
    """The same with the prologue inside, which more warps share.

    H200 as above: 6 heads, 16 columns 3.25, 64 columns 3.83; 1536 heads, 16 columns 59.4, 32 columns 56.7, 64
    columns 55.2.
    """
    few = num_heads * V < 16 * 1024
    columns = 16 if few else max(16, min(64, 8192 // triton.next_power_of_2(K)))
    return min(columns, triton.next_power_of_2(V)), 4


def decode(q: Tensor, k: Tensor, v: Tensor, a: Tensor, g: Tensor, state: Tensor, out_state: Tensor) -> Tensor:
    """One step of the recurrence for ``T = 1``; writes ``out_state``, which may be ``state``, and returns ``o``."""
    (B, _, H, K), V = q.shape, v.shape[-1]
    streams = [x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v, a, g)]
    state = state if state[0].is_contiguous() else state.contiguous()
    o = v.new_empty(v.shape)
    BV, num_warps = tile(B * H, K, V)
    NV = triton.cdiv(V, BV)
    with torch.cuda.device_of(q):
        decode_kernel[(B * H * NV,)](
            *streams, o, state, out_state, H, NV,
            *(s for x in streams for s in (x.stride(0), x.stride(2))), state.stride(0),
            K=K, V=V, BK=triton.next_power_of_2(K), BV=BV, STREAM=state.nbytes > STREAM_BYTES, num_warps=num_warps,
        )  # fmt: skip
    return o


def decode_inputs(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, erase: Tensor, write: Tensor,
    A_log: Tensor, dt_bias: Tensor, strength: Tensor, z: Tensor | None, state: Tensor, arm: Arm,
) -> Tensor:  # fmt: skip
    """Prologue and one step in one kernel, from raw projections of one token; updates ``state`` in place."""
    (B, _, H, K), V = q.shape, v.shape[-1]
    streams = [x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v, decay, erase, write)]
    parameters = [None if x is None else x.contiguous() for x in (A_log, dt_bias, strength, z)]
    o = q.new_empty(v.shape)
    BV, num_warps = inputs_tile(B * H, K, V)
    NV = triton.cdiv(V, BV)
    with torch.cuda.device_of(q):
        # 128 registers: of 64 columns and 4 warps, four programs share a multiprocessor; with 134, three would
        decode_inputs_kernel[(B * H * NV,)](
            *streams, *parameters, o, state, H, NV, *(s for x in streams for s in (x.stride(0), x.stride(2))),
            K=K, V=V, BK=triton.next_power_of_2(K), BV=BV, STREAM=state.nbytes > STREAM_BYTES,
            DIRECTION=arm.direction, GATE=arm.gate, PROJECT=arm.project, num_warps=num_warps, maxnreg=128,
        )  # fmt: skip
    return o
