"""One decoding step that updates the state in place: alone, or with the prologue in the same kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from qed.ops.arms import get_arm
from qed.ops.inputs import check_inputs, choose_backend, recurrence_inputs
from qed.ops.reference import recurrence


def decode_step_(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, g: Tensor, state: Tensor, *, backend: str | None = None
) -> Tensor:
    """One token of :func:`gated_delta_rule`; returns ``o`` and leaves the new state in ``state``.

    Args:
        q, k, a, g: ``[B, 1, H, K]``; v: ``[B, 1, H, V]``, as for :func:`gated_delta_rule`.
        state: ``[B, H, K, V]``, contiguous, changed in place. float32 is the default choice of the caches; bfloat16
            halves the traffic at the price of rounding once a token. Arithmetic is in float32 either way.
        backend: ``"torch"``, ``"triton"`` or ``None``: triton on CUDA unless q is float64, torch elsewhere.

    Returns:
        ``o`` ``[B, 1, H, V]`` in v's dtype. No gradients: use :func:`gated_delta_rule` for those.

    Raises:
        ValueError: more than one token, a shape that does not fit, a state not contiguous, or a gradient wanted.
    """
    if not q.shape == k.shape == a.shape == g.shape:
        shapes = ", ".join(str(list(x.shape)) for x in (q, k, a, g))
        raise ValueError(f"q, k, a and g must share one shape [B, 1, H, K]; got {shapes}")
    tensors = {"q": q, "k": k, "v": v, "a": a, "g": g, "state": state}
    _check_step(q, v, tensors)
    if choose_backend(backend, tensors) == "triton":
        from qed.ops.fused import decode_in_place_op

        return decode_in_place_op(q, k, v, a, g, state)
    wide = torch.promote_types(q.dtype, torch.float32)
    o, new = recurrence(*(x.to(wide) for x in (q, k, v, a, g, state)))
    state.copy_(new)
    return o.to(v.dtype)


def decode_inputs_step_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    erase: Tensor,
    write: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    strength: Tensor,
    state: Tensor,
    *,
    arm: str = "qed",
    random_direction: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """:func:`recurrence_inputs` and :func:`decode_step_` in one kernel; returns ``o``, changes ``state`` in place.

    Nothing is rounded between the two, so the result is closer to exact than that of the pair. Arguments as there.
    """
    switches = get_arm(arm)
    tensors = {
        "q": q, "k": k, "v": v, "decay": decay, "erase": erase, "write": write,
        "A_log": A_log, "dt_bias": dt_bias, "strength": strength,
    }  # fmt: skip
    z = check_inputs(tensors, switches, arm, random_direction)
    _check_step(q, v, {**tensors, "state": state})
    if choose_backend(backend, {**tensors, "state": state}) == "triton":
        from qed.ops.fused import decode_inputs_in_place_op

        flags = (switches.direction, switches.gate, switches.project)
        return decode_inputs_in_place_op(*tensors.values(), z, state, *flags)
    wide = torch.promote_types(q.dtype, torch.float32)
    # widening q first leaves nothing to round: recurrence_inputs returns q's dtype
    parts = recurrence_inputs(
        q.to(wide), k, v, decay, erase, write, A_log, dt_bias, strength, arm=arm, random_direction=z, backend="torch"
    )
    o, new = recurrence(*parts, state.to(wide))
    state.copy_(new)
    return o.to(q.dtype)


def _check_step(q: Tensor, v: Tensor, tensors: dict[str, Tensor]) -> None:
    state = tensors["state"]
    if q.ndim != 4 or q.shape[1] != 1 or v.ndim != 4 or v.shape[:3] != q.shape[:3]:
        raise ValueError(f"a step takes q [B, 1, H, K] and v [B, 1, H, V]; got {list(q.shape)} and {list(v.shape)}")
    expected = [q.shape[0], q.shape[2], q.shape[3], v.shape[3]]
    if list(state.shape) != expected or not state.is_contiguous():
        given = f"{list(state.shape)} with strides {list(state.stride())}"
        raise ValueError(f"state must be [B, H, K, V] = {expected}, contiguous; got {given}")
    for name, x in tensors.items():
        if x.device != q.device:
            raise ValueError(f"{name} must lie on q's device {q.device}; got {x.device}")
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors.values()):
        raise ValueError("a step in place has no gradient: call it under torch.no_grad(), or use gated_delta_rule")
