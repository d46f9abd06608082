"""Every statistic against a token loop in float64 that shares no code with the probes."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from qed.ops import ARMS
from qed.ops.reference import recurrence
from qed.probes import ProbeConfig, measure, observe
from qed.probes.measure import Observer, read, text_windows

LENGTH, CONFIG = 300, ProbeConfig(length=300, num_tokens=600, chunk_tokens=128)


class Direct:
    """One layer's tokens of ``[B, T]`` ids, from the mixer's own ``recurrence_inputs`` and a loop over tokens."""

    def __init__(self, mixer, x):
        B, T = x.shape[:2]
        H, K = mixer.num_heads, mixer.key_dim
        self.q, self.k, self.v, self.a, self.g = mixer.recurrence_inputs(x)
        gates = mixer.gates_proj(x).sigmoid()
        self.b, self.w = gates[..., : H * K].reshape(B, T, H, K), gates[..., H * K :].reshape(B, T, H, -1)
        self.strength = mixer.strength().double()
        self.arm = ARMS[mixer.config.arm]
        source = mixer.random_direction.double().expand_as(self.q) if self.arm.direction == "random" else self.q
        self.u = source * self.b if self.arm.gate or self.arm.direction == "none" else source
        projected = self.u - self.k * (self.k * self.u).sum(-1, keepdim=True)
        unprojected_arm = self.arm.direction != "none" and not self.arm.project
        self.d, self.projected = (self.u if unprojected_arm else projected), projected
        self.base = self.b * self.k
        zero = torch.zeros(B, H, K, self.v.shape[-1], dtype=torch.float64)
        self.o, self.content, self.states = self.loop(self.a, zero)
        self.o_base, self.content_base, self.states_base = self.loop(self.base, zero)

    def loop(self, a, state):
        outputs, contents, states = [], [], []
        for t in range(a.shape[1]):
            contents.append(torch.einsum("bhkv,bhk->bhv", self.decayed(t, state), self.d[:, t]))
            output, state = self.step(t, a[:, t], state)
            outputs.append(output)
            states.append(state)
        return torch.stack(outputs, 1), torch.stack(contents, 1), torch.stack(states, 1)

    def decayed(self, t, state):
        return self.g[:, t].exp()[..., None] * state

    def step(self, t, a, state):
        decayed = self.decayed(t, state)
        residual = self.v[:, t] - torch.einsum("bhkv,bhk->bhv", decayed, a)
        state = decayed + torch.einsum("bhk,bhv->bhkv", self.k[:, t], residual)
        return torch.einsum("bhkv,bhk->bhv", state, self.q[:, t]), state

    def before(self, states, t):
        return states[:, t - 1] if t else torch.zeros_like(states[:, 0])

    def removed(self, name):
        """``o`` less the output with the correction removed, by running the step again."""
        if name == "all_steps":
            return self.o - self.o_base
        states, a = (self.states, self.base) if name == "this_step" else (self.states_base, self.a)
        left = [self.step(t, a[:, t], self.before(states, t))[0] for t in range(a.shape[1])]
        return self.o - torch.stack(left, 1)

    def transitions(self):
        eye = torch.eye(self.k.shape[-1], dtype=torch.float64)
        return (eye - self.k[..., None] * self.a[..., None, :]) * self.g.exp()[..., None, :]

    def samples(self):
        """Quantity -> samples ``[B, T, H]`` or ``[B, T, H, K]``, and for sampled ones their positions."""
        strength, norm = self.strength, torch.linalg.vector_norm
        rho = (self.q * self.k).sum(-1)
        change = strength * ((self.projected - self.u) * self.k).sum(-1)
        matrices, T = self.transitions(), self.k.shape[1]
        found = {
            "e": (1 - (self.a * self.k).sum(-1), None),
            "projection_change": (change.abs(), None),
            "rho": (rho, None),
            "content_norm": (norm(self.content, dim=-1), None),
            "transition_norm": (torch.linalg.svdvals(matrices)[..., 0], None),
            "gate": (self.b, None),
            "write_gate": (self.w, None),
            "decay_rate": (-self.g, None),
        }
        for span in (1, 16, 256):
            positions = [s + span - 1 for s in range(0, T - span + 1, max(span, 64))]
            norms = []
            for end in positions:
                product = matrices[:, end - span + 1]
                for t in range(end - span + 2, end + 1):
                    product = matrices[:, t] @ product
                norms.append(torch.linalg.svdvals(product)[..., 0])
            found[f"amplification_{span}"] = (torch.stack(norms, 1), positions)
        positions = list(range(63, T, 64))
        states = self.states[:, positions]
        squares = torch.linalg.svdvals(states).square()
        shares = squares / squares.sum(-1, keepdim=True)
        found["state_norm"] = (norm(states.flatten(-2), dim=-1), positions)
        found["effective_rank"] = ((-(shares * shares.log()).sum(-1)).exp(), positions)
        if self.arm.direction != "none":
            correction = norm(strength[:, None] * rho[..., None] * self.content, dim=-1)
            found["correction_share"] = (correction / norm(self.o, dim=-1), None)
            for name in ("this_step", "earlier_steps", "all_steps"):
                found[f"effect_{name}"] = (norm(self.removed(name), dim=-1) / norm(self.o, dim=-1), None)
        return found


def direct_layers(model, ids):
    inputs = []
    handles = [
        layer.mixer.register_forward_pre_hook(lambda mixer, given: inputs.append((mixer, given[0])))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(ids)
        found = [Direct(mixer, x) for mixer, x in inputs]
    for handle in handles:
        handle.remove()
    return found


@pytest.fixture(scope="module")
def measured(build, tokens):
    """Arm -> model, ids, direct layers, record and rows."""
    made = {}

    def get(arm):
        if arm not in made:
            model, ids = build(arm=arm), tokens(2, LENGTH)
            made[arm] = model, ids, direct_layers(model, ids), *measure(model, ids.tolist(), CONFIG, progress=False)
        return made[arm]

    return get


@pytest.mark.parametrize("arm", ["gdn2", "qed", "qed-nogate-noproj", "qed-rand"])
def test_every_statistic_is_that_of_a_token_loop(measured, arm):
    _, _, layers, record, rows = measured(arm)
    samples = [layer.samples() for layer in layers]
    checked = set()
    for row in [*record["summaries"], *rows]:
        name = row["quantity"]
        if name not in samples[0]:
            continue
        chosen = samples if row["layer"] is None else [samples[row["layer"]]]
        values = []
        for one in chosen:
            x, positions = one[name]
            positions = np.arange(x.shape[1]) if positions is None else np.array(positions)
            keep = np.ones_like(positions, dtype=bool)
            if row["start"] is not None:
                keep = (positions >= row["start"]) & (positions < row["end"])
            x = x[:, torch.as_tensor(keep)]
            values.append((x if row["head"] is None else x[:, :, row["head"]]).flatten())
        x = torch.cat(values).numpy()
        assert row["count"] == x.size
        exact = [x.mean(), x.min(), x.max()]
        np.testing.assert_allclose([row["mean"], row["min"], row["max"]], exact, rtol=1e-7, atol=1e-12)
        if name == "e":
            assert row["shares"]["outside (0, 1)"] == np.mean((x <= 0) | (x >= 1))
            assert row["shares"]["outside [-1, 1]"] == np.mean((x < -1) | (x > 1))
        resolution = record["quantities"].get(name, {"resolution": None})["resolution"]
        if resolution is not None and resolution["scale"] == "linear":
            median = np.quantile(x, 0.5, method="inverted_cdf")
            assert abs(row["quantiles"]["0.5"] - median) <= 2 * resolution["step"]
        checked.add((name, row["layer"] is None, row["head"] is None, row["start"] is None))
    assert {name for name, *_ in checked} == set(samples[0])
    groups = {(True, True, True), (False, True, True), (False, False, True), (True, True, False), (False, False, False)}
    for name in samples[0]:
        wanted = groups - {(True, True, True)} if name.startswith("effect_") else groups
        assert {tuple(rest) for one, *rest in checked if one == name} == wanted


def test_effects_and_attribution(measured):
    _, _, layers, record, _ = measured("qed")
    assert {(row["removed"], row["measure"]) for row in record["effects"]} == {
        (removed, kind) for removed in ("this step", "earlier steps", "all steps") for kind in ("relative", "norm")
    }
    names = {"this step": "this_step", "earlier steps": "earlier_steps", "all steps": "all_steps"}
    changes = {name: torch.stack([layer.removed(name) for layer in layers]) for name in names.values()}
    outputs = torch.stack([layer.o for layer in layers])
    for row in record["effects"]:
        size = changes[names[row["removed"]]].norm(dim=-1)
        size = size / outputs.norm(dim=-1) if row["measure"] == "relative" else size
        expected = [float(size.mean()), float(size.min()), float(size.max())]
        np.testing.assert_allclose([row["mean"], row["min"], row["max"]], expected, rtol=1e-7, atol=1e-13)
    for row in record["attribution"]:
        layer = slice(None) if row["layer"] is None else slice(row["layer"], row["layer"] + 1)
        tokens = slice(None) if row["start"] is None else slice(row["start"], row["end"])
        this, early, all_ = (changes[name][layer, :, tokens] for name in names.values())
        o = outputs[layer, :, tokens].square().sum()
        for name, change in (("this_step", this), ("earlier_steps", early), ("all_steps", all_)):
            assert row[f"rms_{name}_over_output"] == pytest.approx(float((change.square().sum() / o).sqrt()), rel=1e-7)
        share = float((this * all_).sum() / all_.square().sum())
        assert row["share_this_step"] == pytest.approx(share, rel=1e-6)
        through = float(((all_ - this) * all_).sum() / all_.square().sum())
        assert row["share_through_state"] == pytest.approx(through, rel=1e-6)
    assert len(record["attribution"]) == 1 + 2 + 4


def test_removing_the_correction_is_running_the_sequence_without_it(measured):
    """The three runs as whole sequences through the reference, for a few tokens."""
    layer = measured("qed")[2][1]
    zero = torch.zeros_like(layer.states[:, 0])
    for t in (0, 1, 70, 201):
        until = slice(0, t + 1)
        for name, changed in (("this_step", [t]), ("earlier_steps", range(t)), ("all_steps", range(t + 1))):
            a = layer.a[:, until].clone()
            a[:, list(changed)] = layer.base[:, list(changed)]
            o, _ = recurrence(layer.q[:, until], layer.k[:, until], layer.v[:, until], a, layer.g[:, until], zero)
            torch.testing.assert_close(layer.o[:, t] - o[:, -1], layer.removed(name)[:, t], rtol=1e-9, atol=1e-12)


def test_strengths_and_half_lives(measured):
    model, _, layers, record, rows = measured("qed")
    for row in record["summaries"]:
        if row["quantity"] == "strength" and row["head"] is not None:
            expected = float(model.model.layers[row["layer"]].mixer.strength().detach()[row["head"]])
            assert row["mean"] == pytest.approx(expected, rel=1e-12)
            assert row["count"] == 1
    half_lives = torch.stack([math.log(2) / -layer.g.mean((0, 1)) for layer in layers])
    for row in rows:
        if row["quantity"] == "half_life_by_channel":
            np.testing.assert_allclose(row["tokens"], half_lives[row["layer"], row["head"]].tolist(), rtol=1e-10)
    (row,) = [row for row in record["summaries"] if row["quantity"] == "half_life" and row["layer"] is None]
    assert row["count"] == half_lives.numel()
    np.testing.assert_allclose(row["mean"], float(half_lives.mean()), rtol=1e-10)


def test_losses_and_states_are_the_models_own(measured, build):
    model, ids, layers, record, _ = measured("qed")

    def nats(model):
        with torch.no_grad():
            logits = model(ids).logits[:, :-1]
        return F.cross_entropy(logits.mT.float(), ids[:, 1:], reduction="none").double()

    without = build(arm="qed", strength_scale=0.0)
    for name, losses in (("as_trained", nats(model)), ("without", nats(without))):
        assert record["loss"][name] == pytest.approx(float(losses.mean()), rel=1e-6)
        for bucket in record["loss"]["buckets"]:
            part = losses[:, max(bucket["start"] - 1, 0) : bucket["end"] - 1]
            assert bucket["num_targets"] == part.numel()
            assert bucket[name] == pytest.approx(float(part.mean()), rel=1e-6)
    assert record["loss"]["without"] != record["loss"]["as_trained"]
    assert record["state_difference"] < 1e-9
    _, cache = read(model, ids, 64)
    for layer, own in zip(layers, cache.layers, strict=True):
        torch.testing.assert_close(layer.states[:, -1], own.recurrent_states[0].double(), rtol=1e-9, atol=1e-11)


def test_an_arm_without_a_direction(measured):
    _, _, _, record, _ = measured("gdn2")
    (change,) = [row for row in record["summaries"] if row["quantity"] == "projection_change" and _whole(row)]
    assert (change["min"], change["max"]) == (0.0, 0.0)
    assert record["effects"] == record["attribution"] == []
    assert "without" not in record["loss"]


def test_chunks_and_batches_change_nothing_but_rounding(measured, build):
    model, ids, _, record, rows = measured("qed")
    config = ProbeConfig(length=300, num_tokens=600, chunk_tokens=320, batch_windows=1)
    other, other_rows = measure(model, ids.tolist(), config, progress=False)
    for one, two in zip([*record["summaries"], *rows], [*other["summaries"], *other_rows], strict=True):
        if "mean" in one:
            assert one["count"] == two["count"]
            assert one["mean"] == pytest.approx(two["mean"], rel=1e-7, abs=1e-12)


def test_observer_refuses_passes_that_do_not_fit(build, tokens):
    model = build()
    observer = Observer([layer.mixer for layer in model.model.layers], (0, 64))
    with observe(model, observer.receive), torch.no_grad():
        cache = model(tokens(1, 50), use_cache=True).cache
        with pytest.raises(ValueError, match="multiple of 64"):
            model(tokens(1, 50), cache=cache)


def test_a_model_that_diverged_is_refused(build, tokens):
    model = build()
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="not finite"):
        measure(model, tokens(1, 64).tolist(), ProbeConfig(length=64, num_tokens=64), progress=False)


def test_configs_and_windows(tokenizer):
    assert ProbeConfig(length=300, num_tokens=300).edges == [0, 64, 128, 256, 300]
    assert ProbeConfig(length=256, num_tokens=300).edges == [0, 64, 128, 256]
    assert ProbeConfig(length=40, num_tokens=300).edges == [0, 40]
    for wrong, message in (
        ({"length": 1}, "length"),
        ({"num_tokens": 10}, "num_tokens"),
        ({"chunk_tokens": 100}, "64"),
    ):
        with pytest.raises(ValueError, match=message):
            ProbeConfig(**wrong)
    config = ProbeConfig(length=16, num_tokens=40)
    windows = text_windows(["The grass is green. " * 40, "never read"], tokenizer, config)
    assert [len(window) for window in windows] == [16, 16]
    with pytest.raises(ValueError, match="less than one window"):
        text_windows(["short"], tokenizer, config)


def _whole(row):
    return row["layer"] is row["head"] is row["start"] is None
