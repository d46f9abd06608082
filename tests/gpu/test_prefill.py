"""From raw projections without gradients, on a GPU: against float64, against the pair of operators, to the bit."""

import pytest
import torch
import torch.nn.functional as F

from qed.ops import ARMS, gated_delta_rule, gated_delta_rule_from_projections, recurrence_inputs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
# Relative RMS error of o: bf16 and TF32 operands, three TF32 passes.
LIMITS = {torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 1.2e-2}


def make(B, T, H, K, V, dtype=torch.bfloat16, scale=1.0):
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device="cuda")

    streams = [normal(B, T, H, n) for n in (K, K, V, K, K, V)]
    streams[3] *= scale
    parameters = [normal(H), normal(H, K), 0.25 * normal(H).sigmoid()]
    return [x.to(dtype) for x in streams], parameters, F.normalize(normal(H, K), dim=-1)


def run(streams, parameters, z, arm="qed", state=None, cu=None):
    with torch.no_grad():
        return gated_delta_rule_from_projections(
            *streams, *parameters, arm=arm, random_direction=z, initial_state=state, cu_seqlens=cu
        )


@pytest.mark.parametrize("scale", [1.0, 60.0])
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("shape", [(2, 70, 3, 128, 128), (1, 33, 2, 100, 24), (1, 40, 2, 256, 256), (3, 2, 2, 16, 64)])
def test_outputs_match_float64(shape, arm, dtype, scale):
    streams, parameters, z = make(*shape, dtype, scale)
    state = torch.randn(shape[0], shape[2], shape[3], shape[4], device="cuda")
    got = run(streams, parameters, z, arm, state)
    wide = [x.double() for x in (*streams, *parameters)]
    inputs = recurrence_inputs(*wide, arm=arm, random_direction=z.double())
    want = gated_delta_rule(*inputs, initial_state=state.double(), backend="reference")
    for x, y in zip(want, got, strict=True):
        assert (x - y.double()).norm() < LIMITS[dtype] * x.norm()


@pytest.mark.parametrize("case", ["split", "packed", "packed and split"])
def test_split_and_packed_match_the_pair(case):
    T = 300 if case == "packed" else 8200
    streams, parameters, z = make(1, T, 2, 128, 128)
    cu = None if case == "split" else torch.tensor([0, 7, 23, 200, T], device="cuda", dtype=torch.int32)
    o, final = run(streams, parameters, z, cu=cu)
    inputs = recurrence_inputs(*(x.float() for x in (*streams, *parameters)), random_direction=z)
    want = gated_delta_rule(*inputs, cu_seqlens=cu)
    for x, y in zip(want, (o, final), strict=True):
        assert (x - y.float()).norm() < 1.2e-2 * x.norm()


def test_no_later_token_moves_an_earlier_bit_and_runs_repeat():
    streams, parameters, z = make(2, 200, 2, 128, 128)
    o, _ = run(streams, parameters, z)
    for t in (3, 100, 199):
        changed = [x.clone() for x in streams]
        for x in changed:
            x[:, t] = torch.randn_like(x[:, t])
        changed[3][:, t, :, 5] = 3e4
        assert torch.equal(run(changed, parameters, z)[0][:, :t], o[:, :t])
    assert all(torch.equal(run(streams, parameters, z)[0], o) for _ in range(20))


def test_views_equal_their_copies():
    streams, parameters, z = make(2, 40, 4, 64, 64)
    views = [x.unflatten(-1, (4, -1)) for x in torch.cat([x.flatten(-2) for x in streams], -1).split([256] * 6, -1)]
    for x, y in zip(run(streams, parameters, z), run(views, parameters, z), strict=True):
        assert torch.equal(x, y)


def test_compiles_without_a_graph_break():
    streams, parameters, z = make(2, 40, 2, 64, 64)
    o, final = torch.compile(run, fullgraph=True)(streams, parameters, z)
    want = run(streams, parameters, z)
    assert torch.equal(o, want[0])
    assert torch.equal(final, want[1])


def test_gradients_take_the_pair():
    streams, parameters, z = make(1, 40, 2, 64, 64)
    leaves = [x.requires_grad_() for x in (*streams, *parameters)]
    o, _ = gated_delta_rule_from_projections(*leaves, random_direction=z)
    o.sum().backward()
    assert all(x.grad is not None for x in leaves)
