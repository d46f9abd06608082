"""From a mixer's activations to what the paper names, in float64 (paper sections 2 and 3).

Shapes: B batch, T time, H heads, K key dimension, V value dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from qed.model.mixer import QEDMixer
from qed.ops import gated_delta_rule, get_arm, l2_normalize, short_convolution
from qed.ops.inputs import A_LOG_MAX

from .hooks import Activations

# Halvings of the interval that holds the largest squared singular value.
NUM_BISECTIONS = 56
# An arm that adds nothing is asked what QED would have measured.
COUNTERFACTUAL_ARM = "qed"


@dataclass(frozen=True)
class Inside:
    """Tokens of one layer, float64: ``q k a d b g`` and ``base = b * k`` ``[B, T, H, K]``, ``v`` (gated) and ``w``
    ``[B, T, H, V]``, ``strength`` ``[H]``.

    ``a = base + strength * d``; ``d`` is the arm's direction, projected where the arm projects, and for an arm without
    one QED's with strength 0. ``projection_change`` ``[B, T, H]``: ``e`` with the direction projected less ``e``
    without.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    g: Tensor
    b: Tensor
    w: Tensor
    d: Tensor
    base: Tensor
    strength: Tensor
    projection_change: Tensor

    @property
    def e(self) -> Tensor:
        """``1 - a.k`` ``[B, T, H]``."""
        return 1 - (self.a * self.k).sum(-1)

    @property
    def rho(self) -> Tensor:
        """``q.k`` ``[B, T, H]``."""
        return (self.q * self.k).sum(-1)

    def part(self, tokens: slice) -> Inside:
        """The same for some of the tokens."""
        cut = {f.name: getattr(self, f.name) for f in fields(self)}
        return Inside(**{name: x if name == "strength" else x[:, tokens] for name, x in cut.items()})


def look_inside(mixer: QEDMixer, activations: Activations, tail: Tensor | None = None) -> tuple[Inside, Tensor]:
    """What the mixer makes of its projections, without the rounding of a 16-bit model, and the convolution's next tail.

    Args:
        mixer: whose parameters are read.
        activations: of the same call.
        tail: ``[B, W - 1, C]``, the inputs of the convolution before the first token; zeros when ``None``.
    """
    H, K, V = mixer.num_heads, mixer.key_dim, mixer.value_dim
    qkv, weight = activations.qkv.double(), mixer.conv_weight.double()
    if tail is None:
        tail = qkv.new_zeros(qkv.shape[0], weight.shape[1] - 1, qkv.shape[2])
    mixed = short_convolution(qkv, weight, state=tail, backend="torch")
    q, k, v = (x.unflatten(-1, (H, -1)) for x in mixed.split([H * K, H * K, H * V], -1))
    b, w = (x.unflatten(-1, (H, -1)).sigmoid() for x in activations.gates.double().split([H * K, H * V], -1))
    rate = mixer.A_log.double().clamp(max=A_LOG_MAX).exp().unsqueeze(-1)
    decay = activations.decay.double().unflatten(-1, (H, K))
    g = -rate * torch.nn.functional.softplus(decay + mixer.dt_bias.double())
    q, k = l2_normalize(q), l2_normalize(k)
    strength = mixer.strength().double()
    own = get_arm(mixer.config.arm)
    arm = own if own.direction != "none" else get_arm(COUNTERFACTUAL_ARM)
    u = q if arm.direction == "query" else mixer.random_direction.double().expand_as(q)  # type: ignore[union-attr]
    u = b * u if arm.gate else u
    along = (k * u).sum(-1, keepdim=True)
    d = u - k * along if arm.project else u
    base = b * k
    inside = Inside(
        q=q,
        k=k,
        v=w * v,
        a=base + strength.unsqueeze(-1) * d,
        g=g,
        b=b,
        w=w,
        d=d,
        base=base,
        strength=strength,
        projection_change=strength * (along * k.square()).sum(-1),
    )
    return inside, torch.cat([tail, qkv], 1)[:, -tail.shape[1] :]


class Read(NamedTuple):
    """``output`` ``[B, T, H, V]``, ``content`` ``Sbar^T x`` of a direction x ``[B, T, H, V]``, ``state`` at the end."""

    output: Tensor
    content: Tensor
    state: Tensor


