"""The paper's identities (section 3) on real activations, and the cases where the eigenvalue leaves (0, 1)."""

import math

import pytest
import torch

from qed.ops import ARMS, erase_vector
from qed.probes import Activations, observe
from qed.probes.inside import Inside, effective_rank, look_inside, run, transition, transition_norm
from qed.probes.measure import Observer

PROJECTED = ["qed", "qed-nogate", "qed-rand"]
UNPROJECTED = ["qed-noproj", "qed-nogate-noproj"]
EXACT = {"rtol": 1e-10, "atol": 1e-12}


def activations_of(model, ids):
    """Per layer: what the probes see, and a state and token in the middle of the sequence."""
    seen = []
    with torch.no_grad(), observe(model, lambda layer, mixer, caught: seen.append(look_inside(mixer, caught)[0])):
        model(ids)
    cases = []
    for inside in seen:
        B, T, H, K = inside.k.shape
        empty = inside.v.new_zeros(B, H, K, inside.v.shape[-1])
        before = run(inside.part(slice(0, T - 1)), empty, a=inside.a[:, :-1], direction=inside.d[:, :-1]).state
        cases.append((inside, inside.part(slice(T - 1, T)), before))
    return cases


@pytest.fixture(scope="module")
def cases(build, tokens):
    return lambda arm: activations_of(build(arm=arm), tokens(2, 40))


def read(state, x):
    return torch.einsum("bhkv,bhk->bhv", state, x[:, 0])


def after(token, state, a):
    """``Sbar``, the residual, the new state and the output of one token."""
    decayed = token.g[:, 0].exp()[..., None] * state
    residual = token.v[:, 0] - read(decayed, a)
    new = decayed + token.k[:, 0, ..., None] * residual[..., None, :]
    return decayed, residual, new, read(new, token.q)


@pytest.mark.parametrize("arm", ARMS)
def test_1_an_edit_answers_a_probe_by_its_overlap_with_the_key(cases, arm):
    for _, token, state in cases(arm):
        decayed, residual, new, _ = after(token, state, token.a)
        probe = torch.randn_like(token.k)
        change = read(new, probe) - read(decayed, probe)
        torch.testing.assert_close(change, (probe * token.k).sum(-1)[:, 0, :, None] * residual, **EXACT)
        blind = probe - token.k * (probe * token.k).sum(-1, keepdim=True) / token.k.square().sum(-1, keepdim=True)
        torch.testing.assert_close(read(new, blind), read(decayed, blind), **EXACT)


@pytest.mark.parametrize("arm", ARMS)
def test_2_and_5_what_the_correction_changes(cases, arm):
    for _, token, state in cases(arm):
        decayed, _, new, o = after(token, state, token.a)
        _, _, plain, o_plain = after(token, state, token.base)
        found = read(decayed, token.d)
        scale = token.strength[:, None]
        torch.testing.assert_close(
            new - plain, -scale[..., None] * token.k[:, 0, ..., None] * found[:, :, None], **EXACT
        )
        torch.testing.assert_close(o - o_plain, -scale * token.rho[:, 0, ..., None] * found, **EXACT)
        torch.testing.assert_close(run(token, state, a=token.a, direction=token.d).content[:, 0], found, **EXACT)
        # a query orthogonal to the key reads no change, and yet the state is another
        blind = token.q - token.k * token.rho[..., None] / token.k.square().sum(-1, keepdim=True)
        torch.testing.assert_close(read(new, blind), read(plain, blind), **EXACT)
        if arm != "gdn2":
            assert (new - plain).abs().amax((-1, -2)).min() > 1e-6


@pytest.mark.parametrize("arm", ARMS)
def test_3_what_gdn2_reads(cases, arm):
    for _, token, state in cases(arm):
        decayed, _, _, o = after(token, state, token.base)
        rho = token.rho[..., None]
        kept = token.v[:, 0] + read(decayed, (1 - token.b) * token.k)
        # the key's length is a little under 1 (its norm has an epsilon), so its own square stays in the formula
        expected = read(decayed, token.q - rho * token.k) + rho[:, 0] * kept
        torch.testing.assert_close(o, expected, **EXACT)


