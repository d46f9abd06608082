"""Registered operators around the core: prologue, decode steps, convolution; kernels load at the first call."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from qed.ops.arms import Arm
from qed.ops.library import empty_outputs


@torch.library.custom_op("qed::recurrence_inputs", mutates_args=())
def recurrence_inputs_op(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, erase: Tensor, write: Tensor,
    A_log: Tensor, dt_bias: Tensor, strength: Tensor, random_direction: Optional[Tensor],  # noqa: UP045
    direction: str, gate: bool, project: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from qed.ops import triton_inputs

    arm = Arm(direction, gate, project)  # type: ignore[arg-type]
    return triton_inputs.forward(q, k, v, decay, erase, write, A_log, dt_bias, strength, random_direction, arm)


@recurrence_inputs_op.register_fake
def _(q, k, v, decay, erase, write, A_log, dt_bias, strength, random_direction, direction, gate, project):  # type: ignore[no-untyped-def]
    return (
        q.new_empty(q.shape),
        q.new_empty(q.shape),
        q.new_empty(v.shape),
        q.new_empty(q.shape),
        q.new_empty(q.shape, dtype=torch.float32),
    )


@torch.library.custom_op("qed::recurrence_inputs_backward", mutates_args=())
def recurrence_inputs_backward_op(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, erase: Tensor, write: Tensor,
    A_log: Tensor, dt_bias: Tensor, strength: Tensor, random_direction: Optional[Tensor],  # noqa: UP045
    grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, grad_a: Tensor, grad_g: Tensor,
    direction: str, gate: bool, project: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from qed.ops import triton_inputs

    arm = Arm(direction, gate, project)  # type: ignore[arg-type]
    gradients = (grad_q, grad_k, grad_v, grad_a, grad_g)
    return triton_inputs.backward(  # type: ignore[return-value]
        q, k, v, decay, erase, write, A_log, dt_bias, strength, random_direction, gradients, arm
    )


@recurrence_inputs_backward_op.register_fake
def _(q, k, v, decay, erase, write, A_log, dt_bias, strength, *_rest):  # type: ignore[no-untyped-def]
    return tuple(x.new_empty(x.shape) for x in (q, k, v, decay, erase, write, A_log, dt_bias, strength))


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    *tensors, ctx.direction, ctx.gate, ctx.project = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, *gradients):  # type: ignore[no-untyped-def]
    results = recurrence_inputs_backward_op(*ctx.saved_tensors, *gradients, ctx.direction, ctx.gate, ctx.project)
    return *results, None, None, None, None


recurrence_inputs_op.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op("qed::decode", mutates_args=())
def decode_op(q: Tensor, k: Tensor, v: Tensor, a: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    from qed.ops import triton_decode

    out_state = state.new_empty(state.shape)
    return triton_decode.decode(q, k, v, a, g, state, out_state), out_state


@decode_op.register_fake
def _(q, k, v, a, g, state):  # type: ignore[no-untyped-def]
    return v.new_empty(v.shape), state.new_empty(state.shape)


@torch.library.custom_op("qed::decode_", mutates_args={"state"})
def decode_in_place_op(q: Tensor, k: Tensor, v: Tensor, a: Tensor, g: Tensor, state: Tensor) -> Tensor:
    from qed.ops import triton_decode

    return triton_decode.decode(q, k, v, a, g, state, state)


@decode_in_place_op.register_fake
def _(q, k, v, a, g, state):  # type: ignore[no-untyped-def]
    return v.new_empty(v.shape)


@torch.library.custom_op("qed::decode_inputs_", mutates_args={"state"})
def decode_inputs_in_place_op(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, erase: Tensor, write: Tensor,
    A_log: Tensor, dt_bias: Tensor, strength: Tensor, random_direction: Optional[Tensor],  # noqa: UP045
    state: Tensor, direction: str, gate: bool, project: bool,
) -> Tensor:  # fmt: skip
    from qed.ops import triton_decode

    arm = Arm(direction, gate, project)  # type: ignore[arg-type]
    return triton_decode.decode_inputs(
        q, k, v, decay, erase, write, A_log, dt_bias, strength, random_direction, state, arm
    )


@decode_inputs_in_place_op.register_fake
def _(q, k, v, *_rest):  # type: ignore[no-untyped-def]
    return q.new_empty(v.shape)


@torch.library.custom_op("qed::short_convolution", mutates_args=())
def short_convolution_op(x: Tensor, weight: Tensor, positions: Optional[Tensor], skip: int) -> Tensor:  # noqa: UP045
    from qed.ops import triton_convolution

    return triton_convolution.forward(x, weight, positions, skip)


@short_convolution_op.register_fake
def _(x, weight, positions, skip):  # type: ignore[no-untyped-def]
    return x.new_empty((x.shape[0], x.shape[1] - skip, x.shape[2]))


@torch.library.custom_op("qed::short_convolution_backward", mutates_args=())
def short_convolution_backward_op(
    x: Tensor,
    weight: Tensor,
    positions: Optional[Tensor],  # noqa: UP045
    grad: Tensor,
    skip: int,
) -> tuple[Tensor, Tensor]:
    from qed.ops import triton_convolution

    return triton_convolution.backward(x, weight, positions, grad, skip)


@short_convolution_backward_op.register_fake
def _(x, weight, positions, grad, skip):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _save_convolution(ctx, inputs, output):  # type: ignore[no-untyped-def]
    x, weight, positions, ctx.skip = inputs
    ctx.save_for_backward(x, weight, positions)


def _convolution_backward(ctx, grad):  # type: ignore[no-untyped-def]
    return *short_convolution_backward_op(*ctx.saved_tensors, grad, ctx.skip), None, None


short_convolution_op.register_autograd(_convolution_backward, setup_context=_save_convolution)


@torch.library.custom_op("qed::projected_rule", mutates_args=())
def projected_rule_op(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, erase: Tensor, write: Tensor,
    A_log: Tensor, dt_bias: Tensor, strength: Tensor, random_direction: Optional[Tensor],  # noqa: UP045
    initial_state: Tensor, cu_seqlens: Optional[Tensor], direction: str, gate: bool, project: bool,  # noqa: UP045
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """``o``, ``final_state`` and, for a split sequence, its segments' start states and transitions (else empty)."""
    from qed.ops import triton_forward as kernels

    q, k, v, decay, erase, write = (kernels.rows(x) for x in (q, k, v, decay, erase, write))
    A_log, dt_bias, strength = (x.contiguous() for x in (A_log, dt_bias, strength))
    z = None if random_direction is None else random_direction.contiguous()
    problem, plan = kernels.describe(q, k, v, q, cu_seqlens)
    raw = kernels.Raw(write, A_log, dt_bias, strength, z, Arm(direction, gate, project))  # type: ignore[arg-type]
    with torch.cuda.device_of(q):
        return kernels.forward(q, k, v, erase, decay, initial_state.contiguous(), cu_seqlens, problem, plan, raw)


