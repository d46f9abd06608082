"""What is timed: shapes, the tensors every peer gets, and the bytes and operations the work cannot avoid."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qed.ops import erase_vector, recurrence_inputs

CHUNK = 64


@dataclass(frozen=True)
class Shape:
    """``batch`` sequences of ``length`` tokens, ``heads`` heads, key width ``K`` and value width ``V``."""

    batch: int
    length: int
    heads: int = 6
    K: int = 128
    V: int = 128

    @property
    def token_heads(self) -> int:
        return self.batch * self.length * self.heads

    def __str__(self) -> str:
        return f"B{self.batch} T{self.length} H{self.heads} K{self.K} V{self.V}"


def dtype_on(device: str) -> torch.dtype:
    """The dtype that models run in there."""
    return torch.bfloat16 if device.startswith("cuda") else torch.float32


def make_tensors(shape: Shape, device: str, seed: int = 0) -> dict[str, Tensor]:
    """Raw projections and their float32 parameters, then the same prepared: unit keys, gates, decay, ``a``.

    Streams are bf16, on a CPU float32. Decay is drawn as a new model draws it: A uniform in [1, 16], dt log-uniform
    in [0.001, 0.1].
    """
    dtype = dtype_on(device)
    generator = torch.Generator(device).manual_seed(seed)
    B, T, H, K, V = shape.batch, shape.length, shape.heads, shape.K, shape.V

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device, dtype=torch.float32)

    def uniform(low: float, high: float, *size: int) -> Tensor:
        return low + (high - low) * torch.rand(*size, generator=generator, device=device, dtype=torch.float32)

    x = {
        "raw_q": normal(B, T, H, K), "raw_k": normal(B, T, H, K), "v": normal(B, T, H, V),
        "decay": normal(B, T, H, K), "erase": normal(B, T, H, K), "write": normal(B, T, H, V),
    }  # fmt: skip
    x = {name: y.to(dtype) for name, y in x.items()}
    dt = uniform(-6.9078, -2.3026, H, K).exp()
    x["A_log"] = uniform(1, 16, H).log()
    x["dt_bias"] = dt + (-torch.expm1(-dt)).log()
    x["strength"] = uniform(0, 0.25, H)
    with torch.no_grad():
        raw = [x[name] for name in PROJECTIONS]
        x["q"], x["k"], x["gated_v"], x["a"], x["g"] = recurrence_inputs(*raw, backend="torch")
        x["b"], x["w"] = (x[name].float().sigmoid().to(dtype) for name in ("erase", "write"))
        x["beta"] = normal(B, T, H).sigmoid().to(dtype)
        x["alpha"] = -(x["g"].exp() * x["a"].float()).to(dtype)
    return x


PROJECTIONS = ("raw_q", "raw_k", "v", "decay", "erase", "write", "A_log", "dt_bias", "strength")
PARAMETERS = ("A_log", "dt_bias", "strength")
# The leaves a system is a function of, by name, and their (q, k, v, a, g): the definition its peers are held to.
LEAVES = {
    "qed": PROJECTIONS,
    "gdn2": PROJECTIONS[:-1],
    "gdn2-prepared": ("q", "k", "v", "g", "b", "w"),
    "kda-prepared": ("q", "k", "v", "g", "beta"),
    "core": ("q", "k", "gated_v", "a", "g"),
    "dplr": ("q", "k", "gated_v", "alpha", "g"),
}


def definition(system: str, x: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``(q, k, v, a, g)`` of a system in plain PyTorch, in the leaves' own dtype."""
    if system in ("qed", "gdn2"):
        raw = [x[name] for name in LEAVES["gdn2"]]
        strength = x["strength"] if system == "qed" else torch.zeros_like(x["A_log"])
        return recurrence_inputs(*raw, strength, arm=system, backend="torch")  # type: ignore[misc, arg-type]
    if system == "gdn2-prepared":
        return x["q"], x["k"], x["w"] * x["v"], erase_vector(x["q"], x["k"], x["b"], 0.0, arm="gdn2"), x["g"]
    if system == "kda-prepared":
        beta = x["beta"].unsqueeze(-1)
        return x["q"], x["k"], beta * x["v"], beta * x["k"], x["g"]
    a = x["a"] if system == "core" else -x["alpha"] * (-x["g"]).exp()
    return x["q"], x["k"], x["gated_v"], a, x["g"]


def forward_flops(shape: Shape) -> int:
    """Chunkwise, chunk 64: scores 4CK, products with values 4CV, three products with the state 6KV, inverse 2CC."""
    return shape.token_heads * (4 * CHUNK * (shape.K + shape.V) + 6 * shape.K * shape.V + 2 * CHUNK**2)


def forward_bytes(shape: Shape, system: str, element: int = 2) -> int:
    """Each input read once and ``o`` written once; ``element`` bytes each, ``g`` float32 where it is an input."""
    K, V = shape.K, shape.V
    narrow, wide = {
        "qed": (4 * K + 3 * V, 0),
        "gdn2": (4 * K + 3 * V, 0),
        "gdn2-prepared": (3 * K + 3 * V, K),
        "kda-prepared": (2 * K + 2 * V + 1, K),
        "core": (3 * K + 2 * V, K),
        "dplr": (3 * K + 2 * V, K),
    }[system]
    return shape.token_heads * (element * narrow + 4 * wide)


def backward_bytes(shape: Shape, system: str, element: int = 2) -> int:
    """The inputs read again, the output's gradient read, one gradient written for each input."""
    outputs = shape.token_heads * element * shape.V
    return 2 * (forward_bytes(shape, system, element) - outputs) + outputs


def decode_bytes(shape: Shape, state_bytes: int = 4) -> int:
    """The state read and written once; the vectors beside it read, ``o`` written (16-bit)."""
    return shape.token_heads * (2 * state_bytes * shape.K * shape.V + 8 * shape.K + 6 * shape.V)
