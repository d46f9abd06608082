import pytest
import torch
from torch import nn
from transformers import Mamba2Config, Mamba2ForCausalLM
from transformers.modeling_outputs import CausalLMOutput

from qed.evals import engine
from qed.evals.decode import Calls, batches, cut, forward, greedy, measure_calls, stop_tokens

NO_STOP = frozenset()


def prompts_of(lengths, vocabulary, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, vocabulary, (length,), generator=generator).tolist() for length in lengths]


def argmax_loop(model, prompt, count):
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        for _ in range(count):
            ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def mamba(tokenizer):
    config = Mamba2Config(
        vocab_size=len(tokenizer), hidden_size=32, num_heads=4, head_dim=16, state_size=8, n_groups=1,
        num_hidden_layers=2, chunk_size=8, initializer_range=0.5,
    )  # fmt: skip
    torch.manual_seed(0)
    return Mamba2ForCausalLM(config).eval()


class Swallower(nn.Module):
    """A model that hides the cache's keyword in ``**kwargs``, drops it and starts from nothing at every call."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.config = inner, inner.config

    def get_input_embeddings(self):
        return self.inner.get_input_embeddings()

    def forward(self, input_ids=None, past_key_values=None, **kwargs):
        out = self.inner(input_ids=input_ids, use_cache=True)
        return type(out)(logits=out.logits, past_key_values=out.past_key_values)


class NoCache(Swallower):
    def forward(self, input_ids=None, **kwargs):
        return CausalLMOutput(logits=self.inner(input_ids=input_ids, use_cache=False).logits)


def test_calls_of_common_models(llama, mamba):
    calls = measure_calls(llama)
    assert calls.cache in ("cache", "past_key_values")
    assert (calls.chunks, calls.last_only, calls.padding) == (True, True, False)
    assert measure_calls(mamba).cache is not None


@pytest.mark.parametrize("wrapper", [Swallower, NoCache])
def test_a_model_that_drops_its_cache_is_found_out(llama, wrapper):
    model = wrapper(llama)
    calls = measure_calls(model)
    assert calls.cache is None
    prompts = prompts_of([9, 9], 400)
    out = greedy(model, calls, prompts, max_new_tokens=5, stop_ids=NO_STOP, chunk_tokens=4)
    assert out == [argmax_loop(llama, prompt, 5) for prompt in prompts]


@pytest.mark.parametrize("chunk_tokens", [1, 7, 16, 64])
@pytest.mark.parametrize("name", ["llama", "mamba", "qed_model"])
def test_greedy_is_the_argmax_loop(request, name, chunk_tokens):
    model = request.getfixturevalue(name)
    prompts = prompts_of([33, 33, 33], 400)
    calls = measure_calls(model)
    out = greedy(model, calls, prompts, max_new_tokens=8, stop_ids=NO_STOP, chunk_tokens=chunk_tokens)
    assert out == [argmax_loop(model, prompt, 8) for prompt in prompts]


def test_greedy_is_generate(llama):
    prompts = prompts_of([20, 20], 400)
    out = greedy(llama, measure_calls(llama), prompts, max_new_tokens=10, stop_ids=NO_STOP, chunk_tokens=8)
    ids = torch.tensor(prompts)
    theirs = llama.generate(ids, max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert out == theirs[:, 20:].tolist()


def test_rows_stop_at_their_own_stop_token(llama):
    prompts = prompts_of([20] * 6, 400)
    calls = measure_calls(llama)
    free = greedy(llama, calls, prompts, max_new_tokens=12, stop_ids=NO_STOP, chunk_tokens=8)
    stops = frozenset({free[0][3], free[1][0]})
    stopped = greedy(llama, calls, prompts, max_new_tokens=12, stop_ids=stops, chunk_tokens=8)
    assert stopped == cut(torch.tensor(free), stops)
    assert len(stopped[0]) <= 3
    assert stopped[1] == []


def test_left_padding_changes_nothing(qed_model):
    prompts = prompts_of([40, 33, 17, 40, 21], 400)
    calls = measure_calls(qed_model)
    assert calls.padding
    for chunk_tokens in (32, 64):
        out = greedy(qed_model, calls, prompts, max_new_tokens=8, stop_ids=NO_STOP, chunk_tokens=chunk_tokens)
        assert out == [argmax_loop(qed_model, prompt, 8) for prompt in prompts]


def test_unequal_prompts_need_neutral_padding(llama):
    with pytest.raises(ValueError, match="prompts of 5 and 6"):
        greedy(llama, measure_calls(llama), prompts_of([5, 6], 400), max_new_tokens=2, stop_ids=NO_STOP, chunk_tokens=8)


def test_batches_share_only_what_may_be_shared():
    lengths = [5, 9, 5, 6, 5, 30, 5]
    assert batches(lengths, rows=3, padding=False, chunk_tokens=16) == [[0, 2, 4], [6], [3], [1], [5]]
    assert batches(lengths, rows=8, padding=True, chunk_tokens=16) == [[0, 2, 4, 6, 3, 1], [5]]
    padded = Calls("cache", True, True, True)
    with pytest.raises(ValueError, match="within one chunk"):
        greedy(nn.Linear(1, 1), padded, [[1] * 30, [1]], max_new_tokens=1, stop_ids=NO_STOP, chunk_tokens=8)


def test_stop_tokens_of_tokenizer_and_model(llama, tokenizer):
    assert stop_tokens(llama, tokenizer) == {tokenizer.eos_token_id}


def test_a_batch_that_does_not_fit_is_halved(llama, tokenizer, monkeypatch):
    prompts = prompts_of([12] * 11, 400)
    calls = measure_calls(llama)
    expected = greedy(llama, calls, prompts, max_new_tokens=4, stop_ids=stop_tokens(llama, tokenizer), chunk_tokens=8)
    tried = []

    def small_device(model, calls, prompts, **settings):
        tried.append(len(prompts))
        if len(prompts) > 3:
            raise torch.OutOfMemoryError
        return greedy(model, calls, prompts, **settings)

    monkeypatch.setattr(engine, "greedy", small_device)
    runner = engine.Engine(llama, tokenizer, rows=8, chunk_tokens=8, length=12)
    found = {}
    for batch, generated in runner.generate(prompts, 4):
        found.update(zip(batch, generated, strict=True))
    assert [found[i] for i in range(11)] == expected
    assert tried == [8, 4, 2, 2, 2, 2, 2, 1]
    monkeypatch.setattr(engine, "greedy", lambda *_, **__: (_ for _ in ()).throw(torch.OutOfMemoryError()))
    with pytest.raises(torch.OutOfMemoryError):
        list(runner.generate(prompts, 4))


class Reusing:
    """A decoder that keeps one cache for all batches, as the captured one does."""

    def __init__(self):
        self.cache, self.starts = None, 0

    def start(self, rows):
        if self.cache is not None:
            self.starts += 1
            self.cache.reset()
        return self.cache

    def __call__(self, model, calls, cache, rows):
        assert self.cache is None or cache is self.cache
        self.cache = cache

        def step(tokens):
            return forward(model, calls, tokens, cache)[0]

        return step


def test_an_emptied_cache_is_a_new_one(qed_model):
    calls, decoder = measure_calls(qed_model), Reusing()
    for seed, lengths in enumerate([[30, 30, 30], [41, 36, 40], [12, 11, 9]]):
        prompts = prompts_of(lengths, 400, seed)
        settings = {"max_new_tokens": 6, "stop_ids": NO_STOP, "chunk_tokens": 16}
        plain = greedy(qed_model, calls, prompts, **settings)
        assert greedy(qed_model, calls, prompts, decoder=decoder, **settings) == plain
    assert decoder.starts == 2