@pytest.mark.parametrize("arm", ARMS)
def test_4_the_spectrum_of_one_edit(cases, arm):
    for inside, _, _ in cases(arm):
        matrices = torch.eye(inside.k.shape[-1], dtype=torch.float64) - inside.k[..., None] * inside.a[..., None, :]
        values = torch.linalg.eigvals(matrices)
        nearest_e = (values - inside.e[..., None]).abs().amin(-1)
        assert nearest_e.max() < 1e-7
        others = (values - 1).abs().sort(-1).values[..., :-1]
        assert others.max() < 1e-6
        gap = 1 - inside.k.square().sum(-1)
        assert gap.min() >= 0
        if not ARMS[arm].project and arm != "gdn2":
            low, high = -inside.strength.max(), 1 + inside.strength.max()
            assert ((inside.e >= low) & (inside.e <= high)).all()
            continue
        assert ((inside.e > 0) & (inside.e < 1)).all()
        # as far as the key is a unit vector, the direction does not enter
        base = 1 - (inside.b * inside.k.square()).sum(-1)
        slack = inside.strength.abs() * gap * inside.q.norm(dim=-1)
        assert ((inside.e - base).abs() <= slack + 1e-12).all()


@pytest.mark.parametrize("arm", [*PROJECTED, *UNPROJECTED])
def test_4_a_counterfactual_projection_is_measured_as_it_is(cases, build, tokens, arm):
    other = {"qed": "qed-noproj", "qed-nogate": "qed-nogate-noproj", "qed-noproj": "qed",
             "qed-nogate-noproj": "qed-nogate"}.get(arm)  # fmt: skip
    for inside, _, _ in cases(arm):
        if other is None:
            assert inside.projection_change.abs().max() > 1e-4
            continue
        a = erase_vector(inside.q, inside.k, inside.b, inside.strength, arm=other)
        change = inside.e - (1 - (a * inside.k).sum(-1))
        change = change if ARMS[arm].project else -change
        torch.testing.assert_close(inside.projection_change, change, rtol=1e-8, atol=1e-12)
        assert change.abs().max() > 1e-3


def test_6_the_order_of_gate_and_projection_matters(cases):
    for inside, _, _ in cases("qed"):
        swapped = inside.b * (inside.q - inside.k * inside.rho[..., None])
        assert (inside.d - swapped).norm(dim=-1).median() > 1e-3
        own_key = inside.b * inside.k
        own_key = own_key - inside.k * (inside.k * own_key).sum(-1, keepdim=True)
        assert own_key.norm(dim=-1).median() > 1e-3


def made(k, q, b, strength, arm="qed", value=0.0):
    """One token of one head by hand."""
    k, q, b = (torch.tensor([[[x]]], dtype=torch.float64) for x in (k, q, b))
    base = b * k
    a = erase_vector(q, k, b, strength, arm=arm)
    v = torch.full((1, 1, 1, 1), value, dtype=torch.float64)
    return Inside(
        q=q, k=k, v=v, a=a, g=torch.zeros_like(k), b=b, w=torch.ones_like(v), d=(a - base) / strength, base=base,
        strength=torch.tensor([strength], dtype=torch.float64), projection_change=torch.zeros(1, 1, 1),
    )  # fmt: skip


def test_7_the_worked_example():
    token = made((1.0, 0.0), (0.6, 0.8), (0.5, 0.5), 0.2, value=1.0)
    state = torch.tensor([[[[2.0], [3.0]]]], dtype=torch.float64)
    qed = run(token, state, a=token.a, direction=token.d)
    gdn2 = run(token, state, a=token.base, direction=token.d)
    assert gdn2.output.item() == pytest.approx(3.6, abs=1e-12)
    assert gdn2.content.item() == pytest.approx(1.2, abs=1e-12)
    torch.testing.assert_close(qed.state.flatten(), torch.tensor([1.76, 3.0], dtype=torch.float64))
    assert qed.output.item() == pytest.approx(3.456, abs=1e-12)


def test_8_the_spectrum_is_not_the_norm():
    token = made((1.0, 0.0), (0.0, 1.0), (0.5, 0.5), 0.2)
    matrix = torch.tensor([[0.5, -0.1], [0.0, 1.0]], dtype=torch.float64)
    product = transition(token, torch.eye(2, dtype=torch.float64)[None, None])
    torch.testing.assert_close(product[0, 0], matrix)
    norm = transition_norm(token.k, token.a, token.g).item()
    assert norm == pytest.approx(float(torch.linalg.matrix_norm(matrix, 2)), rel=1e-12)
    assert norm >= math.sqrt(1.01)
    assert token.e.item() == 0.5


