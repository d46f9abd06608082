import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qed.ops import gated_norm, silu_product


def test_the_formulas():
    torch.manual_seed(0)
    x, gate, weight = torch.randn(2, 3, 5).double(), torch.randn(2, 3, 5).double(), torch.randn(5).double()
    norm = (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(gated_norm(x, gate, weight, 1e-6), x / norm * weight / (1 + (-gate).exp()))
    torch.testing.assert_close(silu_product(gate, x), gate / (1 + (-gate).exp()) * x)


def test_gradients_take_pytorchs_steps():
    x, gate = (torch.randn(4, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight = torch.randn(6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *inputs: gated_norm(*inputs, 1e-6), (x, gate, weight))
    assert torch.autograd.gradcheck(silu_product, (x, gate))


def test_kernels_match_float64_under_the_interpreter():
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    script = Path(__file__).with_name("interpreted_inputs.py")
    done = subprocess.run([sys.executable, script, "gates"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = json.loads(done.stdout)
    assert len(rows) == 3
    for row in rows:
        for name, error in row["errors"].items():
            assert error < 1e-6, (row["shape"], name, error)


def test_unequal_shapes_are_named():
    with pytest.raises(ValueError, match=r"one shape; got \[2, 3\] and \[2, 4\]"):
        silu_product(torch.ones(2, 3), torch.ones(2, 4))
    with pytest.raises(ValueError, match="one shape"):
        gated_norm(torch.ones(2, 3), torch.ones(3), torch.ones(3), 1e-6)
