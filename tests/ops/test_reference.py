"""Paper sections 2 and 3: identities and worked examples, in float64, for every form that runs on a CPU."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from qed.ops import erase_vector, gated_delta_rule

FORMS = pytest.mark.parametrize("backend", ["reference", "chunked"])
PROPERTY = settings(deadline=None, max_examples=15, derandomize=True)
STRENGTH = 0.2


def one_token(seed, K=6, V=4):
    """State, query, key, erase gate, value and log-decay of one token of one head."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k = F.normalize(normal(K), dim=0), F.normalize(normal(K), dim=0)
    return normal(K, V), q, k, normal(K).sigmoid(), normal(V), -torch.rand(K, generator=generator, dtype=torch.float64)


def step(S, q, k, v, a, g, backend):
    """One token through the public operator; returns output ``[V]`` and state ``[K, V]``."""
    q, k, v, a, g = (x[None, None, None] for x in (q, k, v, a, g))
    o, state = gated_delta_rule(q, k, v, a, g, initial_state=S[None, None], backend=backend)
    return o[0, 0, 0], state[0, 0]


def erase(q, k, b, arm, strength=STRENGTH):
    return erase_vector(q[None], k[None], b[None], strength, arm=arm)[0]


def close(x, y):
    torch.testing.assert_close(x, y, rtol=0, atol=1e-14)


@FORMS
@pytest.mark.parametrize("arm", ["gdn2", "qed", "qed-nogate-noproj"])
@pytest.mark.parametrize("seed", range(3))
def test_edit_changes_a_probe_by_its_overlap_with_the_key(backend, arm, seed):
    S, q, k, b, v, g = one_token(seed)
    a = erase(q, k, b, arm)
    decayed = g.exp()[:, None] * S
    residual = v - decayed.T @ a
    _, state = step(S, q, k, v, a, g, backend)
    x = torch.linspace(-1, 2, 6, dtype=torch.float64)
    close((state - decayed).T @ x, (x @ k) * residual)
    orthogonal = x - (x @ k) * k
    close(state.T @ orthogonal, decayed.T @ orthogonal)


@FORMS
@pytest.mark.parametrize("seed", range(3))
def test_qed_differs_from_gdn2_by_the_second_erase(backend, seed):
    S, q, k, b, v, g = one_token(seed)
    o_gdn2, S_gdn2 = step(S, q, k, v, erase(q, k, b, "gdn2"), g, backend)
    o_qed, S_qed = step(S, q, k, v, erase(q, k, b, "qed"), g, backend)
    d = b * q - k * (k @ (b * q))
    response = (g.exp()[:, None] * S).T @ d
    close(S_qed - S_gdn2, -STRENGTH * torch.outer(k, response))
    close(o_qed - o_gdn2, -STRENGTH * (q @ k) * response)


@FORMS
@pytest.mark.parametrize("seed", range(3))
def test_gdn2_output_splits_along_and_across_the_key(backend, seed):
    S, q, k, b, v, g = one_token(seed)
    o, _ = step(S, q, k, v, erase(q, k, b, "gdn2"), g, backend)
    decayed = g.exp()[:, None] * S
    rho = q @ k
    close(o, rho * (v + decayed.T @ ((1 - b) * k)) + decayed.T @ (q - rho * k))


@FORMS
def test_a_query_orthogonal_to_the_key_changes_the_state_but_not_this_output(backend):
    S, q, k, b, v, g = one_token(0)
    q = F.normalize(q - k * (k @ q), dim=0)
    o_gdn2, S_gdn2 = step(S, q, k, v, erase(q, k, b, "gdn2"), g, backend)
    o_qed, S_qed = step(S, q, k, v, erase(q, k, b, "qed"), g, backend)
    close(o_qed, o_gdn2)
    assert (S_qed - S_gdn2).abs().max() > 1e-3


@FORMS
def test_worked_example(backend):
    def row(*values):
        return torch.tensor(values, dtype=torch.float64)

    S, q, k, b, v, g = row(2, 3)[:, None], row(0.6, 0.8), row(1, 0), row(0.5, 0.5), row(1), row(0, 0)
    o, state = step(S, q, k, v, erase(q, k, b, "gdn2"), g, backend)
    close(state, row(2, 3)[:, None])
    close(o, row(3.6))
    a = erase(q, k, b, "qed")
    close(a, row(0.5, 0.2 * 0.4))
    o, state = step(S, q, k, v, a, g, backend)
    close(state, row(1.76, 3)[:, None])
    close(o, row(3.456))


@FORMS
def test_decay_comes_before_the_erase(backend):
    def row(*values):
        return torch.tensor(values, dtype=torch.float64)

    k = row(0.6, 0.8)
    _, state = step(row(1, 1)[:, None], k, k, row(0), k, row(0.5, 1).log(), backend)
    close(state, row(-0.16, 0.12)[:, None])


@FORMS
def test_output_reads_the_state_after_the_edit_without_a_scale(backend):
    q = torch.tensor([3.0, 0, 0, 0], dtype=torch.float64)
    zero = torch.zeros(4, dtype=torch.float64)
    o, _ = step(torch.zeros(4, 1, dtype=torch.float64), q, q, torch.ones(1, dtype=torch.float64), zero, zero, backend)
    assert o.item() == 9.0


