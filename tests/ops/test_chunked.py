"""The chunked form against the token loop: every length, decay, gate, split and packing."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qed.ops import chunked as chunked_form
from qed.ops import gated_delta_rule

KINDS = ["0", "-5", "-20", "-100", "-inf", "mild", "mixed", "by channel"]
PROPERTY = settings(deadline=None, max_examples=20, derandomize=True)
INF = float("inf")


def offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def one_by_one(q, k, v, a, g, initial_state, cu_seqlens, backend):
    """Each document by itself, put together as the packed call returns them."""
    parts = []
    for n, (start, stop) in enumerate(pairwise(cu_seqlens.tolist())):
        document = (x[:, start:stop] for x in (q, k, v, a, g))
        parts.append(gated_delta_rule(*document, initial_state=initial_state[n : n + 1], backend=backend))
    return torch.cat([o for o, _ in parts], 1), torch.cat([state for _, state in parts])


@pytest.mark.parametrize("T", range(1, 131))
def test_every_length(T, make, run, compare):
    inputs = make(T=T, decay="mixed", seed=T)
    compare(run(inputs, "chunked"), run(inputs, "reference"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gate", [0, 1])
def test_decays_at_saturated_gates(kind, gate, make, run, compare):
    inputs = make(B=2, T=75, K=8, decay=kind, gate=gate)
    compare(run(inputs, "chunked"), run(inputs, "reference"))


@pytest.mark.parametrize("strength", [-1.0, -0.2, 0.0, 1.0, 3.0])
@pytest.mark.parametrize("kind", ["mild", "mixed"])
def test_negative_and_large_strengths(strength, kind, make, run, compare):
    inputs = make(T=75, K=8, decay=kind, strength=strength)
    compare(run(inputs, "chunked"), run(inputs, "reference"), 1e-12)


@pytest.mark.parametrize(("K", "V"), [(1, 1), (8, 8), (16, 64), (64, 16), (100, 3), (3, 130)])
def test_unequal_and_odd_head_dims(K, V, make, run, compare):
    inputs = make(T=40, K=K, V=V)
    compare(run(inputs, "chunked"), run(inputs, "reference"))


@pytest.mark.parametrize("kind", ["0", "-5", "-20", "mild", "mixed"])
def test_float32_is_as_accurate_as_the_token_loop(kind, make, run):
    inputs = make(B=2, T=150, K=16, V=16, decay=kind)
    exact = run(inputs, "reference")
    single = {name: x.float() for name, x in inputs.items()}
    ours, loop = run(single, "chunked"), run(single, "reference")
    for name, x in exact.items():
        unit = torch.finfo(torch.float32).eps
        error, allowed = (r[name].double() - x for r in (ours, loop))
        assert error.abs().max() <= 2 * allowed.abs().max() + 4 * unit * x.abs().max(), name
        assert error.square().mean().sqrt() <= 2 * allowed.square().mean().sqrt() + unit * x.square().mean().sqrt(), (
            name
        )


@pytest.mark.parametrize("T", [7, 50, 128, 512])
def test_bfloat16_inputs_without_decay(T, make, run):
    inputs = {name: x.bfloat16() for name, x in make(B=2, T=T, K=20, V=20, decay="0").items()}
    ours = run(inputs, "chunked")
    exact = run({name: x.double() for name, x in inputs.items()}, "reference")
    for name, x in exact.items():
        tolerance = 2e-2 if name.startswith("d") else 5e-3
        assert (ours[name].double() - x).norm() <= tolerance * x.norm(), name
    assert ours["state"].dtype == torch.float32
    assert all(ours[f"d{name}"].dtype == x.dtype for name, x in inputs.items())


@pytest.mark.parametrize("cut", [1, 31, 32, 33, 64, 99])
@pytest.mark.parametrize("kind", ["mild", "mixed"])
def test_split_sequence_with_the_state_passed(cut, kind, make, run, compare):
    inputs = make(T=100, decay=kind)

    def in_two(q, k, v, a, g, initial_state, cu_seqlens, backend):
        first, second = ([x[:, piece] for x in (q, k, v, a, g)] for piece in (slice(None, cut), slice(cut, None)))
        o_first, state = gated_delta_rule(*first, initial_state=initial_state, backend=backend)
        o_second, state = gated_delta_rule(*second, initial_state=state, backend=backend)
        return torch.cat([o_first, o_second], 1), state

    compare(run(inputs, "chunked", function=in_two), run(inputs, "reference"))


@pytest.mark.parametrize("T", [1, 2, 3])
@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_gradient_through_the_final_state_alone(T, backend, make):
    inputs = make(T=2 * T)
    leaves = [x.requires_grad_() for x in inputs.values()]
    *tokens, S = leaves
    state = S
    for piece in (slice(None, T), slice(T, None)):
        _, state = gated_delta_rule(*(x[:, piece] for x in tokens), initial_state=state, backend=backend)
    actual = torch.autograd.grad(state.square().sum(), leaves, allow_unused=True)
    _, state = gated_delta_rule(*tokens, initial_state=S, backend="reference")
    expected = torch.autograd.grad(state.square().sum(), leaves, allow_unused=True)
    assert all(x is None or not x.any() for x in (actual[0], expected[0])), "no read, no gradient of the query"
    for x, y in zip(actual[1:], expected[1:], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "lengths", [[50], [1] * 7, [3, 70, 1, 33, 64, 2], [130, 5, 5, 5], [32, 64, 32], [1, 129]], ids=str
)
@pytest.mark.parametrize("kind", ["mild", "mixed"])
def test_packed_documents_are_documents_one_by_one(lengths, kind, make, run, compare):
    inputs = make(T=sum(lengths), decay=kind, documents=len(lengths))
    packed = run(inputs, "chunked", offsets(lengths))
    compare(packed, run(inputs, "chunked", offsets(lengths), one_by_one))
    compare(packed, run(inputs, "reference", offsets(lengths).int()))


def test_documents_do_not_touch_each_other(make):
    lengths = [20, 45, 33]
    inputs = make(T=sum(lengths), documents=3)
    expected = gated_delta_rule(**inputs, cu_seqlens=offsets(lengths))
    changed = {name: x.clone() for name, x in inputs.items()}
    for name in ("q", "k", "v", "a"):
        changed[name][:, 20:65] = 7.0
    changed["initial_state"][1] = -3.0
    actual = gated_delta_rule(**changed, cu_seqlens=offsets(lengths))
    assert torch.equal(actual[0][:, :20], expected[0][:, :20])
    assert torch.equal(actual[0][:, 65:], expected[0][:, 65:])
    assert torch.equal(actual[1][[0, 2]], expected[1][[0, 2]])
    assert not torch.equal(actual[1][1], expected[1][1])


def test_thousands_of_one_token_documents(make, run, compare):
    inputs = make(T=4096, H=4, K=4, V=4, documents=4096, decay="mixed")
    packed = run(inputs, "chunked", torch.arange(4097))
    tokens = {name: x.transpose(0, 1) if name != "initial_state" else x for name, x in inputs.items()}
    batch = run(tokens, "chunked")
    o, state = gated_delta_rule(**tokens, backend="reference")
    torch.testing.assert_close(batch["o"], o, rtol=0, atol=1e-13)
    torch.testing.assert_close(packed["o"], o.transpose(0, 1), rtol=0, atol=1e-13)
    torch.testing.assert_close(packed["state"], state, rtol=0, atol=1e-13)
    for name in ("dq", "dk", "dv", "da", "dg"):
        assert packed[name].isfinite().all(), name


@pytest.mark.parametrize("t", [1, 2, 17, 31, 32, 33, 64, 90])
def test_later_tokens_never_change_a_bit_of_earlier_outputs(t, make):
    inputs = make(B=2, T=100, K=16, V=16, dtype=torch.float32)
    expected, _ = gated_delta_rule(**inputs, backend="chunked")
    for later in (make(B=2, T=100, K=16, V=16, decay="mixed", seed=9, dtype=torch.float32), None):
        changed = {name: x.clone() for name, x in inputs.items()}
        for name in ("q", "k", "v", "a", "g"):
            changed[name][:, t:] = later[name][:, t:] if later else (-INF if name == "g" else 1e3)
        actual, _ = gated_delta_rule(**changed, backend="chunked")
        assert torch.equal(actual[:, :t], expected[:, :t])
        assert not torch.equal(actual[:, t:], expected[:, t:])


def test_same_bits_again_and_for_a_permuted_batch(make, run):
    inputs = make(B=4, T=100, K=16, V=16, decay="mixed", dtype=torch.float32)
    order = torch.tensor([2, 0, 3, 1])
    first, again = run(inputs, "chunked"), run(inputs, "chunked")
    assert all(torch.equal(x, again[name]) for name, x in first.items())
    o, state = gated_delta_rule(**inputs)
    permuted = gated_delta_rule(**{name: x[order] for name, x in inputs.items()})
    assert torch.equal(permuted[0], o[order])
    assert torch.equal(permuted[1], state[order])
    assert torch.equal(o, first["o"]), "with and without gradients"


def test_slabs_change_nothing(make, run, compare, monkeypatch):
    lengths = [130, 5, 70, 33]
    inputs = make(T=sum(lengths), documents=4, decay="mixed")
    whole = run(inputs, "chunked", offsets(lengths))
    monkeypatch.setattr(chunked_form, "SLAB", 1)
    compare(run(inputs, "chunked", offsets(lengths)), whole)


def test_a_wiped_state_passes_no_gradient_back(make, run):
    inputs = make(T=60, decay="mild")
    inputs["g"][:, 40] = -INF
    result = run(inputs, "chunked")
    reads_only = run(inputs | {"v": inputs["v"].index_fill(1, torch.arange(40), 0.0)}, "chunked")
    assert not result["dg"][:, 40].any()
    assert not result["dinitial_state"].eq(0).all(), "outputs before the wipe still depend on it"
    torch.testing.assert_close(result["o"][:, 40:], reads_only["o"][:, 40:], rtol=0, atol=1e-15)


def test_second_derivative_is_refused(make):
    inputs = make(T=3)
    inputs["q"].requires_grad_()
    o, _ = gated_delta_rule(**inputs, backend="chunked")
    (gradient,) = torch.autograd.grad(o.square().sum(), inputs["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


class _Watch(TorchDispatchMode):
    """Counts operations and remembers the largest tensor any of them returns."""

    def __init__(self):
        super().__init__()
        self.largest = self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.calls += 1
        self.largest = max([self.largest, *(x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor))])
        return result


def test_no_pairwise_tensor_of_the_sequence_and_no_loop_over_tokens(make, run):
    inputs = make(T=1024, H=2, K=16, V=16, dtype=torch.float32)
    with _Watch() as watch:
        run(inputs, "chunked")
    # Query and erase vector side by side are 2 tensors; C x C x K would be C = 32 of them.
    assert watch.largest <= 2 * inputs["q"].numel()
    # Views and all, forward and backward; the loop needs more than ten operations a token.
    assert watch.calls < 3 * 1024


@PROPERTY
@given(data=st.data())
def test_any_shape_any_decay(data, make, run, compare):
    shape = {
        name: data.draw(st.integers(1, top), label=name) for name, top in zip("BTHKV", (3, 70, 3, 9, 9), strict=True)
    }
    kind = data.draw(st.sampled_from(KINDS))
    strength = data.draw(st.floats(-1, 1))
    inputs = make(**shape, decay=kind, strength=strength, seed=data.draw(st.integers(0, 99)))
    compare(run(inputs, "chunked"), run(inputs, "reference"), 1e-12)


@PROPERTY
@given(lengths=st.lists(st.integers(1, 70), min_size=1, max_size=6), kind=st.sampled_from(KINDS))
def test_any_packing(lengths, kind, make, run, compare):
    inputs = make(T=sum(lengths), decay=kind, documents=len(lengths))
    compare(run(inputs, "chunked", offsets(lengths)), run(inputs, "reference", offsets(lengths)), 1e-12)


@PROPERTY
@given(T=st.integers(2, 120), cut=st.floats(0, 1), kind=st.sampled_from(KINDS))
def test_any_split(T, cut, kind, make):
    *tokens, S = make(T=T, decay=kind).values()
    at = min(max(1, int(cut * T)), T - 1)
    o, state = gated_delta_rule(*tokens, initial_state=S)
    first, middle = gated_delta_rule(*(x[:, :at] for x in tokens), initial_state=S)
    second, last = gated_delta_rule(*(x[:, at:] for x in tokens), initial_state=middle)
    torch.testing.assert_close(torch.cat([first, second], 1), o, rtol=0, atol=1e-12)
    torch.testing.assert_close(last, state, rtol=0, atol=1e-12)