@projected_rule_op.register_fake
def _(q, k, v, decay, erase, write, A_log, dt_bias, strength, z, initial_state, cu_seqlens, direction, gate, project):  # type: ignore[no-untyped-def]
    return empty_outputs(q, v, initial_state, cu_seqlens)


@torch.library.custom_op("qed::projected_rule_backward", mutates_args=())
def projected_rule_backward_op(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, erase: Tensor, write: Tensor,
    A_log: Tensor, dt_bias: Tensor, strength: Tensor, random_direction: Optional[Tensor],  # noqa: UP045
    initial_state: Tensor, cu_seqlens: Optional[Tensor], starts: Tensor, transition: Tensor,  # noqa: UP045
    grad_o: Tensor, grad_final: Tensor, direction: str, gate: bool, project: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of the nine projections and parameters, and of the initial state."""
    from qed.ops import triton_backward, triton_forward, triton_inputs

    streams = (q, k, v, decay, erase, write, A_log, dt_bias, strength, random_direction)
    arm = Arm(direction, gate, project)  # type: ignore[arg-type]
    inputs = triton_inputs.forward(*streams, arm)
    problem, plan = triton_forward.describe(*inputs[:4], cu_seqlens)
    with torch.cuda.device_of(q):
        *gradients, grad_initial = triton_backward.backward(
            *inputs, initial_state.contiguous(), cu_seqlens, starts, transition,
            triton_forward.rows(grad_o), grad_final.contiguous(), problem, plan,
        )  # fmt: skip
    return *triton_inputs.backward(*streams, tuple(gradients), arm), grad_initial  # type: ignore[return-value]


@projected_rule_backward_op.register_fake
def _(q, k, v, decay, erase, write, A_log, dt_bias, strength, z, initial_state, *_rest):  # type: ignore[no-untyped-def]
    leaves = (q, k, v, decay, erase, write, A_log, dt_bias, strength, initial_state)
    return tuple(x.new_empty(x.shape) for x in leaves)


def _save_rule(ctx, inputs, output):  # type: ignore[no-untyped-def]
    *tensors, ctx.direction, ctx.gate, ctx.project = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, output[2], output[3])


def _rule_backward(ctx, grad_o, grad_final, *_internal):  # type: ignore[no-untyped-def]
    saved = ctx.saved_tensors
    if grad_o is None:
        grad_o = saved[2].new_zeros(saved[2].shape)
    if grad_final is None:
        grad_final = torch.zeros_like(saved[10])
    flags = (ctx.direction, ctx.gate, ctx.project)
    *results, grad_initial = projected_rule_backward_op(*saved, grad_o, grad_final, *flags)
    return *results, None, grad_initial, None, None, None, None


projected_rule_op.register_autograd(_rule_backward, setup_context=_save_rule)
