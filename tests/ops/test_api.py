"""What the public operator accepts, refuses and promises about layouts and dtypes."""

import pytest
import torch

from qed.ops import check_cu_seqlens, gated_delta_rule

FORMS = pytest.mark.parametrize("backend", ["reference", "chunked"])


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("q", lambda x: x[0], r"q must be \[B, T, H, K\] with no empty axis; got \[7, 2, 5\]"),
        ("q", lambda x: x[:, :0], r"q must be \[B, T, H, K\] with no empty axis; got \[2, 0, 2, 5\]"),
        ("k", lambda x: x[..., :4], r"k must be \[B, T, H, K\] = \[2, 7, 2, 5\] like q; got \[2, 7, 2, 4\]"),
        ("a", lambda x: x[:, :, :1], r"a must be \[B, T, H, K\] = \[2, 7, 2, 5\] like q; got \[2, 7, 1, 5\]"),
        ("v", lambda x: x[:, :6], r"v must be \[B, T, H, V\] = \[2, 7, 2, V\]; got \[2, 6, 2, 3\]"),
        ("v", lambda x: x[..., :0], r"v must be \[B, T, H, V\] = \[2, 7, 2, V\]; got \[2, 7, 2, 0\]"),
        (
            "g",
            lambda x: x[..., :1],
            r"g must be .*\[2, 7, 2, 5\], \[B, T, H\] = \[2, 7, 2\] or None; got \[2, 7, 2, 1\]",
        ),
        ("q", lambda x: x.long(), r"q must be floating point; got torch.int64"),
        ("g", lambda x: x.long(), r"g must be floating point; got torch.int64"),
        ("initial_state", lambda x: x.long(), r"initial_state must be floating point; got torch.int64"),
        ("v", lambda x: x.bfloat16(), r"v must have q's dtype torch.float64; got torch.bfloat16"),
        ("k", lambda x: x.to("meta"), r"k must lie on q's device cpu; got meta"),
        ("initial_state", lambda x: x.mT, r"initial_state must be \[B, H, K, V\] = \[2, 2, 5, 3\]; got \[2, 2, 3, 5\]"),
        (
            "initial_state",
            lambda x: x[:1],
            r"initial_state must be \[B, H, K, V\] = \[2, 2, 5, 3\]; got \[1, 2, 5, 3\]",
        ),
    ],
)
def test_errors_name_the_argument_and_the_layout(name, change, message, make):
    inputs = make(B=2)
    inputs[name] = change(inputs[name])
    with pytest.raises(ValueError, match=message):
        gated_delta_rule(**inputs)


@pytest.mark.parametrize("wrong", ["q", "k", "v", "a", "g"])
def test_head_major_tensors_are_refused(wrong, make):
    inputs = make(B=2, T=64, H=4)
    inputs[wrong] = inputs[wrong].transpose(1, 2).contiguous()
    with pytest.raises(ValueError, match=r"must be \[B, T, H, [KV]\]"):
        gated_delta_rule(**inputs)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([0, 12, 8, 128], r"rise strictly from 0 to T = 128; got \[0, 12, 8, 128\]"),
        ([0, 64], r"rise strictly from 0 to T = 128; got \[0, 64\]"),
        ([1, 128], r"rise strictly from 0 to T = 128; got \[1, 128\]"),
        ([0, 130], r"rise strictly from 0 to T = 128; got \[0, 130\]"),
        ([0, 64, 64, 128], r"rise strictly from 0 to T = 128"),
        ([*range(20), 5, 128], r"got \[0, 1, 2, 3, '...', 19, 5, 128\]"),
        ([0.0, 128.0], r"\[N \+ 1\] int32 or int64, N >= 1; got \[2\] torch.float32"),
        ([[0, 128]], r"\[N \+ 1\] int32 or int64, N >= 1; got \[1, 2\] torch.int64"),
        ([0], r"\[N \+ 1\] int32 or int64, N >= 1; got \[1\] torch.int64"),
    ],
)
def test_malformed_offsets_are_refused(offsets, message, make):
    inputs = make(T=128, documents=1)
    with pytest.raises(ValueError, match=message):
        gated_delta_rule(**inputs, cu_seqlens=torch.tensor(offsets))


def test_offsets_want_a_batch_of_one_and_one_state_a_document(make):
    with pytest.raises(ValueError, match=r"into a batch of one; got B = 2"):
        gated_delta_rule(**make(B=2, T=32), cu_seqlens=torch.tensor([0, 16, 32]))
    with pytest.raises(ValueError, match=r"initial_state must be \[N, H, K, V\] = \[2, 2, 5, 3\]; got \[1, 2, 5, 3\]"):
        gated_delta_rule(**make(T=32), cu_seqlens=torch.tensor([0, 16, 32]))
    check_cu_seqlens(torch.tensor([0, 16, 32]), 32)


def test_wrong_backend_names_the_nearest(make):
    with pytest.raises(
        ValueError, match=r"unknown backend 'chunk'; did you mean 'chunked'\? One of: reference, chunked"
    ):
        gated_delta_rule(**make(), backend="chunk")


