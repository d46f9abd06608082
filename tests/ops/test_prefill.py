"""From raw projections where there is no GPU: the pair of operators, its gradients and its errors."""

import pytest
import torch

from qed.ops import ARMS, gated_delta_rule, gated_delta_rule_from_projections, recurrence_inputs


def make(B=2, T=9, H=2, K=8, V=12):
    generator = torch.Generator().manual_seed(0)
    streams = [torch.randn(B, T, H, n, generator=generator) for n in (K, K, V, K, K, V)]
    parameters = [torch.randn(s, generator=generator) for s in ((H,), (H, K), (H,))]
    return streams + parameters, torch.randn(H, K, generator=generator)


@pytest.mark.parametrize("backend", [None, "reference", "chunked"])
@pytest.mark.parametrize("arm", ARMS)
def test_equals_the_pair_with_gradients(arm, backend):
    leaves, z = make()
    state = torch.randn(2, 2, 8, 12, generator=torch.Generator().manual_seed(1))
    results = []
    for fused in (True, False):
        own = [x.clone().requires_grad_() for x in leaves]
        options = {"arm": arm, "random_direction": z}
        if fused:
            out = gated_delta_rule_from_projections(*own, **options, initial_state=state, backend=backend)
        else:
            out = gated_delta_rule(*recurrence_inputs(*own, **options), initial_state=state, backend=backend)
        loss = sum(x.square().sum() for x in out)
        results.append([*out, *torch.autograd.grad(loss, own, materialize_grads=True)])
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)


def test_packed_documents():
    leaves, _ = make(B=1)
    cu = torch.tensor([0, 4, 9])
    o, final = gated_delta_rule_from_projections(*leaves, cu_seqlens=cu)
    want, states = gated_delta_rule(*recurrence_inputs(*leaves), cu_seqlens=cu)
    assert torch.equal(o, want)
    assert torch.equal(final, states)


def test_errors_are_those_of_the_pair():
    leaves, _ = make()
    with pytest.raises(ValueError, match="unknown arm 'qde'; did you mean 'qed'"):
        gated_delta_rule_from_projections(*leaves, arm="qde")
    with pytest.raises(ValueError, match="unknown backend 'chunky'; did you mean 'chunked'"):
        gated_delta_rule_from_projections(*leaves, backend="chunky")
    with pytest.raises(ValueError, match="needs random_direction"):
        gated_delta_rule_from_projections(*leaves, arm="qed-rand")
    with pytest.raises(ValueError, match=r"initial_state must be \[B, H, K, V\]"):
        gated_delta_rule_from_projections(*leaves, initial_state=torch.zeros(1, 2, 8, 12))
