import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from qed.ops import convolution, short_convolution


def make(B=2, T=9, C=3, width=4, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = [(B, T, C), (C, width), (B, width - 1, C)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.mark.parametrize("width", [1, 2, 4, 7])
def test_equals_a_padded_grouped_convolution(width):
    x, weight, state = make(width=width)
    for before in (None, state):
        full = torch.cat([torch.zeros_like(state) if before is None else state, x], 1)
        want = F.silu(F.conv1d(full.mT, weight.unsqueeze(1), groups=3)).mT
        torch.testing.assert_close(short_convolution(x, weight, state=before), want, rtol=1e-12, atol=1e-13)


def test_a_sequence_in_two_parts_and_token_by_token_repeats_the_bits():
    x, weight, _ = make(dtype=torch.bfloat16)
    whole = short_convolution(x, weight)
    padded = F.pad(x, (0, 0, 3, 0))
    steps = [short_convolution(x[:, t : t + 1], weight, state=padded[:, t : t + 3]) for t in range(9)]
    assert torch.equal(torch.cat(steps, 1), whole)
    assert torch.equal(short_convolution(x[:, 5:], weight, state=x[:, 2:5]), whole[:, 5:])


def test_packed_documents_do_not_see_each_other():
    x, weight, _ = make(B=1, T=12)
    lengths = (1, 2, 5, 4)
    packed = short_convolution(x, weight, positions=torch.cat([torch.arange(n) for n in lengths]))
    alone = torch.cat([short_convolution(part, weight) for part in x.split(lengths, 1)], 1)
    assert torch.equal(packed, alone)


@pytest.mark.parametrize("slab", [convolution.SLAB, 20])
def test_gradients(slab, monkeypatch):
    monkeypatch.setattr(convolution, "SLAB", slab)
    leaves = [x.requires_grad_() for x in make(B=3, T=5, C=2)]
    assert torch.autograd.gradcheck(lambda x, w, s: short_convolution(x, w, state=s), leaves)
    assert torch.autograd.gradcheck(short_convolution, leaves[:2])
    assert torch.autograd.gradcheck(lambda x, w: short_convolution(x[:, :2], w), leaves[:2])
    positions = torch.tensor([0, 1, 0, 1, 2])
    assert torch.autograd.gradcheck(lambda x, w: short_convolution(x, w, positions=positions), leaves[:2])


def test_a_second_derivative_is_refused():
    x, weight, _ = (y.requires_grad_() for y in make())
    (gradient,) = torch.autograd.grad(short_convolution(x, weight).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_kernels_match_float64_under_the_interpreter():
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    script = Path(__file__).with_name("interpreted_inputs.py")
    done = subprocess.run([sys.executable, script, "convolution"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    for row in json.loads(done.stdout):
        for name, error in row["errors"].items():
            assert error < 1e-6, (row["shape"], row["arm"], name, error)


def test_wrong_arguments_are_named():
    x, weight, state = make()
    with pytest.raises(ValueError, match=r"state must be \[B, W - 1, C\] = \[2, 3, 3\]; got \[2, 2, 3\]"):
        short_convolution(x, weight, state=state[:, 1:])
    with pytest.raises(ValueError, match="give one of them"):
        short_convolution(x, weight, state=state, positions=torch.arange(9))
    with pytest.raises(ValueError, match=r"\[B, T, C\] and \[C, W\]; got \[2, 9, 3\] and \[4, 3\]"):
        short_convolution(x, weight.T)
    with pytest.raises(ValueError, match=r"positions must be \[T\] = \[9\]; got \[8\]"):
        short_convolution(x, weight, positions=torch.arange(8))
    with pytest.raises(ValueError, match="widths up to 4; got 7"):
        short_convolution(*(y.float() for y in make(width=7)[:2]), backend="triton")
