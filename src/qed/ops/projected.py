"""From projections to the recurrence's output in one operator: what a mixer calls where nothing lies between."""

from __future__ import annotations

import torch
from torch import Tensor

from qed.ops import library
from qed.ops.api import BACKENDS, check_arguments, gated_delta_rule
from qed.ops.arms import get_arm, unknown
from qed.ops.inputs import check_inputs, recurrence_inputs


def projected_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    erase: Tensor,
    write: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    strength: Tensor,
    *,
    arm: str = "qed",
    random_direction: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`recurrence_inputs`, then :func:`gated_delta_rule`; arguments and results as there.

    On Triton the recurrence's first kernel forms its inputs itself, with the same roundings: outputs have the same bits,
    normalised q and k, a, g and the gated v are never written, and only the projections are kept for the backward.

    Raises:
        ValueError: what the two functions refuse.
    """
    switches = get_arm(arm)
    tensors = {
        "q": q, "k": k, "v": v, "decay": decay, "erase": erase, "write": write,
        "A_log": A_log, "dt_bias": dt_bias, "strength": strength,
    }  # fmt: skip
    if backend is not None and backend not in BACKENDS:
        raise ValueError(unknown("backend", backend, BACKENDS))
    fits = (
        all(x.dtype in library.DTYPES for x in tensors.values()) and max(q.shape[-1], v.shape[-1]) <= library.MAX_WIDTH
    )
    if q.is_cuda and backend in (None, "triton") and fits and q.dtype == k.dtype == v.dtype:
        z = check_inputs(tensors, switches, arm, random_direction)
        num_states = check_arguments(q, k, v, q, decay, initial_state, cu_seqlens)
        if initial_state is None:
            initial_state = q.new_zeros((num_states, *q.shape[2:], v.shape[-1]), dtype=torch.float32)
        from qed.ops.fused import projected_rule_op

        flags = (switches.direction, switches.gate, switches.project)
        return projected_rule_op(*tensors.values(), z, initial_state.float(), cu_seqlens, *flags)[:2]
    inputs = recurrence_inputs(  # type: ignore[misc]
        *tensors.values(),  # type: ignore[arg-type]
        arm=arm,
        random_direction=random_direction,
        backend={None: None, "triton": "triton"}.get(backend, "torch"),
    )
    return gated_delta_rule(*inputs, initial_state=initial_state, cu_seqlens=cu_seqlens, backend=backend)
