"""Inputs and a runner shared by the operator's tests."""

import pytest
import torch
import torch.nn.functional as F

from qed.ops import erase_vector, gated_delta_rule

NAMES = ("q", "k", "v", "a", "g", "initial_state")
# Log-decays by channel: none, mild, and everything up to a state that is wiped.
EXTREMES = (0.0, -1e-3, -0.5, -5.0, -20.0, -100.0, -1e5, float("-inf"))


def decays(kind, shape, generator):
    if kind == "mild":
        return -torch.rand(shape, generator=generator, dtype=torch.float64)
    if kind == "by channel":
        return (
            torch.tensor(EXTREMES, dtype=torch.float64)[torch.arange(shape[-1]) % len(EXTREMES)].expand(shape).clone()
        )
    if kind == "mixed":
        return torch.tensor(EXTREMES, dtype=torch.float64)[torch.randint(len(EXTREMES), shape, generator=generator)]
    return torch.full(shape, float(kind), dtype=torch.float64)


@pytest.fixture(scope="session")
def make():
    """``make(B, T, H, K, V, decay=, gate=, strength=, documents=, dtype=, seed=)`` -> dict of the operator's inputs."""

    def make_inputs(
        B=1, T=7, H=2, K=5, V=3, *, decay="mild", gate=None, strength=0.2, documents=None, dtype=torch.float64, seed=0
    ):
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        q, k = F.normalize(normal(B, T, H, K), dim=-1), F.normalize(normal(B, T, H, K), dim=-1)
        b = normal(B, T, H, K).sigmoid() if gate is None else torch.full((B, T, H, K), float(gate), dtype=torch.float64)
        inputs = {
            "q": q, "k": k, "v": normal(B, T, H, V), "a": erase_vector(q, k, b, strength),
            "g": decays(decay, (B, T, H, K), generator), "initial_state": normal(documents or B, H, K, V),
        }  # fmt: skip
        return {name: x.to(dtype) for name, x in inputs.items()}

    return make_inputs


@pytest.fixture(scope="session")
def run():
    """Outputs, and gradients of all six inputs for random cotangents of both outputs, as a dict."""

    def run_operator(inputs, backend, cu_seqlens=None, function=None):
        leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
        o, state = (function or gated_delta_rule)(**leaves, cu_seqlens=cu_seqlens, backend=backend)
        generator = torch.Generator().manual_seed(1)
        cotangents = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in (o, state)]
        gradients = torch.autograd.grad((o, state), list(leaves.values()), cotangents)
        return {"o": o, "state": state} | {f"d{name}": x for name, x in zip(leaves, gradients, strict=True)}

    return run_operator


@pytest.fixture(scope="session")
def compare():
    """Every entry close to the expected one, relative to the largest value of that entry."""

    def compare_results(actual, expected, tolerance=1e-13):
        assert actual.keys() == expected.keys()
        for name, x in actual.items():
            y = expected[name]
            assert torch.isfinite(x).all(), name
            error = (x.double() - y.double()).abs().max()
            assert error <= tolerance * (1e-3 + y.double().abs().max()), f"{name}: error {error:.1e}"

    return compare_results
