"""The operator from projections on a GPU: the bits of the two operators it joins, and gradients against float64."""

import pytest
import torch
import torch.nn.functional as F

from qed.ops import ARMS, gated_delta_rule, projected_delta_rule, recurrence_inputs
from qed.ops.fused import projected_rule_op

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def make(B, T, H, K, V, dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device="cuda")

    inputs = {
        "q": normal(B, T, H, K), "k": normal(B, T, H, K), "v": normal(B, T, H, V), "decay": normal(B, T, H, K) - 3,
        "erase": normal(B, T, H, K), "write": normal(B, T, H, V),
    }  # fmt: skip
    inputs = {name: x.to(dtype) for name, x in inputs.items()}
    inputs |= {"A_log": normal(H), "dt_bias": normal(H, K), "strength": 0.25 * normal(H)}
    return inputs, F.normalize(normal(H, K), dim=-1), normal(B, T, H, V).to(dtype)


def two_operators(inputs, arm, z, **rest):
    return gated_delta_rule(*recurrence_inputs(*inputs.values(), arm=arm, random_direction=z), **rest)


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("shape", [(2, 130, 3, 128, 128), (1, 33, 2, 100, 24), (1, 2500, 1, 64, 64), (3, 1, 2, 16, 16)])
@pytest.mark.parametrize("strong", [False, True])
def test_outputs_have_the_bits_of_the_two_operators(shape, arm, strong):
    inputs, z, _ = make(*shape)
    if strong:
        # decay past float32's range within a chunk: the branch of the kernel that reads its inputs again
        inputs["decay"] = inputs["decay"] + 60
    o, state = projected_delta_rule(**inputs, arm=arm, random_direction=z)
    with torch.enable_grad():
        # a gradient wanted keeps the single token on the chunked kernels too
        inputs["A_log"].requires_grad_()
        o_two, state_two = two_operators(inputs, arm, z)
    assert torch.equal(o, o_two)
    assert torch.equal(state, state_two)


@pytest.mark.parametrize("arm", ["qed", "qed-rand", "gdn2"])
def test_gradients_have_the_bits_of_the_two_operators(arm):
    inputs, z, cotangent = make(2, 200, 2, 64, 48)
    leaves = [x.requires_grad_() for x in inputs.values()]
    got = torch.autograd.grad(projected_delta_rule(**inputs, arm=arm, random_direction=z)[0], leaves, cotangent)
    o, _ = two_operators(inputs, arm, z)
    want = torch.autograd.grad(o, leaves, cotangent, allow_unused=True)
    for name, x, y in zip(inputs, got, want, strict=True):
        assert torch.equal(x, torch.zeros_like(x) if y is None else y), name


def test_packed_views_and_states():
    inputs, z, cotangent = make(1, 300, 2, 64, 64)
    joined = torch.cat([inputs[name].flatten(-2) for name in "qkv"], -1)
    views = dict(zip("qkv", (x.unflatten(-1, (2, -1)) for x in joined.split(128, -1)), strict=True))
    offsets = torch.tensor([0, 7, 150, 300], device="cuda", dtype=torch.int32)
    start = torch.randn(3, 2, 64, 64, device="cuda")
    got = projected_delta_rule(**{**inputs, **views}, initial_state=start, cu_seqlens=offsets)
    want = two_operators(inputs, "qed", z, initial_state=start, cu_seqlens=offsets)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


def test_registration_and_one_graph():
    inputs, z, _ = make(1, 20, 2, 16, 16)
    state = torch.zeros(1, 2, 16, 16, device="cuda", requires_grad=True)
    leaves = [x.requires_grad_() for x in inputs.values()]
    torch.library.opcheck(projected_rule_op, (*leaves, z, state, None, "random", True, True))
    compiled = torch.compile(projected_delta_rule, fullgraph=True)
    for length in (20, 33):
        inputs, _, _ = make(1, length, 2, 16, 16)
        assert torch.equal(compiled(**inputs)[0], projected_delta_rule(**inputs)[0])
