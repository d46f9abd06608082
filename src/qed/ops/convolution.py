"""Causal depthwise convolution and SiLU, the mixer's only look at neighbours besides the state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from qed.ops.inputs import choose_backend

# The fused kernel's width; narrower weights are padded to it.
FUSED_WIDTH = 4
# Elements worked on together on a CPU.
SLAB = 1 << 17


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
    Differentiable once.

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

        skip = FUSED_WIDTH - 1
        weight = F.pad(weight, (FUSED_WIDTH - width, 0)) if width < FUSED_WIDTH else weight
        if state is None:
            return short_convolution_op(x, weight, positions, 0)
        state = F.pad(state, (0, 0, FUSED_WIDTH - width, 0)) if width < FUSED_WIDTH else state
        if torch.is_grad_enabled() or x.shape[1] <= skip:
            return short_convolution_op(torch.cat([state.to(x.dtype), x], 1), weight, None, skip)
        # Only the first outputs see the state: x need not be copied behind it.
        out = short_convolution_op(x, weight, None, 0)
        out[:, :skip] = short_convolution_op(torch.cat([state.to(x.dtype), x[:, :skip]], 1), weight, None, skip)
        return out

    full = x if state is None else torch.cat([state.to(x.dtype), x], 1)
    return _Convolution.apply(full, weight, positions, 0 if state is None else width - 1)


class _Convolution(torch.autograd.Function):
    """``full`` begins with ``start`` tokens that have no output. Differentiable once."""

    @staticmethod
    def forward(ctx: Any, full, weight, positions, start):  # type: ignore[no-untyped-def,override]
        wide = torch.promote_types(full.dtype, torch.float32)
        columns = _by_lag(weight, wide)
        out = full.new_empty(full.shape[0], full.shape[1] - start, full.shape[2], dtype=wide)
        for full_s, out_s in _slabs(full, out):
            full_s = full_s.to(wide)
            for lag, tokens, before in _lags(len(columns), full.shape[1], start):
                if lag:
                    out_s[:, tokens] += _own(full_s[:, before] * columns[lag], positions, lag, tokens)
                else:
                    torch.mul(full_s[:, before], columns[lag], out=out_s)
        ctx.start = start
        ctx.save_for_backward(full, weight, positions, out)
        return F.silu(out).to(full.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_silu):  # type: ignore[no-untyped-def,override]
        full, weight, positions, out = ctx.saved_tensors
        columns = _by_lag(weight, out.dtype)
        d_out = torch.ops.aten.silu_backward(d_silu.to(out.dtype), out)
        d_full = torch.zeros_like(full, dtype=out.dtype)
        sums = d_out.new_zeros(len(columns), _num_rows(full), *d_out.shape[1:])
        for full_s, d_out_s, d_full_s in _slabs(full, d_out, d_full):
            full_s = full_s.to(out.dtype)
            for lag, tokens, before in _lags(len(columns), full.shape[1], ctx.start):
                d_term = _own(d_out_s[:, tokens], positions, lag, tokens)
                d_full_s[:, before].addcmul_(d_term, columns[lag])
                sums[lag, : len(full_s), tokens].addcmul_(d_term, full_s[:, before])
        d_weight = sums.sum((1, 2)).flip(0).t()
        return d_full.to(full.dtype), d_weight.to(weight.dtype), None, None


def _by_lag(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """``[W, C]``, in memory of its own: along strided columns the loops over channels are not vectorised."""
    return weight.to(dtype).flip(1).t().contiguous()


def _num_rows(full: Tensor) -> int:
    """Rows of the batch worked on together: few enough for a CPU's cache, all on a GPU."""
    rows, num_tokens, channels = full.shape
    return rows if full.device.type != "cpu" else min(rows, max(1, SLAB // (num_tokens * channels)))


def _slabs(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(x.split(_num_rows(tensors[0])) for x in tensors), strict=True)


def _lags(width: int, num_full: int, start: int) -> Iterator[tuple[int, slice, slice]]:
    """Each lag with the outputs it reaches and the tokens of ``full`` that it reaches them from."""
    for lag in range(min(width, num_full)):
        first = max(0, lag - start)
        yield lag, slice(first, None), slice(start + first - lag, num_full - lag)


def _own(x: Tensor, positions: Tensor | None, lag: int, tokens: slice) -> Tensor:
    """``x`` without what a lag brings from another document."""
    return x if positions is None or lag == 0 else x.masked_fill((positions[tokens] < lag)[:, None], 0)
