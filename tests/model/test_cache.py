"""The state in Transformers' cache: any way of cutting a sequence gives one result, and what cannot work is refused."""

import pytest
import torch
from transformers import DynamicCache

from qed.model.modeling import CACHE_FIELD
from qed.ops import ARMS

TOLERANCE = {"rtol": 1e-8, "atol": 1e-10}


def continue_with(model, pieces, **arguments):
    """Logits of pieces fed one after another through one cache."""
    cache, logits = DynamicCache(config=model.config), []
    for piece in pieces:
        output = model(piece, cache=cache, **arguments)
        assert output[CACHE_FIELD] is cache
        logits.append(output.logits)
    return torch.cat(logits, 1), cache


@pytest.mark.parametrize("arm", ARMS)
@torch.no_grad()
def test_a_sequence_cut_anywhere_equals_one_pass(arm, build, tokens):
    model, ids = build(arm=arm), tokens(2, 9)
    whole = model(ids).logits
    for cut in range(1, 9):
        pieces, _ = continue_with(model, [ids[:, :cut], ids[:, cut:]])
        torch.testing.assert_close(pieces, whole, **TOLERANCE)
    steps, _ = continue_with(model, ids.split(1, 1))
    torch.testing.assert_close(steps, whole, **TOLERANCE)


@torch.no_grad()
def test_a_step_of_many_tokens_equals_single_steps_with_a_filled_cache(build, tokens):
    model, ids = build(), tokens(1, 36)
    many, first = continue_with(model, [ids[:, :20], ids[:, 20:]])
    single, second = continue_with(model, [ids[:, :20], *ids[:, 20:].split(1, 1)])
    torch.testing.assert_close(many, single, **TOLERANCE)
    for x, y in zip(first.layers, second.layers, strict=True):
        torch.testing.assert_close(x.recurrent_states[0], y.recurrent_states[0], **TOLERANCE)
        torch.testing.assert_close(x.conv_states[0], y.conv_states[0], **TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
@torch.no_grad()
def test_the_state_is_float32(dtype, autocast, build, tokens):
    model = build(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        _, cache = continue_with(model, [tokens(1, 5), tokens(1, 1)])
    assert all(layer.recurrent_states[0].dtype == torch.float32 for layer in cache.layers)


@pytest.mark.parametrize("num_pads", [1, 2, 5])
@torch.no_grad()
def test_left_pads_change_nothing_and_their_content_not_a_bit(num_pads, build, tokens):
    model, ids = build(), tokens(1, 7)
    mask = torch.cat([torch.zeros(1, num_pads), torch.ones(1, 7)], 1)
    alone = model(ids)
    zeros, others = (
        model(torch.cat([pads, ids], 1), attention_mask=mask)
        for pads in (torch.zeros(1, num_pads, dtype=torch.long), tokens(1, num_pads))
    )
    # Matrix products of other sizes round otherwise, so only equal sizes can give equal bits.
    torch.testing.assert_close(zeros.logits[:, num_pads:], alone.logits, **TOLERANCE)
    assert torch.equal(zeros.logits[:, num_pads:], others.logits[:, num_pads:])
    for x, y, z in zip(*(output[CACHE_FIELD].layers for output in (zeros, others, alone)), strict=True):
        assert torch.equal(x.recurrent_states[0], y.recurrent_states[0])
        assert torch.equal(x.conv_states[0], y.conv_states[0])
        torch.testing.assert_close(x.recurrent_states[0], z.recurrent_states[0], **TOLERANCE)
        torch.testing.assert_close(x.conv_states[0], z.conv_states[0], **TOLERANCE)


@pytest.mark.parametrize("arm", ["qed", "qed-rand"])
@torch.no_grad()
def test_pads_anywhere_change_nothing_before_or_after_a_filled_cache(arm, build, tokens):
    model, ids = build(arm=arm), tokens(2, 11)
    first = torch.tensor([[1, 1, 0, 0, 0], [0, 1, 1, 0, 1]])
    second = torch.tensor([[0, 1, 1, 0, 1, 0], [1, 1, 1, 1, 1, 1]])
    cache = DynamicCache(config=model.config)
    model(ids[:, :5], attention_mask=first, cache=cache)
    padded = model(ids[:, 5:], attention_mask=torch.cat([first, second], 1), cache=cache).logits
    last = model(tokens(2, 1), attention_mask=torch.ones(2, 12), cache=cache).logits
    for row in range(2):
        real = torch.cat([ids[row, :5][first[row] == 1], ids[row, 5:][second[row] == 1], tokens(2, 1)[row]])
        alone = model(real[None]).logits[0]
        num_second = int(second[row].sum())
        torch.testing.assert_close(padded[row][second[row] == 1], alone[-1 - num_second : -1], **TOLERANCE)
        torch.testing.assert_close(last[row], alone[-1:], **TOLERANCE)


@torch.no_grad()
def test_a_right_padded_prefill_leaves_a_correct_cache(build, tokens):
    model, ids = build(), tokens(2, 9)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, 5:] = 0
    cache = model(ids, attention_mask=mask)[CACHE_FIELD]
    step = model(ids[:, 4:5], cache=cache, attention_mask=torch.cat([mask, torch.ones(2, 1)], 1)).logits
    alone = model(torch.cat([ids[:1, :5], ids[:1, 4:5]], 1)).logits
    torch.testing.assert_close(step[0], alone[0, -1:], **TOLERANCE)


@torch.no_grad()
def test_a_row_of_pads_alone_is_finite_and_leaves_zero_states(build, tokens):
    model = build()
    output = model(tokens(2, 4), attention_mask=torch.tensor([[0, 0, 0, 0], [1, 1, 1, 1]]))
    assert output.logits.isfinite().all()
    for layer in output[CACHE_FIELD].layers:
        assert not layer.recurrent_states[0][0].any()
        assert not layer.conv_states[0][0].any()


@torch.no_grad()
def test_permuted_rows_give_permuted_bits(build, tokens):
    model, ids = build(torch.float32), tokens(4, 6)
    order = torch.tensor([2, 0, 3, 1])
    assert torch.equal(model(ids[order]).logits, model(ids).logits[order])


@torch.no_grad()
def test_reordered_cache_follows_its_beams(build, tokens):
    model, ids, order = build(), tokens(3, 5), torch.tensor([2, 2, 0])
    _, cache = continue_with(model, [ids])
    cache.reorder_cache(order)
    step = tokens(3, 1)
    expected = model(torch.cat([ids[order], step], 1)).logits[:, -1:]
    torch.testing.assert_close(model(step, cache=cache).logits, expected, **TOLERANCE)


@torch.no_grad()
def test_a_reset_cache_starts_over(build, tokens):
    model, ids = build(), tokens(2, 6)
    _, cache = continue_with(model, [tokens(2, 4)])
    cache.reset()
    torch.testing.assert_close(model(ids, cache=cache).logits, model(ids).logits, **TOLERANCE)


def test_gradients_pass_through_the_cache(build, tokens):
    model, ids = build(), tokens(1, 8)
    model(ids).logits.square().sum().backward()
    whole = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    pieces, _ = continue_with(model, [ids[:, :2], ids[:, 2:5], ids[:, 5:]])
    pieces.square().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, whole[name], rtol=1e-7, atol=1e-9, msg=name)


