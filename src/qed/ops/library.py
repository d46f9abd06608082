"""The Triton kernels as registered operators: shapes without a device, gradients, autocast."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Optional

import torch
from torch import Tensor

from qed.ops.tiles import segment_length

MAX_WIDTH = 256
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Optional[...] below: torch reads operator schemas from annotations.


@torch.library.custom_op("qed::gated_delta_rule", mutates_args=())
def forward_op(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, g: Tensor, initial_state: Tensor,
    cu_seqlens: Optional[Tensor],  # noqa: UP045
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """``o``, ``final_state`` and, for a split sequence, its segments' start states and transitions (else empty)."""
    from qed.ops import triton_chunks, triton_forward

    with _device(q):
        q, k, v, a = (triton_chunks.rows(x) for x in (q, k, v, a))
        problem, plan = triton_chunks.describe(q, k, v, a, cu_seqlens)
        g, initial_state = triton_chunks.decay_rows(g), initial_state.contiguous()
        return triton_forward.forward(q, k, v, a, g, initial_state, cu_seqlens, problem, plan)


@forward_op.register_fake
def _(q, k, v, a, g, initial_state, cu_seqlens):  # type: ignore[no-untyped-def]
    B, T, H, K = q.shape
    V = v.shape[3]
    packed = cu_seqlens is not None
    num_docs = cu_seqlens.shape[0] - 1 if cu_seqlens is not None else B
    segment = segment_length(num_docs, T, H, V, packed=packed)
    state = initial_state.new_empty(initial_state.shape)
    if segment >= T:
        return v.new_empty(v.shape), state, q.new_empty(0, dtype=torch.float32), q.new_empty(0, dtype=torch.float32)
    segments = T // segment + num_docs if packed else num_docs * ((T + segment - 1) // segment)
    starts = q.new_empty((segments, H, V, K), dtype=torch.float32)
    return v.new_empty(v.shape), state, starts, q.new_empty((segments, H, K, K), dtype=torch.float32)


@torch.library.custom_op("qed::gated_delta_rule_backward", mutates_args=())
def backward_op(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, g: Tensor, initial_state: Tensor, cu_seqlens: Optional[Tensor],  # noqa: UP045
    starts: Tensor, transition: Tensor, grad_o: Tensor, grad_final: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of ``q, k, v, a, g, initial_state``."""
    from qed.ops import triton_backward, triton_chunks

    with _device(q):
        q, k, v, a, grad_o = (triton_chunks.rows(x) for x in (q, k, v, a, grad_o))
        problem, plan = triton_chunks.describe(q, k, v, a, cu_seqlens)
        return triton_backward.backward(
            q, k, v, a, triton_chunks.decay_rows(g), initial_state.contiguous(), cu_seqlens,
            starts, transition, grad_o, grad_final.contiguous(), problem, plan,
        )  # fmt: skip


@backward_op.register_fake
def _(q, k, v, a, g, initial_state, *_rest):  # type: ignore[no-untyped-def]
    return (
        *(x.new_empty(x.shape) for x in (q, k, v, a)),
        g.new_empty(g.shape, dtype=torch.float32),
        initial_state.new_empty(initial_state.shape),
    )


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, output[2], output[3])


def _backward(ctx, grad_o, grad_final, *_internal):  # type: ignore[no-untyped-def]
    q, k, v, a, g, initial_state, cu_seqlens, starts, transition = ctx.saved_tensors
    if grad_o is None:
        grad_o = torch.zeros_like(v)
    if grad_final is None:
        grad_final = torch.zeros_like(initial_state)
    *results, grad_g, grad_state = backward_op(
        q, k, v, a, g, initial_state, cu_seqlens, starts, transition, grad_o, grad_final
    )
    return *results, grad_g.to(g.dtype), grad_state, None


forward_op.register_autograd(_backward, setup_context=_save)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, g: Tensor, initial_state: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The recurrence on Triton kernels. Under autocast q, k, v and a take its dtype; g and the state stay float32."""
    if not q.is_cuda:
        raise ValueError(f"backend='triton' runs on CUDA tensors; got {q.device}; use backend='chunked'")
    if max(q.shape[3], v.shape[3]) > MAX_WIDTH:
        raise ValueError(f"backend='triton' takes K, V <= {MAX_WIDTH}; got K = {q.shape[3]}, V = {v.shape[3]}")
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v, a = (x.to(dtype) for x in (q, k, v, a))
    if q.dtype not in DTYPES:
        raise ValueError(f"backend='triton' takes bfloat16, float16 or float32; got {q.dtype}; use backend='chunked'")
    tensors = (q, k, v, a, g, initial_state)
    trains = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if q.shape[1] == 1 and cu_seqlens is None and not trains:
        from qed.ops.fused import decode_op

        return decode_op(*tensors)
    o, final_state, _, _ = forward_op(q, k, v, a, g, initial_state, cu_seqlens)
    return o, final_state


def _device(x: Tensor):  # type: ignore[no-untyped-def]
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
