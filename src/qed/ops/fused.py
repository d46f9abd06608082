"""Registered operators around the core; their kernels load at the first call."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from qed.ops.arms import Arm


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


@torch.library.custom_op("qed::prefill", mutates_args=())
def prefill_op(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, erase: Tensor, write: Tensor,
    A_log: Tensor, dt_bias: Tensor, strength: Tensor, random_direction: Optional[Tensor],  # noqa: UP045
    initial_state: Optional[Tensor], cu_seqlens: Optional[Tensor],  # noqa: UP045
    direction: str, gate: bool, project: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from qed.ops import triton_prefill

    arm = Arm(direction, gate, project)  # type: ignore[arg-type]
    return triton_prefill.forward(
        q, k, v, decay, erase, write, A_log, dt_bias, strength, random_direction, initial_state, cu_seqlens, arm
    )


@prefill_op.register_fake
def _(q, k, v, decay, erase, write, A_log, dt_bias, strength, z, initial_state, cu_seqlens, *_rest):  # type: ignore[no-untyped-def]
    num_states = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return v.new_empty(v.shape), q.new_empty((num_states, *q.shape[2:], v.shape[3]), dtype=torch.float32)


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


@torch.library.custom_op("qed::gated_norm", mutates_args=())
def gated_norm_op(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    from qed.ops import triton_gates

    return triton_gates.gated_norm(x, gate, weight, eps)


@gated_norm_op.register_fake
def _(x, gate, weight, eps):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, gate.dtype))


@torch.library.custom_op("qed::silu_product", mutates_args=())
def silu_product_op(gate: Tensor, up: Tensor) -> Tensor:
    from qed.ops import triton_gates

    return triton_gates.silu_product(gate, up)


@silu_product_op.register_fake
def _(gate, up):  # type: ignore[no-untyped-def]
    return gate.new_empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype))