@pytest.mark.parametrize("arm", ["gdn2", "qed"])
def test_8_transitions_with_decay_amplify_although_e_is_inside(cases, arm):
    """No statement about stability follows from e: norms above 1 occur with every e in (0, 1)."""
    for inside, _, _ in cases(arm):
        norms = transition_norm(inside.k, inside.a, torch.zeros_like(inside.g))
        assert ((inside.e > 0) & (inside.e < 1)).all()
        assert (norms > 1).all()


def aimed(mixer, query, key, erase):
    """Activations whose normalised query and key have one channel, and whose erase gate is (nearly) 0 or 1."""
    H, K, V = mixer.num_heads, mixer.key_dim, mixer.value_dim
    with torch.no_grad():
        mixer.conv_weight.zero_()
        mixer.conv_weight[:, -1] = 1
    channel = torch.zeros(H, K, dtype=torch.float64)
    q, k = channel.clone(), channel.clone()
    q[:, 0], k[:, 0] = query, key
    ones = torch.ones(1, 70, 1, dtype=torch.float64)
    qkv = torch.cat([q.flatten(), k.flatten(), torch.ones(H * V, dtype=torch.float64)]) * ones
    gates = torch.cat([torch.full((H * K,), erase), torch.zeros(H * V)]).double() * ones
    return Activations(qkv, gates, torch.zeros(1, 70, H * K, dtype=torch.float64))


@pytest.mark.parametrize(
    ("arm", "query", "erase", "expected"),
    [
        ("qed-noproj", 5.0, 30.0, lambda s: -s),
        ("qed-nogate-noproj", 5.0, 30.0, lambda s: -s),
        # SiLU gives a small negative number here, and the norm makes it -1: q = -k
        ("qed-nogate-noproj", -1.3, -30.0, lambda s: 1 + s),
    ],
)
def test_unprojected_arms_leave_the_interval(build, arm, query, erase, expected):
    mixers = [layer.mixer for layer in build(arm=arm).model.layers]
    observer = Observer(mixers, (0, 64, 70))
    for layer, mixer in enumerate(mixers):
        observer.receive(layer, mixer, aimed(mixer, query, 5.0, erase))
    record, _ = observer.result()
    rows = [row for row in record["summaries"] if row["quantity"] == "e"]
    assert {row["shares"]["outside (0, 1)"] for row in rows} == {1.0}
    assert {row["shares"]["outside [-1, 1]"] for row in rows} == {float(expected(0.5) > 1)}
    for row in rows:
        if row["head"] is not None:
            strength = float(mixers[row["layer"]].strength().detach()[row["head"]])
            assert row["mean"] == pytest.approx(expected(strength), abs=1e-4)


def test_projected_arms_stay_inside_where_unprojected_ones_leave(build):
    mixers = [layer.mixer for layer in build(arm="qed").model.layers]
    observer = Observer(mixers, (0, 70))
    for layer, mixer in enumerate(mixers):
        observer.receive(layer, mixer, aimed(mixer, 5.0, 5.0, 3.0))
    for row in observer.result()[0]["summaries"]:
        if row["quantity"] == "e":
            assert row["shares"]["outside (0, 1)"] == 0
            assert row["mean"] == pytest.approx(1 - 1 / (1 + math.exp(-3)), abs=1e-4)


@pytest.mark.parametrize("scale", [1e-6, 0.1, 1.0, 30.0])
@pytest.mark.parametrize("decay", [0.0, 1e-3, 1.0, 50.0])
def test_transition_norm_is_the_largest_singular_value(scale, decay):
    generator = torch.Generator().manual_seed(0)
    k, a, g = (torch.randn(200, 7, generator=generator, dtype=torch.float64) for _ in range(3))
    k = k / k.norm(dim=-1, keepdim=True)
    k[:3] = 0
    a, g = a * scale, -g.abs() * decay
    a[3:6] = k[3:6]
    matrices = (torch.eye(7, dtype=torch.float64) - k[..., None] * a[..., None, :]) * g.exp()[..., None, :]
    torch.testing.assert_close(transition_norm(k, a, g), torch.linalg.svdvals(matrices)[..., 0], rtol=1e-9, atol=1e-9)


def test_effective_rank_counts_directions():
    basis = torch.linalg.qr(torch.randn(6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
    for rank in (1, 3, 6):
        assert effective_rank(basis[:, :rank] @ basis[:rank]).item() == pytest.approx(rank, rel=1e-9)
    assert effective_rank(torch.zeros(2, 3, dtype=torch.float64)).isnan()
