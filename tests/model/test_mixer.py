"""The mixer against a loop written from facts.md section 5, and what must not depend on dtype or on neighbours."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from qed.model import Padding, QEDMixer
from qed.ops import ARMS, erase_vector

A_RANGE, DT_RANGE = (1.0, 16.0), (0.001, 0.1)


def random_mixer(config, dtype=torch.float64, **changes):
    torch.manual_seed(0)
    mixer = QEDMixer(config(**changes), layer_idx=1)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return mixer.to(dtype)


def strength_of(mixer, h):
    return 0.0 if mixer.theta is None else mixer.config.lambda_max / (1 + (-mixer.theta[h]).exp())


def by_hand(mixer, x_TD):
    """One sequence, one token and head at a time."""
    H, K, V = mixer.num_heads, mixer.key_dim, mixer.value_dim
    T, W = x_TD.shape[0], mixer.conv_weight.shape[1]
    projected = x_TD @ mixer.qkv_proj.weight.T
    outputs = torch.zeros(T, H, V, dtype=x_TD.dtype)
    state = torch.zeros(H, K, V, dtype=x_TD.dtype)
    for t in range(T):
        mixed = sum(projected[t - lag] * mixer.conv_weight[:, W - 1 - lag] for lag in range(W) if t >= lag)
        q, k, v = F.silu(mixed).split([H * K, H * K, H * V])
        erase, write = (x_TD[t] @ mixer.gates_proj.weight.T).sigmoid().split([H * K, H * V])
        decay = x_TD[t] @ mixer.decay_proj[0].weight.T @ mixer.decay_proj[1].weight.T
        gate = x_TD[t] @ mixer.output_gate_proj[0].weight.T @ mixer.output_gate_proj[1].weight.T
        gate = (gate + mixer.output_gate_proj[1].bias).sigmoid()
        q, k, erase, decay = (y.view(H, K) for y in (q, k, erase, decay))
        v, write, gate = (y.view(H, V) for y in (v, write, gate))
        for h in range(H):
            unit_q = q[h] / (q[h].square().sum() + 1e-6).sqrt()
            unit_k = k[h] / (k[h].square().sum() + 1e-6).sqrt()
            g = -mixer.A_log[h].exp() * F.softplus(decay[h] + mixer.dt_bias[h])
            z = None if mixer.random_direction is None else mixer.random_direction[h : h + 1]
            strength = mixer.config.strength_scale * strength_of(mixer, h)
            a = erase_vector(
                unit_q[None], unit_k[None], erase[h][None], strength, arm=mixer.config.arm, random_direction=z
            )[0]
            decayed = g.exp()[:, None] * state[h]
            state[h] = decayed + torch.outer(unit_k, write[h] * v[h] - decayed.T @ a)
            o = state[h].T @ unit_q
            o = o / (o.square().mean() + mixer.config.norm_eps).sqrt() * mixer.norm.weight
            outputs[t, h] = o * gate[h]
    return outputs.flatten(1) @ mixer.out_proj.weight.T


@pytest.mark.parametrize("arm", ARMS)
def test_the_mixer_is_the_papers_formula(arm, config):
    mixer = random_mixer(config, arm=arm, strength_scale=1.5, lambda_max=0.7)
    x = torch.randn(2, 11, 24, dtype=torch.float64)
    with torch.no_grad():
        expected = torch.stack([by_hand(mixer, row) for row in x])
        torch.testing.assert_close(mixer(x), expected, rtol=1e-9, atol=1e-11)


def test_packed_documents_equal_separate_ones_to_the_bit_after_the_convolution(config):
    mixer = random_mixer(config)
    x = torch.randn(1, 12, 24, dtype=torch.float64)
    offsets = [0, 1, 3, 8, 12]
    packed = mixer.recurrence_inputs(x, cu_seqlens=torch.tensor(offsets))
    whole = mixer(x, cu_seqlens=torch.tensor(offsets))
    for start, end in itertools.pairwise(offsets):
        alone = mixer.recurrence_inputs(x[:, start:end])
        for inside, outside in zip(packed, alone, strict=True):
            torch.testing.assert_close(inside[:, start:end], outside, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(whole[:, start:end], mixer(x[:, start:end]), rtol=1e-9, atol=1e-11)


def test_packing_excludes_padding_and_batches(config):
    mixer, offsets = random_mixer(config), torch.tensor([0, 2, 4])
    x = torch.randn(1, 4, 24, dtype=torch.float64)
    with pytest.raises(ValueError, match="cu_seqlens"):
        mixer(x.expand(2, -1, -1), cu_seqlens=offsets)
    with pytest.raises(ValueError, match="cu_seqlens"):
        mixer(x, cu_seqlens=offsets, padding=Padding.from_mask(torch.ones(1, 4)))


def test_padding_moves_tokens_to_the_front_and_back():
    mask = torch.tensor([[0, 1, 0, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]])
    padding = Padding.from_mask(mask)
    x = torch.arange(15).view(3, 5)
    moved = x.take_along_dim(padding.order, 1)
    assert moved[0].tolist() == [1, 3, 4, 0, 2]
    assert torch.equal(moved.take_along_dim(padding.inverse, 1), x)
    assert padding.lengths.tolist() == [3, 5, 0]
    assert padding.real.sum(1).tolist() == [3, 5, 0]


def test_decay_is_computed_and_kept_in_float32_under_bfloat16(config):
    mixer = random_mixer(config, torch.float32, arm="qed-rand")
    with torch.no_grad():
        mixer.A_log.copy_(torch.tensor([math.log(16), math.log(1.07)]))
    before = {name: getattr(mixer, name).clone() for name in ("A_log", "dt_bias", "theta", "random_direction")}
    x = torch.randn(1, 6, 24).bfloat16()
    low = mixer.to(torch.bfloat16)
    for name, value in before.items():
        assert torch.equal(getattr(low, name), value), name
    assert low.qkv_proj.weight.dtype == torch.bfloat16
    g = low.recurrence_inputs(x)[4]
    # The same bfloat16 projection, then float64 from there on.
    pre_activation = low.decay_proj(x).double().unflatten(-1, (2, 8))
    expected = -before["A_log"].double().exp()[:, None] * F.softplus(pre_activation + before["dt_bias"].double())
    assert g.dtype == torch.float32
    torch.testing.assert_close(g.double(), expected, rtol=1e-6, atol=0)


def test_autocast_leaves_decay_and_state_in_float32(config):
    mixer = random_mixer(config, torch.float32)
    x = torch.randn(1, 40, 24)
    with torch.autocast("cpu", torch.bfloat16):
        q, _, _, _, g = mixer.recurrence_inputs(x)
        low = mixer(x)
    assert q.dtype == torch.bfloat16
    assert g.dtype == torch.float32
    full = mixer(x)
    assert ((low.float() - full).square().mean() / full.square().mean()).sqrt() < 0.03


def test_float16_is_refused(config):
    with pytest.raises(ValueError, match="float16"):
        random_mixer(config, torch.float16)(torch.randn(1, 3, 24, dtype=torch.float16))


@pytest.mark.parametrize("A_log", [20.0, 60.0, 100.0])
@pytest.mark.parametrize("bias", [-50.0, 50.0])
def test_a_saturated_gate_has_finite_gradients(A_log, bias, config):
    mixer = random_mixer(config, torch.float32)
    with torch.no_grad():
        mixer.A_log.fill_(A_log)
        mixer.dt_bias.fill_(bias)
    mixer(torch.randn(1, 5, 24)).square().sum().backward()
    assert all(p.grad.isfinite().all() for p in mixer.parameters())


def test_zero_inputs_have_finite_gradients(config):
    mixer = random_mixer(config, torch.float32)
    x = torch.randn(1, 9, 24)
    x[:, 3:7] = 0
    mixer(x).square().sum().backward()
    assert all(p.grad.isfinite().all() for p in mixer.parameters())


def test_initial_values(config):
    torch.manual_seed(0)
    mixer = QEDMixer(config(num_heads=64, head_dim=16, arm="qed-rand", theta_init=-2.0), layer_idx=3)
    A, dt = mixer.A_log.exp(), F.softplus(mixer.dt_bias)
    assert A_RANGE[0] <= A.min() < A.max() <= A_RANGE[1]
    assert DT_RANGE[0] * 0.999 <= dt.min() < dt.max() <= DT_RANGE[1] * 1.001
    # Uniform in A: mean 8.5; log-uniform in dt: median 0.01.
    assert abs(A.mean() - 8.5) < 2
    assert 0.007 < dt.median() < 0.014
    assert torch.allclose(mixer.strength(), torch.tensor(0.25 / (1 + math.exp(2))))
    torch.testing.assert_close(mixer.random_direction.norm(dim=-1), torch.ones(64))
    again = QEDMixer(mixer.config, layer_idx=3)
    assert torch.equal(again.random_direction, mixer.random_direction)
    assert not torch.equal(QEDMixer(mixer.config, layer_idx=2).random_direction, mixer.random_direction)


def test_strength_scale_is_read_at_every_pass(config):
    mixer = random_mixer(config)
    x = torch.randn(1, 6, 24, dtype=torch.float64)
    full = mixer(x)
    mixer.config.strength_scale = 0.0
    gdn2 = random_mixer(config, arm="gdn2")
    gdn2.load_state_dict({k: v for k, v in mixer.state_dict().items() if k != "theta"})
    assert torch.equal(mixer(x), gdn2(x))
    assert not torch.equal(mixer(x), full)
