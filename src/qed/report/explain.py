"""One token's edit in two dimensions, step by step: what GDN-2 writes, what QED erases besides, and what that does."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qed.records import write_text

Vector = NDArray[np.float64]

WORKED = {"k": (1.0, 0.0), "q": (0.6, 0.8), "b": (0.5, 0.5), "state": (2.0, 3.0), "value": 1.0, "strength": 0.2}
NON_NORMAL = {"k": (1.0, 0.0), "q": (0.0, 1.0), "b": (0.5, 0.5), "strength": 0.2}


@dataclass(frozen=True)
class Edit:
    """One token from one incoming state (K = 2, V = 1), by GDN-2 and by QED."""

    k: Vector
    q: Vector
    b: Vector
    state: Vector
    value: float
    strength: float
    rho: float
    u: Vector
    d: Vector
    content: float
    a_gdn2: Vector
    a_qed: Vector
    residual_gdn2: float
    residual_qed: float
    state_gdn2: Vector
    state_qed: Vector
    output_gdn2: float
    output_qed: float


@dataclass(frozen=True)
class Transition:
    """``M = I - k a^T``, what an edit does to a state whatever is written: its spectrum and its norm."""

    k: Vector
    a: Vector
    matrix: NDArray[np.float64]
    eigenvalues: Vector
    norm: float
    probe: Vector
    image: Vector


def edit(
    k: Sequence[float], q: Sequence[float], b: Sequence[float], state: Sequence[float], value: float, strength: float
) -> Edit:
    """Run one token through both recurrences; ``state`` is the state after decay, ``value`` is ``w * v``.

    Raises:
        ValueError: a vector that is not two numbers, a zero key or query, a gate outside [0, 1], a number that is not
            finite.
    """
    k_, q_ = _unit("k", k), _unit("q", q)
    b_, s = _vector("b", b), _vector("state", state)
    if (b_ < 0).any() or (b_ > 1).any():
        raise ValueError(f"b holds gates between 0 and 1; got {tuple(b)}")
    if not (np.isfinite(value) and np.isfinite(strength)):
        raise ValueError(f"value and strength must be finite numbers; got {value} and {strength}")
    u = b_ * q_
    d = u - k_ * (k_ @ u)
    a_gdn2 = b_ * k_
    a_qed = a_gdn2 + strength * d
    residual_gdn2, residual_qed = float(value - s @ a_gdn2), float(value - s @ a_qed)
    state_gdn2, state_qed = s + k_ * residual_gdn2, s + k_ * residual_qed
    return Edit(
        k=k_,
        q=q_,
        b=b_,
        state=s,
        value=float(value),
        strength=float(strength),
        rho=float(q_ @ k_),
        u=u,
        d=d,
        content=float(s @ d),
        a_gdn2=a_gdn2,
        a_qed=a_qed,
        residual_gdn2=residual_gdn2,
        residual_qed=residual_qed,
        state_gdn2=state_gdn2,
        state_qed=state_qed,
        output_gdn2=float(state_gdn2 @ q_),
        output_qed=float(state_qed @ q_),
    )


def transition(k: Sequence[float], q: Sequence[float], b: Sequence[float], strength: float) -> Transition:
    """QED's ``M = I - k a^T`` for one token, probed along the direction perpendicular to the key."""
    k_, q_, b_ = _unit("k", k), _unit("q", q), _vector("b", b)
    u = b_ * q_
    a = b_ * k_ + strength * (u - k_ * (k_ @ u))
    matrix = np.eye(2) - np.outer(k_, a)
    probe = np.array([-k_[1], k_[0]])
    # M k = (1 - a.k) k, and every vector orthogonal to a stays where it is: no numerical eigenvalues needed.
    eigenvalues = np.array([1 - a @ k_, 1.0])
    return Transition(k_, a, matrix, eigenvalues, float(np.linalg.norm(matrix, 2)), probe, matrix @ probe)


