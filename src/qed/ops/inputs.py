"""From a mixer's projections to the recurrence's inputs: norms, gates, decay and the erase vector."""

from __future__ import annotations

import difflib

import torch
import torch.nn.functional as F
from torch import Tensor

from qed.ops.arms import Arm, erase_vector, get_arm

NORM_EPS = 1e-6
# exp(A_log) is held below float32's largest value: infinity times a closed gate would be NaN.
A_LOG_MAX = 80.0
INPUT_BACKENDS = ("torch", "triton")
# Which form of the operator's inputs goes with which form of the operator.
INPUT_BACKEND = {None: None, "reference": "torch", "chunked": "torch", "triton": "triton"}


def l2_normalize(x: Tensor) -> Tensor:
    """Unit vectors over the last axis; epsilon is added to the SUM of squares (zero stays zero, gradients finite)."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


def recurrence_inputs(
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
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Turn raw projections into ``(q, k, v, a, g)`` for :func:`gated_delta_rule` (paper sections 2 and 5).

    Args:
        q, k: ``[B, T, H, K]`` after convolution and activation, not yet normalised.
        v: ``[B, T, H, V]``.
        decay: ``[B, T, H, K]`` pre-activation; ``g = -exp(A_log) * softplus(decay + dt_bias)`` in float32, with
            ``A_log`` held at 80 at most.
        erase, write: ``[B, T, H, K]`` and ``[B, T, H, V]`` logits; ``b = sigmoid(erase)``, ``w = sigmoid(write)``.
        A_log: ``[H]`` float32. dt_bias: ``[H, K]`` float32. strength: ``[H]`` float32, lambda.
        arm: see :func:`erase_vector`.
        random_direction: see :func:`erase_vector`; a constant, so it gets no gradient.
        backend: ``"torch"``, ``"triton"`` (one fused kernel each way) or ``None``: triton on CUDA unless an input is
            float64, torch elsewhere. Every tensor may be a view with any strides.

    Returns:
        Normalised ``q, k``, gated ``v`` and ``a`` in the dtype of ``q``; ``g`` in float32 (float64 for float64 inputs).
        All arithmetic is in float32 at least, whatever the parameters' dtype; outputs are rounded once.

    Raises:
        ValueError: unknown arm or backend, a shape that does not fit, or float64 with ``backend="triton"``.
    """
    switches = get_arm(arm)
    tensors = {
        "q": q, "k": k, "v": v, "decay": decay, "erase": erase, "write": write,
        "A_log": A_log, "dt_bias": dt_bias, "strength": strength,
    }  # fmt: skip
    z = check_inputs(tensors, switches, arm, random_direction)
    if choose_backend(backend, tensors) == "triton":
        from qed.ops.fused import recurrence_inputs_op

        return recurrence_inputs_op(*tensors.values(), z, switches.direction, switches.gate, switches.project)

    dtype = q.dtype
    wide = torch.promote_types(dtype, torch.float32)
    q, k = l2_normalize(q.to(wide)), l2_normalize(k.to(wide))
    rate = A_log.to(wide).clamp(max=A_LOG_MAX).exp().unsqueeze(-1)
    g = -rate * F.softplus(decay.to(wide) + dt_bias.to(wide))
    a = erase_vector(q, k, erase.to(wide).sigmoid(), strength.to(wide), arm=arm, random_direction=z)
    v = v.to(wide) * write.to(wide).sigmoid()
    return q.to(dtype), k.to(dtype), v.to(dtype), a.to(dtype), g


def choose_backend(backend: str | None, tensors: dict[str, Tensor]) -> str:
    """``"torch"`` or ``"triton"``; ``None`` takes triton on CUDA unless a tensor is float64."""
    doubles = [name for name, x in tensors.items() if x.dtype == torch.float64]
    if backend is None:
        return "triton" if tensors["q"].is_cuda and not doubles else "torch"
    if backend not in INPUT_BACKENDS:
        guess = difflib.get_close_matches(backend, INPUT_BACKENDS, n=1, cutoff=0)[0]
        raise ValueError(f"unknown backend {backend!r}; did you mean {guess!r}? One of: {', '.join(INPUT_BACKENDS)}")
    if backend == "triton" and doubles:
        raise ValueError(f"backend 'triton' takes float32, bfloat16 and float16; float64: {', '.join(doubles)}")
    return backend


def check_inputs(tensors: dict[str, Tensor], switches: Arm, arm: str, random_direction: Tensor | None) -> Tensor | None:
    """Check every shape and device against q; return the random direction as a constant where the arm has one."""
    q, v = tensors["q"], tensors["v"]
    if q.ndim != 4 or v.ndim != 4 or v.shape[:3] != q.shape[:3]:
        raise ValueError(f"q and v must be [B, T, H, K] and [B, T, H, V]; got {list(q.shape)} and {list(v.shape)}")
    heads, per_channel = q.shape[2:3], q.shape[2:]
    expected = {
        "k": q.shape, "decay": q.shape, "erase": q.shape, "write": v.shape,
        "A_log": heads, "dt_bias": per_channel, "strength": heads,
    }  # fmt: skip
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            raise ValueError(f"{name} must be {list(shape)} to fit q {list(q.shape)}; got {list(tensors[name].shape)}")
    for name, x in tensors.items():
        if not x.is_floating_point() or x.device != q.device:
            raise ValueError(f"{name} must be floating point on {q.device} like q; got {x.dtype} on {x.device}")
    if switches.direction != "random":
        return None
    if random_direction is None or random_direction.shape != per_channel:
        given = None if random_direction is None else list(random_direction.shape)
        raise ValueError(f"arm {arm!r} needs random_direction [H, K] = {list(per_channel)}; got {given}")
    return random_direction.detach()