def test_chunked_is_the_choice_on_a_cpu(make):
    inputs = make(T=40, dtype=torch.float32)
    default, chunked = gated_delta_rule(**inputs), gated_delta_rule(**inputs, backend="chunked")
    assert all(torch.equal(x, y) for x, y in zip(default, chunked, strict=True))


@FORMS
def test_no_decay_one_a_head_and_one_a_channel_agree(backend, make, run, compare):
    inputs = make(T=40, decay="0")
    zeros = run(inputs, backend)
    leaves = {name: x.requires_grad_() for name, x in inputs.items() if name != "g"}
    o, state = gated_delta_rule(**leaves, g=None, backend=backend)
    assert torch.equal(o, zeros["o"])
    assert torch.equal(state, zeros["state"])
    generator = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in (o, state)]
    for name, x in zip(leaves, torch.autograd.grad((o, state), list(leaves.values()), cotangents), strict=True):
        torch.testing.assert_close(x, zeros[f"d{name}"], rtol=0, atol=1e-13)

    inputs = make(T=40)
    by_head = inputs["g"][..., 0]
    channels = run(inputs | {"g": by_head.unsqueeze(-1).expand_as(inputs["g"])}, backend)
    heads = run(inputs | {"g": by_head}, backend)
    compare(heads, channels | {"dg": channels["dg"].sum(-1)})


@FORMS
def test_no_initial_state_is_a_zero_state(backend, make):
    inputs = make(T=40)
    inputs["initial_state"].zero_()
    expected = gated_delta_rule(**inputs, backend=backend)
    inputs["initial_state"] = None
    assert all(torch.equal(x, y) for x, y in zip(gated_delta_rule(**inputs, backend=backend), expected, strict=True))


@FORMS
def test_views_of_one_projection(backend, make, run, compare):
    generator = torch.Generator().manual_seed(3)
    fused = torch.randn(2, 33, 3 * 32, generator=generator, dtype=torch.float64) / 4
    q, k, v = (x.unflatten(-1, (4, 8)) for x in fused.split(32, -1))
    a = torch.randn(2, 4, 8, 33, generator=generator, dtype=torch.float64).permute(0, 3, 1, 2) / 4
    g = torch.tensor([-0.1, -2.0, 0.0, -float("inf")], dtype=torch.float64).expand(2, 33, 4)
    S = torch.randn(2, 4, 8, 8, generator=generator, dtype=torch.float64).mT
    views = dict(zip(("q", "k", "v", "a", "g", "initial_state"), (q, k, v, a, g, S), strict=True))
    o, state = gated_delta_rule(**views, backend=backend)
    contiguous = {name: x.contiguous() for name, x in views.items()}
    expected = gated_delta_rule(**contiguous, backend="reference")
    torch.testing.assert_close(o, expected[0], rtol=0, atol=1e-13)
    torch.testing.assert_close(state, expected[1], rtol=0, atol=1e-13)

    def through_views(q, k, v, a, g, initial_state, cu_seqlens, backend):
        turned = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v, a, g)]
        return gated_delta_rule(*turned, initial_state=initial_state.mT.contiguous().mT, backend=backend)

    compare(run(contiguous, backend, function=through_views), run(contiguous, "reference"))


@FORMS
def test_inputs_are_left_alone(backend, make):
    inputs = make(T=40)
    before = {name: x.clone() for name, x in inputs.items()}
    gated_delta_rule(**inputs, backend=backend)
    assert all(torch.equal(x, before[name]) for name, x in inputs.items())


@FORMS
@pytest.mark.parametrize(
    ("dtype", "state_dtype"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64,) * 2,
    ],
)
def test_state_is_float32_and_output_has_the_dtype_of_the_values(backend, dtype, state_dtype, make):
    inputs = make(T=9, dtype=dtype)
    o, state = gated_delta_rule(**inputs, backend=backend)
    assert (o.dtype, state.dtype) == (dtype, state_dtype)


@FORMS
def test_autocast_does_not_reach_the_recurrence(backend, make, run):
    inputs = make(T=40, dtype=torch.float32)
    expected = run(inputs, backend)
    with torch.autocast("cpu", torch.bfloat16):
        actual = run(inputs, backend)
    assert all(torch.equal(x, expected[name]) for name, x in actual.items())


def test_a_thousand_steps_through_the_state_keep_float32_accuracy(make):
    inputs = make(T=1000, H=1, K=8, V=8, decay="0", dtype=torch.bfloat16)
    *tokens, S = inputs.values()
    exact = gated_delta_rule(*(x.double() for x in tokens), initial_state=S.double(), backend="reference")[1]
    state = S
    for t in range(1000):
        _, state = gated_delta_rule(*(x[:, t : t + 1] for x in tokens), initial_state=state)
    assert state.dtype == torch.float32
    assert (state - exact).norm() <= 1e-5 * exact.norm()
