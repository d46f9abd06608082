import pytest
import torch
from torch import nn

from qed.ops import ARMS
from qed.probes import observe
from qed.probes.inside import look_inside
from qed.probes.measure import Observer, strength_scale


def num_hooks(model):
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_keep_their_bits_while_everything_is_measured(build, tokens, arm, dtype):
    model, ids = build(dtype, arm=arm), tokens(2, 96)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        plain = model(ids)
        observer = Observer([layer.mixer for layer in model.model.layers], (0, 64, 96))
        with observe(model, observer.receive):
            watched = model(ids)
        again = model(ids)
    assert torch.equal(plain.logits, watched.logits)
    assert torch.equal(plain.logits, again.logits)
    for one, other in zip(plain.cache.layers, watched.cache.layers, strict=True):
        assert torch.equal(one.recurrent_states[0], other.recurrent_states[0])
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert num_hooks(model) == 0


def test_gradients_and_generation_keep_their_bits(build, tokens):
    model, ids = build(torch.float32), tokens(1, 20)

    def gradients():
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    plain, answer = gradients(), model.generate(ids, max_new_tokens=4, do_sample=False)
    received = []
    with observe(model, lambda layer, mixer, activations: received.append((layer, activations.qkv.requires_grad))):
        watched, watched_answer = gradients(), model.generate(ids, max_new_tokens=4, do_sample=False)
    assert all(torch.equal(one, other) for one, other in zip(plain, watched, strict=True))
    assert torch.equal(answer, watched_answer)
    assert received[:2] == [(0, False), (1, False)]
    assert len(received) == 2 * (1 + 4)


def test_hooks_go_when_a_receiver_or_the_block_fails(build, tokens):
    model = build()

    def fail(layer, mixer, activations):
        raise RuntimeError("receiver")

    with pytest.raises(RuntimeError, match="receiver"), observe(model, fail):
        model(tokens(1, 4))
    with pytest.raises(KeyboardInterrupt), observe(model, fail):
        raise KeyboardInterrupt
    assert num_hooks(model) == 0
    with pytest.raises(RuntimeError), strength_scale(model, 0.0):  # noqa: PT012
        assert not model.model.layers[1].mixer.strength().any()
        raise RuntimeError
    assert model.config.strength_scale == 1.0
    assert model.model.layers[1].mixer.strength().all()


def test_pads_packed_documents_and_other_models_are_refused(build, tokens):
    model = build()
    with observe(model, lambda *given: None):
        mask = torch.ones(2, 6, dtype=torch.long)
        mask[0, 0] = 0
        with pytest.raises(ValueError, match="no attention_mask with pads"):
            model(tokens(2, 6), attention_mask=mask)
        with pytest.raises(ValueError, match="cu_seqlens"):
            model(tokens(1, 6), cu_seqlens=torch.tensor([0, 2, 6]))
    with pytest.raises(ValueError, match="Linear has none"), observe(nn.Linear(2, 2), print):
        pass
    assert num_hooks(model) == 0


@pytest.mark.parametrize("arm", ARMS)
def test_what_is_seen_is_what_the_operator_gets(build, tokens, arm):
    model, seen, inputs = build(arm=arm), [], []
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mixer.register_forward_pre_hook(lambda mixer, given: inputs.append(mixer.recurrence_inputs(given[0])))
        with observe(model, lambda layer, mixer, caught: seen.append(look_inside(mixer, caught)[0])):
            model(tokens(2, 30))
    for inside, expected in zip(seen, inputs, strict=True):
        for name, x in zip("qkvag", expected, strict=True):
            torch.testing.assert_close(getattr(inside, name), x, rtol=1e-12, atol=1e-14)
