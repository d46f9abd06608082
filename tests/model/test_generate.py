"""generate against loops that keep no cache."""

import pytest
import torch
from transformers import DynamicCache

GREEDY = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 0}


@torch.no_grad()
def argmax_loop(model, ids, num_tokens=6):
    for _ in range(num_tokens):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return ids


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 9])
def test_greedy_is_an_argmax_loop(length, batch_size, build, tokens):
    model, ids = build(), tokens(batch_size, length)
    assert torch.equal(model.generate(ids, **GREEDY), argmax_loop(model, ids))


def test_tokens_differ_so_that_the_loop_tests_something(build, tokens):
    assert argmax_loop(build(), tokens(2, 4))[:, 4:].unique().numel() > 3


def test_left_padded_rows_generate_what_they_do_alone(build, tokens):
    model = build()
    rows = [tokens(1, n) for n in (1, 3, 8)]
    padded = torch.cat([torch.cat([torch.zeros(1, 8 - r.shape[1], dtype=torch.long), r], 1) for r in rows])
    mask = torch.stack([(torch.arange(8) >= 8 - r.shape[1]).long() for r in rows])
    together = model.generate(padded, attention_mask=mask, **GREEDY)[:, 8:]
    for row, new in zip(rows, together, strict=True):
        assert torch.equal(argmax_loop(model, row)[0, row.shape[1] :], new)


def test_beams_with_a_cache_equal_beams_without(build, tokens):
    model, ids = build(), tokens(2, 4)
    beams = {**GREEDY, "num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.0}
    assert torch.equal(model.generate(ids, **beams), model.generate(ids, use_cache=False, **beams))


def test_sampling_with_a_cache_equals_sampling_without(build, tokens):
    model, ids, drawn = build(), tokens(2, 4), []
    for use_cache in (True, False):
        torch.manual_seed(3)
        drawn.append(model.generate(ids, do_sample=True, max_new_tokens=8, pad_token_id=0, use_cache=use_cache))
    assert torch.equal(*drawn)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
def test_generation_goes_on_from_a_cache_that_the_caller_holds(name, build, tokens):
    model, ids = build(), tokens(1, 7)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :4], **{name: cache})
    # Linear layers keep no length, so only the new tokens are given.
    out = model.generate(ids[:, 4:], **{name: cache}, **GREEDY)
    assert torch.equal(out[:, 3:], argmax_loop(model, ids)[:, 7:])


def test_generation_from_embeddings(build, tokens):
    model, ids = build(), tokens(2, 5)
    out = model.generate(inputs_embeds=model.get_input_embeddings()(ids), **GREEDY)
    assert torch.equal(out, argmax_loop(model, ids)[:, 5:])


@torch.no_grad()
def test_logits_to_keep(build, tokens):
    model, ids = build(), tokens(2, 6)
    whole = model(ids).logits
    assert model(ids, logits_to_keep=2).logits.shape[1] == 2
    torch.testing.assert_close(model(ids, logits_to_keep=2).logits, whole[:, -2:])
    torch.testing.assert_close(model(ids, logits_to_keep=torch.tensor([0, 3])).logits, whole[:, [0, 3]])


def test_unknown_keywords_are_never_swallowed(build, tokens):
    model, ids = build(), tokens(1, 3)
    with pytest.raises(TypeError, match="did you mean 'attention_mask'"):
        model(ids, atention_mask=torch.ones(1, 3))
    with pytest.raises(TypeError, match="unknown keyword of the model 'cache_params'"):
        model(ids, cache_params=DynamicCache(config=model.config))
    with pytest.raises(TypeError, match="token_type_ids"):
        model.model(ids, token_type_ids=ids)
    with pytest.raises(ValueError, match="no attention matrix"):
        model(ids, output_attentions=True)
    with pytest.raises(ValueError, match="exactly one of"):
        model.model()