def family(inputs, decayed, erase, write):
    """Members of the family by their own formulas: S = decay(S); S += k (write v - erase S^T k)^T."""
    S = inputs["initial_state"].clone()
    outputs = []
    for t in range(inputs["q"].shape[1]):
        q, k, v = (inputs[name][:, t] for name in "qkv")
        S = decayed(S, t)
        recalled = torch.einsum("bhkv,bhk->bhv", S, k)
        S = S + torch.einsum("bhk,bhv->bhkv", k, write[:, t] * v - erase[:, t] * recalled)
        outputs.append(torch.einsum("bhkv,bhk->bhv", S, q))
    return torch.stack(outputs, 1), S


@FORMS
@pytest.mark.parametrize("member", ["additive", "deltanet", "gdn", "kda"])
def test_family(backend, member, make):
    inputs = make(B=2, T=40, K=8, V=16)
    beta = torch.rand(2, 40, 2, 1, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    g = {"kda": inputs["g"], "gdn": inputs["g"][..., 0]}.get(member)

    def decayed(S, t):
        return S if g is None else g[:, t].exp().reshape(2, 2, -1, 1) * S

    erase, write = (beta, beta) if member != "additive" else (torch.zeros_like(beta), torch.ones_like(beta))
    q, k, v, _, _, S = inputs.values()
    o, state = gated_delta_rule(q, k, write * v, erase * k, g, initial_state=S, backend=backend)
    expected_o, expected_state = family(inputs, decayed, erase, write)
    torch.testing.assert_close(o, expected_o, rtol=0, atol=1e-12)
    torch.testing.assert_close(state, expected_state, rtol=0, atol=1e-12)


@FORMS
@pytest.mark.parametrize("T", [1, 4, 35])
def test_gradcheck(backend, T, make):
    inputs = make(T=T, H=1, K=2, V=2)
    leaves = [inputs[name].requires_grad_() for name in ("q", "k", "v", "a", "g", "initial_state")]

    def function(q, k, v, a, g, S):
        return gated_delta_rule(q, k, v, a, g, initial_state=S, backend=backend)

    assert torch.autograd.gradcheck(function, leaves, fast_mode=T > 4)


@FORMS
@pytest.mark.parametrize("beta", [1.0, 1.9, 2.0])
def test_strong_erase_along_the_key_stays_bounded(backend, beta):
    generator = torch.Generator().manual_seed(0)
    q, k = F.normalize(torch.randn(2, 1, 4096, 1, 8, generator=generator, dtype=torch.float64), dim=-1)
    v = torch.zeros(1, 4096, 1, 4, dtype=torch.float64)
    S = torch.randn(1, 1, 8, 4, generator=generator, dtype=torch.float64)
    _, state = gated_delta_rule(q, k, v, beta * k, None, initial_state=S, backend=backend)
    # I - beta k k^T has norm 1 for beta in [0, 2]: nothing written, nothing may grow.
    assert state.norm() <= S.norm() * (1 + 1e-10)


def test_erase_beyond_twice_the_key_grows_as_the_reference_grows(make, run, compare):
    inputs = make(T=200, decay=0.0)
    inputs["a"] = 2.1 * inputs["k"]
    expected = run(inputs, "reference")
    assert expected["state"].norm() > 10 * inputs["initial_state"].norm()
    compare(run(inputs, "chunked"), expected, 1e-12)


@PROPERTY
@given(seed=st.integers(0, 10_000), strength=st.floats(-1, 1), arm=st.sampled_from(["gdn2", "qed", "qed-nogate"]))
def test_projected_arms_keep_the_spectrum_of_gdn2(seed, strength, arm):
    _, q, k, b, _, _ = one_token(seed)
    a = erase(q, k, b, arm, strength)
    values = torch.linalg.eigvals(torch.eye(6, dtype=torch.float64) - torch.outer(k, a)).real.sort().values
    e = 1 - (b * k * k).sum()
    assert 0 < e < 1
    # Eigenvalue 1 is repeated and the matrix not symmetric: eigenvalues are known to about the root of the precision.
    torch.testing.assert_close(values, torch.cat([e[None], values.new_ones(5)]), rtol=0, atol=1e-5)
    torch.testing.assert_close(1 - a @ k, e, rtol=0, atol=1e-12)


@PROPERTY
@given(
    seed=st.integers(0, 10_000), strength=st.floats(0, 0.25), arm=st.sampled_from(["qed-noproj", "qed-nogate-noproj"])
)
def test_unprojected_arms_leave_the_unit_interval_by_a_quarter_at_most(seed, strength, arm):
    _, q, k, b, _, _ = one_token(seed)
    assert -0.25 <= 1 - erase(q, k, b, arm, strength) @ k <= 1.25


@pytest.mark.parametrize(("b", "aligned", "eigenvalue"), [(1.0, 1, -0.25), (0.0, -1, 1.25)])
def test_unprojected_bounds_are_reached(b, aligned, eigenvalue):
    k = torch.tensor([0.6, 0.8], dtype=torch.float64)
    a = erase(aligned * k, k, torch.full_like(k, b), "qed-nogate-noproj", 0.25)
    assert 1 - (a @ k).item() == pytest.approx(eigenvalue, abs=1e-15)


def test_spectrum_is_not_norm():
    k, q, b = (torch.tensor(x, dtype=torch.float64) for x in ([1.0, 0], [0.0, 1], [0.5, 0.5]))
    a = erase(q, k, b, "qed")
    close(a, torch.tensor([0.5, 0.1], dtype=torch.float64))
    M = torch.eye(2, dtype=torch.float64) - torch.outer(k, a)
    close(M, torch.tensor([[0.5, -0.1], [0, 1]], dtype=torch.float64))
    close(torch.linalg.eigvals(M).real.sort().values, torch.tensor([0.5, 1], dtype=torch.float64))
    assert (M @ q).norm().item() == pytest.approx(1.01**0.5, abs=1e-15)
