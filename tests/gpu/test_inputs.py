"""The prologue and the convolution on a GPU, against float64 and against themselves."""

import pytest
import torch
import torch.nn.functional as F

from qed.ops import ARMS, gated_norm, recurrence_inputs, short_convolution, silu_product
from qed.ops.fused import recurrence_inputs_op, short_convolution_op

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
STREAMS = ("q", "k", "v", "decay", "erase", "write")
# Rounding of one result to the dtype, in relative RMS: half a unit in the last place, and room for what is summed.
LIMITS = {torch.float32: 1e-6, torch.float16: 3e-4, torch.bfloat16: 2.5e-3}


def make(B, T, H, K, V, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device="cuda")

    inputs = {
        "q": normal(B, T, H, K), "k": normal(B, T, H, K), "v": normal(B, T, H, V), "decay": 3 * normal(B, T, H, K),
        "erase": normal(B, T, H, K), "write": normal(B, T, H, V),
    }  # fmt: skip
    inputs = {name: x.to(dtype) for name, x in inputs.items()}
    inputs |= {"A_log": normal(H), "dt_bias": normal(H, K), "strength": 0.25 * normal(H)}
    cotangents = [normal(B, T, H, n).to(dtype) for n in (K, K, V, K)] + [normal(B, T, H, K)]
    return inputs, F.normalize(normal(H, K), dim=-1), cotangents


def run(inputs, z, cotangents, arm, backend):
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    outputs = recurrence_inputs(*leaves.values(), arm=arm, random_direction=z, backend=backend)
    torch.autograd.backward(outputs, cotangents)
    grads = {f"d{name}": torch.zeros_like(x) if x.grad is None else x.grad for name, x in leaves.items()}
    return dict(zip(("q", "k", "v", "a", "g"), outputs, strict=True)) | grads


def error(exact, got):
    return ((exact - got.double()).norm() / exact.norm().clamp(min=1e-30)).item()


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("shape", [(2, 70, 3, 128, 128), (1, 33, 2, 100, 24), (1, 5, 2, 256, 256), (3, 1, 2, 16, 64)])
def test_outputs_and_gradients_match_float64(shape, arm, dtype):
    inputs, z, cotangents = make(*shape, dtype)
    got = run(inputs, z, cotangents, arm, "triton")
    wide = {name: x.double() for name, x in inputs.items()}
    exact = run(wide, z.double(), [x.double() for x in cotangents], arm, "torch")
    for name, x in exact.items():
        # decay and the three parameters stay in float32; their sums may cancel
        stays_wide = name == "g" or name in ("dA_log", "ddt_bias", "dstrength")
        limit = 2e-5 if stays_wide else LIMITS[dtype]
        if x.any():
            assert error(x, got[name]) < limit, name
        else:
            assert not got[name].any(), name


def test_views_of_a_projection_equal_their_copies():
    inputs, z, _ = make(2, 33, 4, 64, 32)
    qkv = torch.cat([inputs[name].flatten(-2) for name in ("q", "k", "v")], -1)
    views = [x.unflatten(-1, (4, -1)) for x in qkv.split([256, 256, 128], -1)]
    decay = inputs["decay"].transpose(1, 2).contiguous().transpose(1, 2)
    laid_out = {**inputs, **dict(zip("qkv", views, strict=True)), "decay": decay}
    assert not laid_out["q"].is_contiguous()
    for x, y in zip(
        recurrence_inputs(*inputs.values(), arm="qed-rand", random_direction=z),
        recurrence_inputs(*laid_out.values(), arm="qed-rand", random_direction=z),
        strict=True,
    ):
        assert torch.equal(x, y)


def test_the_same_bits_twenty_times():
    inputs, z, cotangents = make(2, 512, 4, 128, 128)
    first = run(inputs, z, cotangents, "qed", "triton")
    for _ in range(20):
        again = run(inputs, z, cotangents, "qed", "triton")
        assert all(torch.equal(x, again[name]) for name, x in first.items())


@pytest.mark.parametrize("A_log", [20.0, 60.0, 100.0])
@pytest.mark.parametrize("preactivation", [-50.0, 50.0])
def test_saturated_gates_leave_finite_gradients(A_log, preactivation):
    inputs, z, cotangents = make(1, 8, 2, 32, 16)
    inputs["A_log"] = torch.full_like(inputs["A_log"], A_log)
    for name in ("decay", "erase", "write"):
        inputs[name] = torch.full_like(inputs[name], preactivation)
    # the core's gradient of a decay that leaves nothing is zero
    results = run(inputs, z, [*cotangents[:4], torch.zeros_like(cotangents[4])], "qed", "triton")
    for name, x in results.items():
        assert x.isfinite().all(), name


def test_zero_rows_stay_finite():
    inputs, z, cotangents = make(1, 8, 2, 32, 16)
    for name in ("q", "k"):
        inputs[name][:, 2:5] = 0
    results = run(inputs, z, cotangents, "qed", "triton")
    assert not results["k"][:, 2:5].any()
    assert all(x.isfinite().all() for x in results.values())


