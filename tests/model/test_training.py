"""Loss, packing, checkpointing and compilation."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from qed.model.modeling import CACHE_FIELD

OFFSETS = [0, 3, 4, 10]


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def packed(build, tokens):
    """Model, a row of three documents and its offsets."""
    return build(), tokens(1, OFFSETS[-1]), torch.tensor(OFFSETS, dtype=torch.int32)


def test_loss_is_the_mean_over_targets_or_their_sum_over_the_given_number(build, tokens):
    model, ids = build(), tokens(2, 8)
    labels = ids.clone()
    labels[0, :5] = -100
    output = model(ids, labels=labels)
    losses = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    num_targets = int((labels[:, 1:] != -100).sum())
    torch.testing.assert_close(output.loss.double(), losses / num_targets, rtol=1e-6, atol=0)
    for count in (20, torch.tensor(20)):
        loss = model(ids, labels=labels, num_items_in_batch=count).loss
        torch.testing.assert_close(loss.double(), losses / 20, rtol=1e-6, atol=0)


@pytest.mark.parametrize("count", [None, 0, 7])
def test_without_a_target_the_loss_is_zero_with_zero_gradient(count, build, tokens):
    model, ids = build(torch.float32), tokens(2, 5)
    extra = {} if count is None else {"num_items_in_batch": torch.tensor(count)}
    loss = model(ids, labels=torch.full_like(ids, -100), **extra).loss
    loss.backward()
    assert loss.item() == 0
    assert all(not grad.any() for grad in gradients(model).values())


def test_an_ignored_micro_batch_leaves_the_other_alone(build, tokens):
    model, ids = build(), tokens(2, 5)
    model(ids[:1], labels=ids[:1], num_items_in_batch=4).loss.backward()
    alone = gradients(model)
    model(ids[1:], labels=torch.full_like(ids[1:], -100), num_items_in_batch=4).loss.backward()
    assert all(torch.equal(grad, alone[name]) for name, grad in gradients(model).items())


def test_labels_must_match_the_logits(build, tokens):
    with pytest.raises(ValueError, match="labels must be"):
        build()(tokens(1, 5), labels=tokens(1, 5), logits_to_keep=2)


def test_packed_documents_equal_separate_ones(packed):
    model, ids, offsets = packed
    output = model(ids, cu_seqlens=offsets, labels=ids)
    assert output.get(CACHE_FIELD) is None
    losses = []
    for start, end in itertools.pairwise(OFFSETS):
        piece = ids[:, start:end]
        alone = model(piece, labels=piece)
        torch.testing.assert_close(output.logits[:, start:end], alone.logits, rtol=1e-8, atol=1e-10)
        losses.append(alone.loss * (end - start - 1))
    # The last token of a document does not predict the first of the next: 2 + 0 + 5 targets.
    torch.testing.assert_close(output.loss, sum(losses) / 7, rtol=1e-5, atol=0)


def test_every_way_to_name_the_documents_gives_the_same_bits(packed):
    model, ids, offsets = packed
    expected = model(ids, cu_seqlens=offsets, labels=ids)
    positions = torch.tensor([[0, 1, 2, 0, 0, 1, 2, 3, 4, 5]])
    ways = (
        {"position_ids": positions},
        {"position_ids": positions, "attention_mask": torch.ones(1, 10)},
        {"position_ids": positions, "cu_seqlens": offsets.long()},
        {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 6, "max_length_k": 6},
        {"cu_seqlens": offsets, "attention_mask": torch.ones(1, 10)},
    )
    for way in ways:
        output = model(ids, labels=ids, **way)
        assert torch.equal(output.logits, expected.logits), way
        assert torch.equal(output.loss, expected.loss), way


def test_nothing_passes_between_documents(packed):
    model, ids, offsets = packed
    embeddings = model.get_input_embeddings()(ids).detach().requires_grad_()
    logits = model(inputs_embeds=embeddings, cu_seqlens=offsets).logits
    logits[:, 4:].square().sum().backward()
    assert not embeddings.grad[:, :4].any()
    assert embeddings.grad[:, 4:].any(-1).all()
    changed = embeddings.detach().clone()
    changed[:, :4] += 1
    assert torch.equal(model(inputs_embeds=changed, cu_seqlens=offsets).logits[:, 4:], logits[:, 4:])


def test_ordinary_positions_pack_nothing(build, tokens):
    model, ids = build(), tokens(2, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    padded_positions = torch.tensor([[0, 0, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]])
    assert torch.equal(model(ids, position_ids=torch.arange(3, 9)[None]).logits, model(ids).logits)
    expected = model(ids, attention_mask=mask).logits
    assert torch.equal(model(ids, attention_mask=mask, position_ids=padded_positions).logits, expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attention_mask": torch.tensor([[0, 1, 1, 1]]), "cu_seqlens": torch.tensor([0, 2, 4])}, "give one of them"),
        ({"cu_seqlens": torch.tensor([0, 3, 2, 4])}, "rise strictly from 0 to T = 4"),
        ({"cu_seqlens": torch.tensor([0, 2])}, "rise strictly from 0 to T = 4"),
        ({"cu_seqlens": torch.tensor([0.0, 4.0])}, "int32 or int64"),
        (
            {"position_ids": torch.tensor([[0, 1, 0, 1]]), "attention_mask": torch.tensor([[1, 1, 1, 0]])},
            "without pads",
        ),
        ({"attention_mask": torch.ones(1, 1, 4, 4)}, "attention_mask must be"),
    ],
)
def test_contradictions_are_refused(arguments, message, build, tokens):
    with pytest.raises(ValueError, match=message):
        build()(tokens(1, 4), **arguments)


def test_packing_needs_a_batch_of_one(build, tokens):
    model, ids = build(), tokens(2, 4)
    with pytest.raises(ValueError, match="batch of one"):
        model(ids, cu_seqlens=torch.tensor([0, 2, 4]))
    with pytest.raises(ValueError, match="batch of one"):
        model(ids, position_ids=torch.tensor([[0, 1, 2, 3], [0, 1, 0, 1]]))


@pytest.mark.parametrize("arguments", [{}, {"cu_seqlens": torch.tensor(OFFSETS)}, {"use_cache": True}])
def test_gradient_checkpointing_changes_no_gradient(arguments, build, tokens):
    model, ids = build().train(), tokens(1, 10)
    model(ids, labels=ids, **arguments).loss.backward()
    expected = gradients(model)
    model.zero_grad()
    model.gradient_checkpointing_enable()
    output = model(ids, labels=ids, **arguments)
    assert output.get(CACHE_FIELD) is None
    output.loss.backward()
    found = gradients(model)
    assert found.keys() == expected.keys() == dict(model.named_parameters()).keys()
    for name, grad in found.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-10, atol=1e-14, msg=name)


def test_gradient_checkpointing_recomputes_the_mixer(build, tokens):
    model, ids = build().train(), tokens(1, 10)
    calls = []
    model.model.layers[1].mixer.register_forward_hook(lambda *_: calls.append(None))
    model.gradient_checkpointing_enable()
    model(ids, labels=ids).loss.backward()
    assert len(calls) == 2


def test_training_keeps_no_cache_unless_asked(build, tokens):
    model = build().train()
    assert model(tokens(1, 3)).get(CACHE_FIELD) is None
    assert model(tokens(1, 3), use_cache=True).get(CACHE_FIELD) is not None
    assert model.eval()(tokens(1, 3)).get(CACHE_FIELD) is not None


@torch.no_grad()
def test_hidden_states_are_recorded_in_the_order_of_the_tokens(build, tokens):
    model, ids = build(), tokens(2, 5)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    states = model(ids, attention_mask=mask, output_hidden_states=True).hidden_states
    assert len(states) == 4
    assert torch.equal(states[0], model.get_input_embeddings()(ids))
    alone = model(ids[:1, 2:], output_hidden_states=True).hidden_states
    for padded, expected in zip(states, alone, strict=True):
        torch.testing.assert_close(padded[:1, 2:], expected, rtol=1e-8, atol=1e-10)


def test_gradients_under_autocast_reach_float32_masters(build, tokens):
    model, ids = build(torch.float32, initializer_range=0.1).train(), tokens(2, 9)
    model(ids, labels=ids).loss.backward()
    expected = gradients(model)
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, labels=ids).loss
    loss.backward()
    assert all(grad.dtype == torch.float32 for grad in gradients(model).values())
    errors = [(grad - expected[name]).norm() / expected[name].norm() for name, grad in gradients(model).items()]
    assert torch.stack(errors).median() < 0.1


def test_one_graph_without_breaks(build, tokens):
    model = build(num_hidden_layers=1, backend="reference").train()
    # The graph is captured and run without a code generator, which would take most of a minute.
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for ids in (tokens(1, 4), tokens(1, 4).flip(1)):
        expected = model(ids, labels=ids, attention_mask=torch.ones(1, 4))
        found = compiled(ids, labels=ids, attention_mask=torch.ones(1, 4))
        torch.testing.assert_close(found.logits, expected.logits)
        torch.testing.assert_close(found.loss, expected.loss)