def explain(
    *,
    k: Sequence[float] | None = None,
    q: Sequence[float] | None = None,
    b: Sequence[float] | None = None,
    state: Sequence[float] | None = None,
    value: float | None = None,
    strength: float | None = None,
    figure: Path | str | None = None,
) -> str:
    """The two examples as text; numbers not given are those of the worked example.

    With numbers of the reader's own, the second part speaks of the same token. ``figure`` names a .svg or .png file.

    Raises:
        ValueError: a wrong number (see ``edit``) or a figure whose name ends in neither .svg nor .png.
    """
    given = {"k": k, "q": q, "b": b, "state": state, "value": value, "strength": strength}
    own = {name: number for name, number in given.items() if number is not None}
    numbers: dict[str, Any] = {**WORKED, **own}
    one = edit(**numbers)
    shape = {name: numbers[name] for name in NON_NORMAL} if own else NON_NORMAL
    two = transition(**shape)
    if figure is not None:
        draw_example(one, two, Path(figure))
    scaled = [name for name in ("k", "q") if abs(float(np.linalg.norm(numbers[name])) - 1) > 1e-9]
    note = f"  ({' and '.join(scaled)} scaled to length 1)\n" if scaled else ""
    return note + _edit_text(one) + "\n" + _transition_text(two)


def draw_example(one: Edit, two: Transition, path: Path) -> None:
    """Three panels: the directions, the state's move, and what ``M`` does to the unit circle."""
    if path.suffix not in (".svg", ".png"):
        raise ValueError(f"a figure's name must end in .svg or .png; got {path.name!r}")
    import matplotlib
    from matplotlib.figure import Figure

    from .draw import PAGE_COLOURS, STYLE, colour

    grey, blue, ink, muted = colour("gdn2"), colour("qed"), PAGE_COLOURS["ink"][0], PAGE_COLOURS["muted"][0]
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": "explain"}):
        canvas = Figure(figsize=(11, 4.2), layout="constrained")
        left, middle, right = canvas.subplots(1, 3)
        origin = np.zeros(2)
        _arrows(
            left,
            [
                (origin, one.k, ink, "key k"),
                (origin, one.q, colour("qed-rand"), "query q"),
                (origin, one.a_gdn2, grey, "b*k, erased by GDN-2"),
                (origin, one.d, colour("qed-nogate"), "d, gated query off the key"),
                (origin, one.a_qed, blue, "a = b*k + λd, erased by QED"),
            ],
        )
        left.set_title("directions", fontsize=10)
        _arrows(
            middle,
            [
                (origin, one.state, ink, f"state after decay {_vec(one.state)}"),
                (one.state, one.state_gdn2, grey, f"GDN-2's edit, to {_vec(one.state_gdn2)}"),
                (one.state, one.state_qed, blue, f"QED's edit, to {_vec(one.state_qed)}"),
            ],
        )
        middle.set_title("state: every edit runs along the key", fontsize=10)
        angle = np.linspace(0, 2 * np.pi, 200)
        circle = np.stack([np.cos(angle), np.sin(angle)])
        right.plot(*circle, color=muted, linewidth=1, label="unit circle")
        right.plot(*(two.matrix @ circle), color=blue, linewidth=1.4, label="its image under M")
        _arrows(
            right,
            [
                (origin, two.probe, muted, f"x = {_vec(two.probe)}, length 1"),
                (origin, two.image, blue, f"Mx, length {_num(float(np.linalg.norm(two.image)))}"),
            ],
            outline=[*circle.T, *(two.matrix @ circle).T],
        )
        right.set_title(f"spectrum {_set(two.eigenvalues)}, norm {_num(two.norm)}", fontsize=10)
        if path.suffix == ".svg":
            text = io.StringIO()
            canvas.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
            write_text(path, text.getvalue())
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            canvas.savefig(path, format="png", dpi=160)