def test_rolling_back_is_refused(build, tokens):
    model, ids = build(), tokens(1, 6)
    _, cache = continue_with(model, [ids])
    with pytest.raises(RuntimeError, match="crop"):
        cache.crop(-3)
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    with pytest.raises(ValueError, match="rolled back"):
        model(ids, cache=cache)
    for assistance in ({"prompt_lookup_num_tokens": 2}, {"assistant_model": build()}):
        with pytest.raises(ValueError, match="stateful"):
            model.generate(ids, max_new_tokens=4, do_sample=False, **assistance)


def test_caches_that_do_not_fit_are_refused(build, tokens):
    model = build()
    with pytest.raises(ValueError, match="DynamicCache"):
        model(tokens(1, 3), cache=DynamicCache())
    _, cache = continue_with(model, [tokens(2, 3)])
    with pytest.raises(ValueError, match="2 sequences; the input has 1"):
        model(tokens(1, 3), cache=cache)
    with pytest.raises(ValueError, match="continue from a cache"):
        model(tokens(1, 3), cache=cache, cu_seqlens=torch.tensor([0, 1, 3]))
    with pytest.raises(ValueError, match="two names"):
        model(tokens(2, 3), cache=cache, past_key_values=DynamicCache(config=model.config))
    with pytest.raises(ValueError, match="attention_mask must be"):
        model(tokens(2, 3), attention_mask=torch.ones(2, 2))
