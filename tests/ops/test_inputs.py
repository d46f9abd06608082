import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from qed.ops import ARMS, l2_normalize, recurrence_inputs
from qed.ops.inputs import NORM_EPS
from qed.ops.reference import recurrence


def make(B=1, T=2, H=2, K=3, V=2, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    inputs = {
        "q": normal(B, T, H, K), "k": normal(B, T, H, K), "v": normal(B, T, H, V), "decay": normal(B, T, H, K),
        "erase": normal(B, T, H, K), "write": normal(B, T, H, V),
        "A_log": normal(H), "dt_bias": normal(H, K), "strength": 0.25 * normal(H),
    }  # fmt: skip
    return inputs, F.normalize(normal(H, K), dim=-1)


def interpreted(*parts):
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    script = Path(__file__).with_name("interpreted_inputs.py")
    done = subprocess.run([sys.executable, script, *parts], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("arm", ARMS)
def test_the_formula_token_by_token(arm):
    inputs, z = make()
    q, k, v, a, g = recurrence_inputs(*inputs.values(), arm=arm, random_direction=z)
    for t in range(2):
        for h in range(2):
            at = {name: x[0, t, h] for name, x in inputs.items() if x.ndim == 4}
            q_t, k_t = (at[n] / (at[n].dot(at[n]) + NORM_EPS).sqrt() for n in "qk")
            b = 1 / (1 + (-at["erase"]).exp())
            direction = {"none": 0 * q_t, "query": q_t, "random": z[h]}[ARMS[arm].direction]
            direction = b * direction if ARMS[arm].gate else direction
            direction = direction - k_t * k_t.dot(direction) if ARMS[arm].project else direction
            decay = -inputs["A_log"][h].exp() * (1 + (at["decay"] + inputs["dt_bias"][h]).exp()).log()
            wanted = (
                q_t,
                k_t,
                at["v"] / (1 + (-at["write"]).exp()),
                b * k_t + inputs["strength"][h] * direction,
                decay,
            )
            for got, want in zip((q, k, v, a, g), wanted, strict=True):
                torch.testing.assert_close(got[0, t, h], want, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("arm", ARMS)
def test_gradients_of_every_stream_and_parameter(arm):
    inputs, z = make()
    leaves = [x.requires_grad_() for x in inputs.values()]
    assert torch.autograd.gradcheck(lambda *x: recurrence_inputs(*x, arm=arm, random_direction=z), leaves)


def test_the_random_direction_is_a_constant():
    inputs, z = make()
    leaves = [x.requires_grad_() for x in inputs.values()]
    z.requires_grad_()
    sum(x.sum() for x in recurrence_inputs(*leaves, arm="qed-rand", random_direction=z)).backward()
    assert z.grad is None
    assert inputs["strength"].grad.abs().min() > 0


def test_fused_kernels_match_float64_under_the_interpreter():
    for row in interpreted("inputs", "registration"):
        for name, error in row.get("errors", {}).items():
            # a few float32 ulps; dA_log and dstrength are sums that may cancel
            limit = 2e-5 if name in ("dA_log", "ddt_bias", "dstrength") else 1e-6
            assert error < limit, (row["shape"], row["arm"], name, error)


@pytest.mark.parametrize("scale", [1e-3, 1e-4])
def test_epsilon_is_added_to_the_sum_of_squares(scale):
    inputs, _ = make(K=128)
    inputs["q"], inputs["k"] = scale * inputs["q"], scale * inputs["k"]
    wide = recurrence_inputs(*inputs.values())
    narrow = recurrence_inputs(*(x.float() for x in inputs.values()))
    for x, exact, got in zip((inputs["q"], inputs["k"]), wide, narrow, strict=False):
        torch.testing.assert_close(exact, x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt(), rtol=1e-12, atol=0)
        torch.testing.assert_close(l2_normalize(x), exact, rtol=1e-12, atol=0)
        torch.testing.assert_close(got.double(), exact, rtol=1e-6, atol=1e-7)


def test_zero_rows_stay_zero_with_bounded_gradients():
    inputs, _ = make(T=6, K=16)
    for name in ("q", "k"):
        inputs[name][:, 2:5] = 0
    leaves = {name: x.float().requires_grad_() for name, x in inputs.items()}
    outputs = recurrence_inputs(*leaves.values())
    o, _ = recurrence(*outputs, torch.ones(1, 2, 16, 2))
    o.square().sum().backward()
    assert not outputs[0][:, 2:5].any()
    assert not outputs[1][:, 2:5].any()
    assert all(x.grad.isfinite().all() for x in leaves.values())
    # the derivative of x / sqrt(x.x + eps) at zero is eps^-1/2, the largest it can be
    cotangent = torch.ones(1, 6, 2, 16)
    (slope,) = torch.autograd.grad(l2_normalize(leaves["q"]), leaves["q"], cotangent)
    torch.testing.assert_close(slope[:, 2:5], cotangent[:, 2:5] * NORM_EPS**-0.5)


@pytest.mark.parametrize("A_log", [20.0, 60.0, 100.0])
@pytest.mark.parametrize("preactivation", [-50.0, 50.0])
def test_saturated_gates_leave_finite_gradients(A_log, preactivation):
    inputs, _ = make(T=4, K=4, dtype=torch.float32)
    inputs["A_log"] = torch.full((2,), A_log)
    for name in ("decay", "erase", "write"):
        inputs[name] = torch.full_like(inputs[name], preactivation)
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    outputs = recurrence_inputs(*leaves.values())
    assert not any(x.isnan().any() for x in outputs)
    o, state = recurrence(*outputs, torch.ones(1, 2, 4, 2))
    (o.square().sum() + state.square().sum()).backward()
    for name, x in leaves.items():
        assert x.grad.isfinite().all(), name
    if preactivation > 0:
        assert not leaves["decay"].grad.any()
        assert not leaves["A_log"].grad.any()


@pytest.mark.parametrize("A", [16.0, 1.07])
def test_decay_is_exponentiated_in_float32_when_everything_else_is_bfloat16(A):
    inputs, _ = make(T=16, K=32)
    inputs["A_log"] = torch.full((2,), math.log(A))
    rounded = {name: x.bfloat16() for name, x in inputs.items()}
    *_, g = recurrence_inputs(*rounded.values())
    *_, exact = recurrence_inputs(*(x.double() for x in rounded.values()))
    assert g.dtype == torch.float32
    torch.testing.assert_close(g.double(), exact, rtol=1e-6, atol=0)


def test_dtypes_follow_q_and_g_stays_wide():
    inputs, _ = make()
    for dtype, wide in (
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        *narrow, g = recurrence_inputs(*(x.to(dtype) for x in inputs.values()))
        assert [x.dtype for x in narrow] == [dtype] * 4
        assert g.dtype == wide


def test_wrong_arguments_are_named():
    inputs, z = make()
    with pytest.raises(ValueError, match=r"write must be \[1, 2, 2, 2\]"):
        recurrence_inputs(**{**inputs, "write": inputs["erase"]})
    with pytest.raises(ValueError, match=r"dt_bias must be \[2, 3\].*got \[6\]"):
        recurrence_inputs(**{**inputs, "dt_bias": inputs["dt_bias"].flatten()})
    with pytest.raises(ValueError, match="did you mean 'triton'"):
        recurrence_inputs(**inputs, backend="tritn")
    with pytest.raises(ValueError, match="float64: q, k"):
        recurrence_inputs(**inputs, backend="triton")
    with pytest.raises(ValueError, match=r"needs random_direction \[H, K\] = \[2, 3\]; got None"):
        recurrence_inputs(**inputs, arm="qed-rand")
    with pytest.raises(ValueError, match=r"got \[3, 2\]"):
        recurrence_inputs(**inputs, arm="qed-rand", random_direction=z.T)
