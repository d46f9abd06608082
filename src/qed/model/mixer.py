"""The mixer: hidden states to the operator's inputs and back (paper section 5).

Shapes: B batch, T time, D hidden size, H heads, K key dimension, V value dimension, C convolved channels, W width.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.cache_utils import Cache

from qed.model.config import QEDConfig
from qed.ops import (
    decode_inputs_step_,
    gated_delta_rule,
    gated_delta_rule_from_projections,
    gated_norm,
    get_arm,
    recurrence_inputs,
    short_convolution,
)
from qed.ops.inputs import INPUT_BACKEND

FLOAT32_NAMES = ("A_log", "dt_bias", "theta", "random_direction")


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis, in float32 or wider."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == self.weight.dtype:
            # One pass over memory: PyTorch computes it in float32 too and rounds once.
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return F.rms_norm(wide, self.weight.shape, self.weight.to(wide.dtype), self.eps).to(x.dtype)


class Padding(NamedTuple):
    """Where the tokens of padded rows go so that every row starts with its real tokens and pads come last.

    The model has no positions, so moving a row changes nothing; pads at the end neither enter a convolution window
    nor the state. ``order`` and ``inverse`` are ``[B, T]`` indices, ``lengths`` ``[B]``, ``real`` ``[B, T]`` booleans
    in the new order.
    """

    order: Tensor
    inverse: Tensor
    lengths: Tensor
    real: Tensor

    @classmethod
    def from_mask(cls, attention_mask: Tensor) -> Padding:
        """Read a ``[B, T]`` mask, nonzero at real tokens; pads may be anywhere."""
        is_pad = attention_mask == 0
        order = torch.argsort(is_pad.to(torch.uint8), dim=1, stable=True)
        lengths = (~is_pad).sum(1)
        real = torch.arange(order.shape[1], device=order.device) < lengths[:, None]
        return cls(order, torch.argsort(order, dim=1), lengths, real)


class QEDMixer(nn.Module):
    """Token mixer of every arm: projections, convolution, recurrence, gated norm, projection.

    ``A_log``, ``dt_bias``, ``theta`` and ``random_direction`` stay in float32 when the module is cast to a 16-bit
    dtype, and the recurrence runs outside autocast. Arms without a direction have no ``theta``; only arms with a
    random direction have the buffer ``random_direction``.

    Args:
        config: the model's configuration.
        layer_idx: position in the model; it enters the seed of ``random_direction`` and names the cache's layer.
    """

    random_direction: Tensor | None

    def __init__(self, config: QEDConfig, layer_idx: int = 0) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        D, H, K = config.hidden_size, config.num_heads, config.head_dim
        V = config.value_head_dim or K
        self.num_heads, self.key_dim, self.value_dim = H, K, V
        self.qkv_proj = nn.Linear(D, 2 * H * K + H * V, bias=False)
        self.conv_weight = nn.Parameter(torch.empty(2 * H * K + H * V, config.conv_size))
        self.gates_proj = nn.Linear(D, H * K + H * V, bias=False)
        self.decay_proj = nn.Sequential(nn.Linear(D, K, bias=False), nn.Linear(K, H * K, bias=False))
        self.output_gate_proj = nn.Sequential(nn.Linear(D, K, bias=False), nn.Linear(K, H * V))
        self.norm = RMSNorm(V, config.norm_eps)
        self.out_proj = nn.Linear(H * V, D, bias=False)
        self.A_log = nn.Parameter(torch.empty(H, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(H, K, dtype=torch.float32))
        direction = get_arm(config.arm).direction
        self.theta = nn.Parameter(torch.empty(H, dtype=torch.float32)) if direction != "none" else None
        random = torch.empty(H, K, dtype=torch.float32) if direction == "random" else None
        self.register_buffer("random_direction", random, persistent=True)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the convolution and the decay as the paper does, theta and the random direction as configured.

        ``A_log``: log of a uniform draw in ``config.A_range``; ``dt_bias``: inverse softplus of a log-uniform draw in
        ``config.dt_range``; the convolution: uniform within ``1 / sqrt(W)``, PyTorch's default (the
        paper does not state it). Linear layers keep what their own initialisation gave.
        """
        if self.A_log.is_meta:
            return
        bound = self.config.conv_size**-0.5
        init.uniform_(self.conv_weight, -bound, bound)
        init.copy_(self.A_log, torch.empty_like(self.A_log).uniform_(*self.config.A_range).log_())
        low, high = (math.log(x) for x in self.config.dt_range)
        dt = torch.empty_like(self.dt_bias).uniform_(low, high).exp_()
        init.copy_(self.dt_bias, dt + torch.log(-torch.expm1(-dt)))
        if self.theta is not None:
            init.constant_(self.theta, self.config.theta_init)
        if self.random_direction is not None:
            generator = torch.Generator().manual_seed((self.config.random_direction_seed << 16) + self.layer_idx)
            draw = torch.randn(self.num_heads, self.key_dim, generator=generator, dtype=torch.float64)
            init.copy_(self.random_direction, F.normalize(draw, dim=-1))

    def _apply(self, fn: Any, recurse: bool = True) -> QEDMixer:
        kept = {name: getattr(self, name) for name in FLOAT32_NAMES if getattr(self, name) is not None}
        kept = {name: tensor.data for name, tensor in kept.items()}
        super()._apply(fn, recurse)
        for name, tensor in kept.items():
            new = getattr(self, name)
            if new.dtype in (torch.bfloat16, torch.float16):
                new.data = tensor.to(device=new.device, dtype=torch.float32)
        return self

    def strength(self) -> Tensor:
        """Lambda of every head ``[H]``, ``strength_scale`` included; zeros for an arm without a direction."""
        if self.theta is None:
            return torch.zeros_like(self.A_log)
        return self.config.strength_scale * self.config.lambda_max * self.theta.sigmoid()

    def forward(
        self,
        hidden_states: Tensor,
        *,
        cache: Cache | None = None,
        padding: Padding | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Mix ``[B, T, D]`` causally.

        Args:
            hidden_states: ``[B, T, D]``; not float16, whose range the unnormalised read-outs exceed.
            cache: Transformers' cache for this config; this layer's states are read, used and replaced.
            padding: pads to leave out, from :meth:`Padding.from_mask`.
            cu_seqlens: ``[N + 1]`` offsets of documents packed into a batch of one; excludes the two others.

        Raises:
            ValueError: float16, or ``cu_seqlens`` together with a cache, padding or a batch of more than one.
        """
        if cu_seqlens is not None and (cache is not None or padding is not None or hidden_states.shape[0] != 1):
            raise ValueError("cu_seqlens packs whole documents into a batch of one, without a cache or padding")
        if padding is not None:
            hidden_states = hidden_states.take_along_dim(padding.order[..., None], 1)
        streams, state = self._streams(hidden_states, cache, padding, cu_seqlens)
        backend = self.config.backend
        one_token = hidden_states.shape[1] == 1 and padding is None and not torch.is_grad_enabled()
        with torch.autocast(hidden_states.device.type, enabled=False):
            if one_token and state is not None and backend in (None, "triton"):
                # the state is the cache's own tensor: one kernel edits it where it lies
                o = decode_inputs_step_(  # type: ignore[misc]
                    *streams,
                    state,  # type: ignore[arg-type]
                    arm=self.config.arm,
                    random_direction=self.random_direction,
                )
            else:
                if padding is None:
                    o, state = gated_delta_rule_from_projections(
                        *streams,
                        arm=self.config.arm,
                        random_direction=self.random_direction,
                        initial_state=state,
                        cu_seqlens=cu_seqlens,
                        backend=backend,
                    )
                else:
                    o, state = gated_delta_rule(*self._inputs(streams, padding), initial_state=state, backend=backend)
                if cache is not None:
                    cache.update_recurrent_state(state, self.layer_idx)
        gate = self.output_gate_proj(hidden_states).unflatten(-1, (self.num_heads, self.value_dim))
        read = gated_norm(o, gate, self.norm.weight, self.norm.eps, backend=INPUT_BACKEND[backend])
        output = self.out_proj(read.flatten(-2))
        return output if padding is None else output.take_along_dim(padding.inverse[..., None], 1)

    def recurrence_inputs(
        self, hidden_states: Tensor, *, padding: Padding | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The ``(q, k, v, a, g)`` that :meth:`forward` gives the operator when there is no cache."""
        if padding is not None:
            hidden_states = hidden_states.take_along_dim(padding.order[..., None], 1)
        return self._inputs(self._streams(hidden_states, None, padding, cu_seqlens)[0], padding)

    def _streams(
        self, x: Tensor, cache: Cache | None, padding: Padding | None, cu_seqlens: Tensor | None
    ) -> tuple[tuple[Any, ...], Tensor | None]:
        """The positional arguments of :func:`qed.ops.recurrence_inputs`, and the state to start from."""
        H, K, V = self.num_heads, self.key_dim, self.value_dim
        qkv = self.qkv_proj(x)
        if qkv.dtype == torch.float16:
            raise ValueError("float16 cannot hold what the state returns; use bfloat16 or float32")
        conv_state, state = self._read(cache, x.shape[0])
        positions = None if cu_seqlens is None else document_positions(cu_seqlens, x.shape[1])
        backend = INPUT_BACKEND[self.config.backend]
        mixed = short_convolution(qkv, self.conv_weight, state=conv_state, positions=positions, backend=backend)
        if cache is not None:
            self._write_conv_state(cache, qkv, conv_state, padding)
        q, k, v = mixed.split([H * K, H * K, H * V], -1)
        erase, write = self.gates_proj(x).split([H * K, H * V], -1)
        streams = (y.unflatten(-1, (H, -1)) for y in (q, k, v, self.decay_proj(x), erase, write))
        return (*streams, self.A_log, self.dt_bias, self.strength()), state

    def _inputs(
        self, streams: tuple[Any, ...], padding: Padding | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        with torch.autocast(streams[0].device.type, enabled=False):
            q, k, v, a, g = recurrence_inputs(
                *streams,
                arm=self.config.arm,
                random_direction=self.random_direction,
                backend=INPUT_BACKEND[self.config.backend],
            )
        if padding is not None:
            is_pad = ~padding.real[..., None, None]
            k, v, a, g = (y.masked_fill(is_pad, 0) for y in (k, v, a, g))
        return q, k, v, a, g

    def _read(self, cache: Cache | None, batch_size: int) -> tuple[Tensor | None, Tensor | None]:
        if cache is None or not cache.has_previous_state(self.layer_idx):
            return None, None
        layer: Any = cache.layers[self.layer_idx]
        conv_state, state = layer.conv_states[0].transpose(1, 2), layer.recurrent_states[0]
        if state.shape[0] != batch_size:
            raise ValueError(f"the cache holds {state.shape[0]} sequences; the input has {batch_size}")
        # The cache is overwritten in place, which would invalidate what backward has saved.
        return (conv_state.clone(), state.clone()) if torch.is_grad_enabled() else (conv_state, state)

    def _write_conv_state(self, cache: Cache, qkv: Tensor, conv_state: Tensor | None, padding: Padding | None) -> None:
        size = self.config.conv_size - 1
        if conv_state is None:
            conv_state = qkv.new_zeros(qkv.shape[0], size, qkv.shape[2])
        full = torch.cat([conv_state.to(qkv.dtype), qkv if padding is not None else qkv[:, -size:]], 1)
        if padding is None:
            last = full[:, -size:]
        else:
            index = padding.lengths[:, None] + torch.arange(size, device=full.device)
            last = full.take_along_dim(index[..., None], 1)
        cache.update_conv_state(last.transpose(1, 2), self.layer_idx, conv_kernel_size=size)


def document_positions(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """``[T]`` index of each packed token in its own document."""
    tokens = torch.arange(num_tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return tokens - cu_seqlens[torch.searchsorted(cu_seqlens, tokens, right=True) - 1]
