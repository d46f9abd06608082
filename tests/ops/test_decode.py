import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qed.ops import ARMS, decode_inputs_step_, decode_step_, recurrence_inputs
from qed.ops.reference import recurrence

B, T, H, K, V = 2, 5, 2, 8, 12


def make(seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    inputs = {
        "q": normal(B, T, H, K), "k": normal(B, T, H, K), "v": normal(B, T, H, V), "decay": normal(B, T, H, K),
        "erase": normal(B, T, H, K), "write": normal(B, T, H, V),
        "A_log": normal(H), "dt_bias": normal(H, K), "strength": 0.25 * normal(H),
    }  # fmt: skip
    return inputs, torch.nn.functional.normalize(normal(H, K), dim=-1), normal(B, H, K, V)


def token(inputs, t):
    return {name: x[:, t : t + 1] if x.ndim == 4 else x for name, x in inputs.items()}


@pytest.mark.parametrize("arm", ARMS)
def test_steps_in_place_equal_the_whole_sequence(arm):
    inputs, z, state = make()
    parts = recurrence_inputs(*inputs.values(), arm=arm, random_direction=z)
    o, final = recurrence(*parts, state)
    core, fused = state.clone(), state.clone()
    o_core = torch.cat([decode_step_(*(x[:, t : t + 1] for x in parts), core) for t in range(T)], 1)
    o_fused = torch.cat(
        [decode_inputs_step_(*token(inputs, t).values(), fused, arm=arm, random_direction=z) for t in range(T)], 1
    )
    for got, want in ((o_core, o), (o_fused, o), (core, final), (fused, final)):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


def test_the_state_keeps_its_dtype_and_arithmetic_stays_wide():
    inputs, _, state = make()
    exact = state.bfloat16().double()
    o_exact = decode_inputs_step_(*token(inputs, 0).values(), exact)
    narrow = state.bfloat16()
    o = decode_inputs_step_(*(x.float() for x in token(inputs, 0).values()), narrow)
    assert narrow.dtype == torch.bfloat16
    # the output saw the state before it was rounded; the state was rounded once
    torch.testing.assert_close(o.double(), o_exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(narrow.double(), exact, rtol=2**-8, atol=1e-6)


def test_kernels_match_float64_under_the_interpreter():
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    script = Path(__file__).with_name("interpreted_inputs.py")
    done = subprocess.run([sys.executable, script, "decode"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    for row in json.loads(done.stdout):
        for name, error in row["errors"].items():
            assert error < 1e-6, (row["shape"], row["arm"], name, error)


def test_wrong_arguments_are_named():
    inputs, _, state = make()
    one = token(inputs, 0)
    parts = recurrence_inputs(*one.values())
    with pytest.raises(ValueError, match=r"a step takes q \[B, 1, H, K\]"):
        decode_inputs_step_(*inputs.values(), state)
    with pytest.raises(ValueError, match=r"state must be \[B, H, K, V\] = \[2, 2, 8, 12\], contiguous"):
        decode_step_(*parts, state.transpose(-1, -2))
    with pytest.raises(ValueError, match="contiguous"):
        decode_step_(*parts, state.transpose(-1, -2).contiguous().transpose(-1, -2))
    with pytest.raises(ValueError, match="no gradient"):
        decode_step_(*parts, state.requires_grad_())
    with torch.no_grad():
        decode_step_(*parts, state)
