"""Causal depthwise convolution and SiLU, the mixer's only look at neighbours besides the state."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from qed.ops.inputs import choose_backend

# The fused kernel's width; narrower weights are padded to it.
FUSED_WIDTH = 4


def short_convolution(
    x: Tensor,
    weight: Tensor,
    *,
    state: Tensor | None = None,
    positions: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Causal depthwise convolution, then SiLU; sums in float32 or wider, returns x's dtype.

    Every output is the same sum of W products whatever T is, so a step of one token repeats the bits of a long pass.

    Args:
        x: ``[B, T, C]``.
        weight: ``[C, W]``; the last column multiplies the current token.
        state: ``[B, W - 1, C]``, the inputs before the first token; zeros when ``None``.
        positions: ``[T]`` index of each token in its own document, excludes ``state``; lags that reach before the
            document count as zero.
        backend: ``"torch"``, ``"triton"`` (one kernel each way, W of at most 4) or ``None``: triton on CUDA where it
            can, torch elsewhere.

    Raises:
        ValueError: shapes that do not fit, ``state`` with ``positions``, or what the named backend cannot do.
    """
    if x.ndim != 3 or weight.ndim != 2 or weight.shape[0] != x.shape[2]:
        raise ValueError(f"x and weight must be [B, T, C] and [C, W]; got {list(x.shape)} and {list(weight.shape)}")
    width = weight.shape[1]
    if state is not None and positions is not None:
        raise ValueError("a state continues one sequence and positions pack many: give one of them")
    if state is not None and state.shape != (x.shape[0], width - 1, x.shape[2]):
        expected = [x.shape[0], width - 1, x.shape[2]]
        raise ValueError(f"state must be [B, W - 1, C] = {expected}; got {list(state.shape)}")
    if positions is not None and positions.shape != x.shape[1:2]:
        raise ValueError(f"positions must be [T] = {[x.shape[1]]}; got {list(positions.shape)}")
    if backend is None and width > FUSED_WIDTH:
        backend = "torch"
    if choose_backend(backend, {"q": x, "weight": weight}) == "triton":
        if width > FUSED_WIDTH:
            raise ValueError(f"backend 'triton' takes widths up to {FUSED_WIDTH}; got {width}")
        from qed.ops.fused import short_convolution_op

        if state is not None:
            state = F.pad(state, (0, 0, FUSED_WIDTH - width, 0)) if width < FUSED_WIDTH else state
            x = torch.cat([state.to(x.dtype), x], 1)
        weight = F.pad(weight, (FUSED_WIDTH - width, 0)) if width < FUSED_WIDTH else weight
        return short_convolution_op(x, weight, positions, 0 if state is None else FUSED_WIDTH - 1)

    wide = torch.promote_types(x.dtype, torch.float32)
    before = F.pad(x, (0, 0, width - 1, 0)) if state is None else torch.cat([state.to(x.dtype), x], 1)
    # Columns in memory of their own: along strided ones the loops over channels are not vectorised.
    full, columns = before.to(wide), weight.to(wide).t().contiguous().unbind(0)
    num_tokens = x.shape[1]
    out = full[:, width - 1 :] * columns[-1]
    for lag in range(1, width):
        term = full[:, width - 1 - lag : width - 1 - lag + num_tokens] * columns[-1 - lag]
        if positions is not None:
            term = term.masked_fill((positions < lag)[:, None], 0)
        out += term
    return F.silu(out).to(x.dtype)