def test_every_element_is_written():
    # a pool of NaN blocks: what a kernel does not write shows
    inputs, z, cotangents = make(1, 77, 3, 100, 40)
    expected = run(inputs, z, cotangents, "qed", "triton")
    poison = [torch.full((1 << size,), float("nan"), device="cuda") for size in range(8, 20) for _ in range(4)]
    del poison
    for name, x in run(inputs, z, cotangents, "qed", "triton").items():
        assert torch.equal(x, expected[name]), name


def test_more_than_two_to_the_31_elements():
    B, T, H, K = 1, 1_100_000, 16, 128
    if torch.cuda.get_device_properties(0).total_memory < 60 * 2**30:
        pytest.skip("needs 60 GiB")
    row = torch.randn(1, 8, H, K, device="cuda").bfloat16()
    x = row.repeat(B, T // 8, 1, 1)
    assert x.numel() > 2**31
    parameters = (torch.zeros(H, device="cuda"), torch.zeros(H, K, device="cuda"), torch.zeros(H, device="cuda"))
    q, k, v, a, g = recurrence_inputs(x, x, x, x, x, x, *parameters)
    wanted = recurrence_inputs(*[row] * 6, *parameters)
    for big, small in zip((q, k, v, a, g), wanted, strict=True):
        assert torch.equal(big[:, -8:], small)


def test_registration_and_one_graph():
    inputs, z, _ = make(1, 16, 2, 16, 16)
    trained = [x.requires_grad_() for x in inputs.values()]
    torch.library.opcheck(recurrence_inputs_op, (*trained, z, "random", True, True))
    x, weight = torch.randn(1, 9, 16, device="cuda", requires_grad=True), torch.randn(16, 4, device="cuda")
    torch.library.opcheck(short_convolution_op, (x, weight.requires_grad_(), None, 0))
    compiled = torch.compile(recurrence_inputs, fullgraph=True)
    for length in (16, 24, 40):
        inputs, z, _ = make(1, length, 2, 16, 16)
        for x, y in zip(compiled(*inputs.values()), recurrence_inputs(*inputs.values()), strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("kind", ["plain", "state", "packed"])
def test_convolution_matches_float64(dtype, kind):
    generator = torch.Generator("cuda").manual_seed(0)
    B, T, C = (1 if kind == "packed" else 3), 150, 200
    shapes = [(B, T, C), (C, 4), (B, 3, C), (B, T, C)]
    x, weight, state, cotangent = (torch.randn(s, generator=generator, device="cuda").to(dtype) for s in shapes)
    positions = torch.cat([torch.arange(n) for n in (1, 2, 70, 77)]).cuda() if kind == "packed" else None
    results = []
    for wide, backend in ((torch.float64, "torch"), (dtype, "triton")):
        leaves = [y.to(wide).requires_grad_() for y in ((x, weight, state) if kind == "state" else (x, weight))]
        y = short_convolution(
            *leaves[:2], state=leaves[2] if kind == "state" else None, positions=positions, backend=backend
        )
        results.append([y, *torch.autograd.grad(y, leaves, cotangent.to(wide))])
    for exact, got in zip(*results, strict=True):
        assert error(exact, got) < LIMITS[dtype]


def test_convolution_repeats_the_bits_of_a_long_pass():
    x, weight = torch.randn(2, 130, 96, device="cuda").bfloat16(), torch.randn(96, 4, device="cuda")
    whole, padded = short_convolution(x, weight), F.pad(x, (0, 0, 3, 0))
    steps = [short_convolution(x[:, t : t + 1], weight, state=padded[:, t : t + 3]) for t in range(130)]
    assert torch.equal(torch.cat(steps, 1), whole)
    with torch.no_grad():
        two = [short_convolution(x[:, :50], weight), short_convolution(x[:, 50:], weight, state=x[:, 47:50])]
    assert torch.equal(torch.cat(two, 1), whole)


@pytest.mark.parametrize("dtype", LIMITS)
def test_gates_match_float64(dtype):
    generator = torch.Generator("cuda").manual_seed(0)
    x, gate = (3 * torch.randn(5, 130, 6, 128, generator=generator, device="cuda") for _ in range(2))
    x, gate, weight = x.to(dtype), gate.to(dtype), torch.rand(128, generator=generator, device="cuda").to(dtype)
    with torch.no_grad():
        assert (
            error(gated_norm(x.double(), gate.double(), weight.double(), 1e-6), gated_norm(x, gate, weight, 1e-6))
            < LIMITS[dtype]
        )
        assert error(silu_product(gate.double(), x.double()), silu_product(gate, x)) < LIMITS[dtype]
    # With gradients PyTorch's own steps take over.
    gated_norm(x, gate, weight.requires_grad_(), 1e-6).sum().backward()
    assert weight.grad.isfinite().all()
