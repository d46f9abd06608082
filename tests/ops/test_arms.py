import pytest
import torch
import torch.nn.functional as F

from qed.ops import ARMS, Arm, erase_vector, get_arm


@pytest.fixture
def parts():
    """Query, key, gate ``[B, T, H, K]``, strength ``[H]`` and random directions ``[H, K]``."""
    generator = torch.Generator().manual_seed(0)
    q, k, b = torch.randn(3, 2, 3, 2, 5, generator=generator, dtype=torch.float64)
    z = F.normalize(torch.randn(2, 5, generator=generator, dtype=torch.float64), dim=-1)
    return F.normalize(q, dim=-1), F.normalize(k, dim=-1), b.sigmoid(), torch.tensor([0.2, -0.7]).double(), z


def project(x, k):
    return x - k * (k * x).sum(-1, keepdim=True)


FORMULAS = {
    "gdn2": lambda q, k, b, z: torch.zeros_like(q),
    "qed": lambda q, k, b, z: project(b * q, k),
    "qed-nogate": lambda q, k, b, z: project(q, k),
    "qed-noproj": lambda q, k, b, z: b * q,
    "qed-nogate-noproj": lambda q, k, b, z: q.clone(),
    "qed-rand": lambda q, k, b, z: project(b * z, k),
}


def test_every_arm_has_a_formula_here():
    assert FORMULAS.keys() == ARMS.keys()


@pytest.mark.parametrize("arm", FORMULAS)
def test_arm_is_its_formula(arm, parts):
    q, k, b, strength, z = parts
    a = erase_vector(q, k, b, strength, arm=arm, random_direction=z)
    torch.testing.assert_close(a, b * k + strength[:, None] * FORMULAS[arm](q, k, b, z), rtol=0, atol=1e-15)
    assert torch.equal(erase_vector(q, k, b, 0.0, arm=arm, random_direction=z), b * k)


@pytest.mark.parametrize("arm", [name for name in ARMS if name != "gdn2"])
def test_strength_is_linear_and_signed(arm, parts):
    q, k, b, strength, z = parts
    plus, minus = (erase_vector(q, k, b, s * strength, arm=arm, random_direction=z) for s in (1, -1))
    assert not torch.equal(plus, b * k)
    torch.testing.assert_close(plus + minus, 2 * b * k, rtol=0, atol=1e-15)


@pytest.mark.parametrize("arm", ["qed", "qed-nogate", "qed-rand"])
def test_projected_direction_is_orthogonal_to_the_key(arm, parts):
    q, k, b, _, z = parts
    d = erase_vector(q, k, b, 1.0, arm=arm, random_direction=z) - b * k
    assert (d * k).sum(-1).abs().max() < 1e-15


def test_gate_and_projection_do_not_commute(parts):
    q, k, b, _, _ = parts
    assert (project(b * q, k) - b * project(q, k)).abs().max() > 1e-2
    assert (erase_vector(k, k, b, 1.0) - b * k).abs().max() > 1e-2, "q = k leaves a direction when the gate varies"
    assert (erase_vector(k, k, torch.full_like(b, 0.5), 1.0) - 0.5 * k).abs().max() < 1e-15


def test_number_and_one_value_a_head_agree(parts):
    q, k, b, _, _ = parts
    tensor = torch.full((2,), 0.3, dtype=torch.float64)
    assert torch.equal(erase_vector(q, k, b, 0.3), erase_vector(q, k, b, tensor))
    assert torch.equal(erase_vector(q, k, b, 0.3), erase_vector(q, k, b, tensor[0]))


def test_gradients(parts):
    q, k, b, strength, _ = (x.clone().requires_grad_() for x in parts)
    assert torch.autograd.gradcheck(lambda *x: erase_vector(*x), (q, k, b, strength), fast_mode=True)


def test_switches_are_independent():
    assert get_arm("qed") == Arm("query", gate=True, project=True)
    combinations = {(arm.gate, arm.project) for arm in ARMS.values() if arm.direction == "query"}
    assert len(combinations) == 4


def test_errors_name_what_was_given_and_what_is_wanted(parts):
    q, k, b, strength, z = parts
    with pytest.raises(ValueError, match=r"unknown arm 'qed-rnd'; did you mean 'qed-rand'\? .*gdn2"):
        erase_vector(q, k, b, strength, arm="qed-rnd")
    with pytest.raises(ValueError, match=r"share one shape \[..., H, K\]; got .*\[2, 3, 2, 4\]"):
        erase_vector(q, k, b[..., :4], strength)
    with pytest.raises(ValueError, match=r"strength must be a number or \[H\] = \[2\]; got \[3\]"):
        erase_vector(q, k, b, torch.ones(3))
    with pytest.raises(ValueError, match=r"'qed-rand' needs random_direction \[H, K\] = \[2, 5\]; got None"):
        erase_vector(q, k, b, strength, arm="qed-rand")
    with pytest.raises(ValueError, match=r"random_direction \[H, K\] = \[2, 5\]; got \[5\]"):
        erase_vector(q, k, b, strength, arm="qed-rand", random_direction=z[0])