def _edit_text(one: Edit) -> str:
    change = one.state_qed - one.state_gdn2
    lines = [
        "One token's edit, K = 2, V = 1",
        "",
        f"  key k = {_vec(one.k)}   query q = {_vec(one.q)}   gate b = {_vec(one.b)}",
        f"  state after decay S = {_vec(one.state)}   value w*v = {_num(one.value)}   strength λ = "
        f"{_num(one.strength)}",
        "",
        "GDN-2 measures along the gated key and corrects along the key",
        f"  a = b*k                     = {_vec(one.a_gdn2)}",
        f"  residual r = w*v - S·a      = {_num(one.value)} - {_num(one.value - one.residual_gdn2)} = "
        f"{_num(one.residual_gdn2)}",
        f"  state  S + k r              : {_vec(one.state)} → {_vec(one.state_gdn2)}",
        f"  output q·S                  = {_num(one.output_gdn2)}",
        "",
        "QED measures along a second direction too: the gated query without its part along the key",
        f"  u = b*q                     = {_vec(one.u)}",
        f"  d = u - k (k·u)             = {_vec(one.d)}          d·k = {_num(float(one.d @ one.k))}",
        f"  content found, S·d          = {_num(one.content)}",
        f"  a = b*k + λd                = {_vec(one.a_qed)}",
        f"  residual r = w*v - S·a      = {_num(one.residual_gdn2)} - λ S·d = {_num(one.residual_qed)}",
        f"  state  S + k r              : {_vec(one.state)} → {_vec(one.state_qed)}",
        f"  output q·S                  = {_num(one.output_qed)}",
        "",
        "What QED changed",
        f"  state   -λ k (S·d)          = {_vec(change)}",
        f"  output  -λ ρ (S·d), ρ = q·k = {_num(one.rho)} : {_num(one.output_gdn2)} → {_num(one.output_qed)}, "
        f"{_num(one.output_qed - one.output_gdn2)}",
    ]
    if abs(one.rho) < 1e-12:
        lines.append("  ρ = 0: this step's output stays; the state changes all the same, for later queries to read.")
    return "\n".join(lines) + "\n"


def _transition_text(two: Transition) -> str:
    (m00, m01), (m10, m11) = two.matrix
    length = float(np.linalg.norm(two.image))
    grows = "longer than x although no eigenvalue exceeds 1" if length > 1 + 1e-12 else "no longer than x"
    return (
        "Spectrum is not norm\n\n"
        f"  a = {_vec(two.a)}   M = I - k aᵀ = [[{_num(m00)}, {_num(m01)}], [{_num(m10)}, {_num(m11)}]]\n"
        f"  eigenvalues {_set(two.eigenvalues)}, whatever λ and q are: d·k = 0 keeps them GDN-2's\n"
        f"  x = {_vec(two.probe)} → Mx = {_vec(two.image)}, length √{_num(length**2)} = {_num(length)}: {grows}\n"
        f"  largest stretch of any x    = {_num(two.norm)}\n"
        "  The full transition is M after decay; neither stability nor growth follows from the eigenvalues alone.\n"
    )


def _arrows(axes: Any, arrows: list[tuple[Vector, Vector, str, str]], outline: Sequence[Vector] = ()) -> None:
    for start, end, shade, label in arrows:
        if np.allclose(start, end):
            axes.plot(*start, "o", color=shade, markersize=5, label=f"{label} (no move)")
            continue
        style = {"arrowstyle": "-|>", "color": shade, "linewidth": 1.8, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", end, start, arrowprops=style)
        axes.plot([], [], color=shade, linewidth=1.8, label=label)
    points = np.array([point for start, end, *_ in arrows for point in (start, end)] + list(outline))
    low, high = points.min(axis=0), points.max(axis=0)
    centre, reach = (low + high) / 2, 0.6 * max(*(high - low), 0.1)
    axes.set_xlim(centre[0] - reach, centre[0] + reach)
    axes.set_ylim(centre[1] - reach, centre[1] + reach)
    axes.set_aspect("equal")
    axes.axhline(0, color="#d9dce0", linewidth=0.8, zorder=0)
    axes.axvline(0, color="#d9dce0", linewidth=0.8, zorder=0)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), frameon=False, fontsize=8.5)


def _vector(name: str, values: Sequence[float]) -> Vector:
    vector = np.asarray(values, dtype=np.float64)
    if vector.shape != (2,) or not np.isfinite(vector).all():
        raise ValueError(f"{name} must be two finite numbers; got {values}")
    return vector


def _unit(name: str, values: Sequence[float]) -> Vector:
    vector = _vector(name, values)
    length = float(np.linalg.norm(vector))
    if length == 0:
        raise ValueError(f"{name} must have a direction; got {values}")
    return vector if abs(length - 1) < 1e-12 else vector / length


def _num(value: float) -> str:
    value = round(float(value), 12)
    return f"{value:.6g}" if value else "0"


def _vec(values: Vector) -> str:
    return f"({', '.join(_num(value) for value in values)})"


def _set(values: Vector) -> str:
    return f"{{{', '.join(_num(value) for value in sorted(values))}}}"
