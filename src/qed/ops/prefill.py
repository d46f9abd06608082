"""The recurrence from raw projections, in fewer passes over memory where no gradient is wanted."""

from __future__ import annotations

import torch
from torch import Tensor

from qed.ops.api import BACKENDS, check_arguments, gated_delta_rule
from qed.ops.arms import get_arm, unknown
from qed.ops.inputs import INPUT_BACKEND, check_inputs, choose_backend, recurrence_inputs
from qed.ops.library import DTYPES, MAX_WIDTH


def gated_delta_rule_from_projections(
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
    """:func:`recurrence_inputs`, then :func:`gated_delta_rule`; arguments, result and errors as there.

    On Triton the two share their first kernel, and results differ from the pair's by rounding, where no gradient is
    wanted, outside autocast, for more than one token and six streams of one dtype; else they are the pair's.
    ``backend`` is the operator's: ``"reference"``, ``"chunked"``, ``"triton"`` or ``None``.
    """
    tensors = {
        "q": q, "k": k, "v": v, "decay": decay, "erase": erase, "write": write,
        "A_log": A_log, "dt_bias": dt_bias, "strength": strength,
    }  # fmt: skip
    if backend is not None and backend not in BACKENDS:
        raise ValueError(unknown("backend", backend, BACKENDS))
    inputs_backend = INPUT_BACKEND[backend]
    streams = (q, k, v, decay, erase, write)
    leaves = (*tensors.values(), initial_state)
    trains = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in leaves)
    fits = (
        q.is_cuda and q.ndim == 4 and q.shape[1] > 1 and not trains and not torch.is_autocast_enabled(q.device.type)
        and all(x.dtype == q.dtype and x.dtype in DTYPES for x in streams)
        and max(q.shape[-1], v.shape[-1]) <= MAX_WIDTH
    )  # fmt: skip
    if not fits or choose_backend(inputs_backend, tensors) != "triton":
        options = {"arm": arm, "random_direction": random_direction, "backend": inputs_backend}
        inputs = recurrence_inputs(*tensors.values(), **options)  # type: ignore[arg-type]
        return gated_delta_rule(*inputs, initial_state=initial_state, cu_seqlens=cu_seqlens, backend=backend)
    from qed.ops.fused import prefill_op

    switches = get_arm(arm)
    z = check_inputs(tensors, switches, arm, random_direction)
    check_arguments(q, k, v, erase, None, initial_state, cu_seqlens)
    state = None if initial_state is None else initial_state.float().contiguous()
    return prefill_op(*tensors.values(), z, state, cu_seqlens, switches.direction, switches.gate, switches.project)
