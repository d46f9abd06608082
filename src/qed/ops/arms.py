"""Erase vectors: everything the paper compares is a choice of ``a``."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Direction = Literal["none", "query", "random"]


@dataclass(frozen=True)
class Arm:
    """Three independent switches behind ``a = b * k + strength * d``.

    ``direction``: what is added to the base term; ``gate``: multiply the direction by ``b`` first;
    ``project``: then remove its component along the key.
    """

    direction: Direction
    gate: bool = False
    project: bool = False


ARMS: dict[str, Arm] = {
    "gdn2": Arm("none"),
    "qed": Arm("query", gate=True, project=True),
    "qed-nogate": Arm("query", project=True),
    "qed-noproj": Arm("query", gate=True),
    "qed-nogate-noproj": Arm("query"),
    "qed-rand": Arm("random", gate=True, project=True),
}


def get_arm(name: str) -> Arm:
    """Look an arm up by name; a wrong name is a ``ValueError`` that names the nearest right one."""
    if name not in ARMS:
        raise ValueError(unknown("arm", name, ARMS))
    return ARMS[name]


def unknown(what: str, given: str, allowed: Iterable[str]) -> str:
    """The message for a wrong name; :mod:`qed.config` has its own, for ops imports nothing else of ours."""
    names = list(allowed)
    guess = difflib.get_close_matches(given, names, n=1, cutoff=0)[0]
    return f"unknown {what} {given!r}; did you mean {guess!r}? One of: {', '.join(names)}"


def erase_vector(
    q: Tensor,
    k: Tensor,
    b: Tensor,
    strength: Tensor | float,
    *,
    arm: str = "qed",
    random_direction: Tensor | None = None,
) -> Tensor:
    """Erase vector ``a = b * k + strength * P(b * q)`` and its ablations (paper section 2).

    ``P(x) = x - k (k . x)`` removes the component along the key, which must be a unit vector.

    Args:
        q, k: ``[..., H, K]``, L2-normalised over K.
        b: ``[..., H, K]`` channel-wise erase gate in (0, 1).
        strength: lambda, a number or one value a head ``[H]``; any sign.
        arm: a name in ``ARMS``.
        random_direction: ``[H, K]`` unit vectors; needed by arms whose direction is random, ignored by others.

    Returns:
        ``[..., H, K]`` in the dtype that the inputs promote to.

    Raises:
        ValueError: unknown arm, a shape that does not fit, or a missing ``random_direction``.
    """
    switches = get_arm(arm)
    if not q.shape == k.shape == b.shape:
        raise ValueError(
            f"q, k and b must share one shape [..., H, K]; got {list(q.shape)}, {list(k.shape)}, {list(b.shape)}"
        )
    base = b * k
    if switches.direction == "none":
        return base
    if isinstance(strength, Tensor) and strength.ndim:
        if strength.shape != q.shape[-2:-1]:
            raise ValueError(f"strength must be a number or [H] = [{q.shape[-2]}]; got {list(strength.shape)}")
        strength = strength.unsqueeze(-1)
    if switches.direction == "query":
        direction = q
    else:
        if random_direction is None or random_direction.shape != q.shape[-2:]:
            given = None if random_direction is None else list(random_direction.shape)
            raise ValueError(f"arm {arm!r} needs random_direction [H, K] = {list(q.shape[-2:])}; got {given}")
        direction = random_direction.expand_as(q)
    if switches.gate:
        direction = b * direction
    if switches.project:
        direction = direction - k * (k * direction).sum(-1, keepdim=True)
    return base + strength * direction
