"""Decoding steps on a GPU: against float64, in place, and under a CUDA graph and the compiler."""

import pytest
import torch

from qed.ops import ARMS, decode_inputs_step_, decode_step_, recurrence_inputs
from qed.ops.fused import decode_in_place_op, decode_inputs_in_place_op, decode_op
from qed.ops.reference import recurrence

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def make(B, H, K, V, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device="cuda")

    inputs = {
        "q": normal(B, 1, H, K), "k": normal(B, 1, H, K), "v": normal(B, 1, H, V), "decay": normal(B, 1, H, K),
        "erase": normal(B, 1, H, K), "write": normal(B, 1, H, V),
    }  # fmt: skip
    inputs = {name: x.to(dtype) for name, x in inputs.items()}
    inputs |= {"A_log": normal(H), "dt_bias": normal(H, K), "strength": 0.25 * normal(H)}
    return inputs, torch.nn.functional.normalize(normal(H, K), dim=-1), normal(B, H, K, V)


def exact_step(inputs, z, state, arm):
    wide = [x.double() for x in inputs.values()]
    return recurrence(*recurrence_inputs(*wide, arm=arm, random_direction=z.double()), state.double())


def error(exact, got):
    return ((exact - got.double()).norm() / exact.norm()).item()


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize(
    "shape", [(1, 6, 128, 128), (3, 2, 100, 40), (2, 1, 256, 256), (4096, 2, 16, 16), (200, 6, 128, 64)]
)
def test_steps_match_float64(shape, arm):
    inputs, z, state = make(*shape)
    o, new = exact_step(inputs, z, state, arm)
    fused = state.clone()
    o_fused = decode_inputs_step_(*inputs.values(), fused, arm=arm, random_direction=z)
    assert error(new, fused) < 1e-6
    assert error(o, o_fused) < 2.5e-3
    wide = {name: x.float() for name, x in inputs.items()}
    parts = recurrence_inputs(*wide.values(), arm=arm, random_direction=z)
    core = state.clone()
    o_core = decode_step_(*parts, core)
    assert error(new, core) < 1e-6
    assert error(o, o_core) < 1e-6
    o_functional, functional = decode_op(*parts, state)
    assert torch.equal(o_functional, o_core)
    assert torch.equal(functional, core)


def test_a_bfloat16_state_is_rounded_once_a_token():
    inputs, z, state = make(2, 3, 128, 128)
    narrow = state.bfloat16()
    o, new = exact_step(inputs, z, narrow, "qed")
    o_narrow = decode_inputs_step_(*inputs.values(), narrow)
    assert error(new, narrow) < 2.5e-3
    assert error(o, o_narrow) < 2.5e-3


def test_a_thousand_steps_stay_near_float64():
    inputs, z, state = make(1, 2, 64, 64)
    exact, kept, narrow = state.double(), state.clone(), state.bfloat16()
    for step in range(1000):
        inputs, z, _ = make(1, 2, 64, 64, seed=step)
        inputs["A_log"] = torch.full((2,), -3.0, device="cuda")
        o, exact = exact_step(inputs, z, exact, "qed")
        o_kept = decode_inputs_step_(*inputs.values(), kept)
        decode_inputs_step_(*inputs.values(), narrow)
    assert error(exact, kept) < 1e-5
    assert error(o, o_kept) < 2.5e-3
    assert error(exact, narrow) < 5e-2


def test_views_and_minus_infinity():
    inputs, _, state = make(2, 4, 32, 32)
    joined = torch.cat([inputs[name].flatten(-2) for name in ("q", "k", "v")], -1)
    views = dict(zip("qkv", (x.unflatten(-1, (4, -1)) for x in joined.split(128, -1)), strict=True))
    one, two = state.clone(), state.clone()
    assert torch.equal(
        decode_inputs_step_(*inputs.values(), one), decode_inputs_step_(*{**inputs, **views}.values(), two)
    )
    assert torch.equal(one, two)
    q, k, v, a, g = recurrence_inputs(*(x.float() for x in inputs.values()))
    g = torch.full((1,), float("-inf"), device="cuda").expand_as(g)
    o = decode_step_(q, k, v, a, g, one)
    torch.testing.assert_close(one, k.squeeze(1).unsqueeze(-1) * v.squeeze(1).unsqueeze(-2))
    torch.testing.assert_close(o, (q * k).sum(-1, keepdim=True) * v)


def test_a_graph_replays_steps_and_the_compiler_keeps_both_outputs():
    inputs, _, state = make(2, 4, 32, 32)
    start = state.clone()
    decode_inputs_step_(*inputs.values(), state)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    replayed = start.clone()
    with torch.cuda.graph(graph):
        o = decode_inputs_step_(*inputs.values(), replayed)
    replayed.copy_(start)
    wanted = start.clone()
    for _ in range(3):
        graph.replay()
        o_wanted = decode_inputs_step_(*inputs.values(), wanted)
        assert torch.equal(replayed, wanted)
        assert torch.equal(o, o_wanted)

    def two_steps(state):
        first = decode_inputs_step_(*inputs.values(), state)
        second = decode_inputs_step_(*inputs.values(), state)
        return first + second, first

    eager, compiled = start.clone(), start.clone()
    with torch.no_grad():
        expected, got = two_steps(eager), torch.compile(two_steps, fullgraph=True)(compiled)
    assert torch.equal(eager, compiled)
    assert all(torch.equal(x, y) for x, y in zip(expected, got, strict=True))


def test_registration():
    inputs, _, state = make(2, 2, 16, 16)
    parts = recurrence_inputs(*inputs.values())
    torch.library.opcheck(decode_op, (*parts, state))
    torch.library.opcheck(decode_in_place_op, (*parts, state.clone()))
    torch.library.opcheck(decode_inputs_in_place_op, (*inputs.values(), None, state.clone(), "query", True, True))