def run(inside: Inside, state: Tensor, *, a: Tensor, direction: Tensor) -> Read:
    """The recurrence with the erase vector ``a``, and what ``direction`` finds in every decayed, unedited state.

    Every token becomes two steps of the operator: decay and read ``direction``, then edit and read ``q``.
    """
    zero_K, zero_V = torch.zeros_like(inside.k), torch.zeros_like(inside.v)
    q, k, v, a, g = (
        torch.stack(pair, 2).flatten(1, 2)
        for pair in (
            (direction, inside.q),
            (zero_K, inside.k),
            (zero_V, inside.v),
            (zero_K, a),
            (inside.g, zero_K),
        )
    )
    o, state = gated_delta_rule(q, k, v, a, g, initial_state=state, backend="chunked")
    return Read(o[:, 1::2], o[:, ::2], state)


class Effects(NamedTuple):
    """How much of the output ``o`` goes when the correction ``strength * d`` is removed: ``o`` less what is left, each
    ``[B, T, H, V]``, with this layer's inputs held fixed.

    ``this_step``: the token's own erase vector is ``base``, the state it meets is the layer's own. ``earlier_steps``:
    all tokens before it had ``base``, it keeps its own erase vector. ``all_steps``: both.
    """

    this_step: Tensor
    earlier_steps: Tensor
    all_steps: Tensor


def effects(inside: Inside, full: Read, without: Read) -> Effects:
    """From a run with ``a`` and one with ``base``, both reading ``d``: one step adds ``-strength rho Sbar^T d``."""
    scale = (inside.strength * inside.rho).unsqueeze(-1)
    left_early = without.output - scale * without.content
    return Effects(-scale * full.content, full.output - left_early, full.output - without.output)


def transition(inside: Inside, product: Tensor) -> Tensor:
    """``(M_T D_T) ... (M_1 D_1)`` times ``product`` ``[B, H, K, K]``: the recurrence that writes nothing."""
    nothing = torch.zeros_like(inside.k)
    return gated_delta_rule(nothing, inside.k, nothing, inside.a, inside.g, initial_state=product, backend="chunked")[1]


def transition_norm(k: Tensor, a: Tensor, g: Tensor) -> Tensor:
    """Largest singular value of ``(I - k a^T) Diag(exp g)`` for every token and head: ``[..., K]`` to ``[...]``.

    Its square is the largest eigenvalue of ``Diag(exp 2g)`` plus a symmetric matrix of rank two. How many eigenvalues
    lie above a number follows from the signs of a diagonal and of a 2 x 2 matrix (Haynsworth), so bisection finds it
    in O(K) a step, as exactly as an SVD.
    """
    decay = g.exp()
    c, dk, squares = decay * a, decay * k, decay.square()
    size = k.square().sum(-1)
    products = torch.stack([dk.square(), dk * c, c.square()], -2)
    low = torch.zeros_like(size)
    high = (decay.amax(-1) + size.sqrt() * c.norm(dim=-1)).square() * (1 + 1e-12)
    for _ in range(NUM_BISECTIONS):
        middle = (low + high) / 2
        gap = squares - middle.unsqueeze(-1)
        above = (gap > 0).sum(-1)
        gap = torch.where(gap == 0, -(torch.finfo(gap.dtype).tiny ** 0.25), gap)
        kk, kc, cc = (products / gap.unsqueeze(-2)).sum(-1).unbind(-1)
        first, cross, last = size - kk, 1 - kc, -cc
        determinant = first * last - cross.square()
        positive = torch.where(determinant < 0, 1, torch.where(first + last > 0, 2, 0))
        more = above + positive - 1 >= 1
        low, high = torch.where(more, middle, low), torch.where(more, high, middle)
    return ((low + high) / 2).sqrt()


def effective_rank(state: Tensor) -> Tensor:
    """``exp`` of the entropy of the squared singular values' shares, ``[..., K, V]`` to ``[...]``: from 1 to min(K, V).

    It counts directions by energy: n equal singular values give n. Of a zero state it is not a number.
    """
    squares = torch.linalg.svdvals(state).square()
    shares = squares / squares.sum(-1, keepdim=True)
    return torch.special.entr(shares).sum(-1).exp()
