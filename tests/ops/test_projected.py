import pytest
import torch
import torch.nn.functional as F

from qed.ops import ARMS, gated_delta_rule, projected_delta_rule, recurrence_inputs


def make(B=2, T=9, H=2, K=4, V=3):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    inputs = {
        "q": normal(B, T, H, K), "k": normal(B, T, H, K), "v": normal(B, T, H, V), "decay": normal(B, T, H, K),
        "erase": normal(B, T, H, K), "write": normal(B, T, H, V),
        "A_log": normal(H), "dt_bias": normal(H, K), "strength": 0.25 * normal(H),
    }  # fmt: skip
    return inputs, F.normalize(normal(H, K), dim=-1), normal(B, H, K, V)


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("backend", [None, "reference", "chunked"])
def test_it_is_the_two_operators_one_after_the_other(arm, backend):
    inputs, z, state = make()
    got = projected_delta_rule(**inputs, arm=arm, random_direction=z, initial_state=state, backend=backend)
    parts = recurrence_inputs(**inputs, arm=arm, random_direction=z)
    for x, y in zip(got, gated_delta_rule(*parts, initial_state=state, backend=backend), strict=True):
        assert torch.equal(x, y)


def test_packed_documents_and_gradients():
    inputs, _, state = make(B=1)
    offsets = torch.tensor([0, 2, 9])
    leaves = [x.requires_grad_() for x in (*inputs.values(), state.expand(2, -1, -1, -1).contiguous())]

    def run(*x):
        return projected_delta_rule(*x[:-1], initial_state=x[-1], cu_seqlens=offsets)

    assert torch.autograd.gradcheck(run, leaves)


def test_wrong_arguments_are_named():
    inputs, _, state = make()
    with pytest.raises(ValueError, match="did you mean 'chunked'"):
        projected_delta_rule(**inputs, backend="chunkd")
    with pytest.raises(ValueError, match=r"erase must be \[2, 9, 2, 4\]"):
        projected_delta_rule(**{**inputs, "erase": inputs["write"]})
    with pytest.raises(ValueError, match="initial_state must be"):
        projected_delta_rule(**inputs, initial_state=state.mT)
