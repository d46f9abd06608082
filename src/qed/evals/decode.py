"""Greedy decoding of any causal language model: chunked prefill through its cache, then one token at a time.

How a model takes its cache is measured on a short sequence, not presumed: keywords differ between versions, and a
model that swallows an unknown keyword silently restarts from an empty state at every token.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

CACHE_NAMES = ("cache", "past_key_values", "cache_params")
# Models of this package are neutral to left padding in every layer; of others that is not known.
PADDING_NEUTRAL = frozenset({"qed"})

Step = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Calls:
    """What a model's forward can do.

    ``cache``: the keyword that takes the cache, ``None`` when continuing from a cache does not reproduce the full
    pass; ``chunks``: the cache is continued rightly by several tokens at once; ``last_only``: logits can be limited to
    the last position; ``padding``: left padding changes nothing.
    """

    cache: str | None
    chunks: bool
    last_only: bool
    padding: bool


class Decoder(Protocol):
    """Makes the steps after the prompts."""

    def start(self, rows: int) -> Any:
        """A cache as empty as a new one for ``rows`` prompts, or ``None`` if the model is to make one."""

    def __call__(self, model: nn.Module, calls: Calls, cache: Any, rows: int) -> Step:
        """From a filled cache to a function from tokens ``[rows, 1]`` to logits ``[rows, vocabulary]``."""


@torch.inference_mode()
def measure_calls(model: Any) -> Calls:
    """Find how ``model`` continues from its cache by comparing with full passes over 24 arbitrary tokens."""
    parameters = inspect.signature(model.forward).parameters
    last_only = "logits_to_keep" in parameters
    padding = getattr(model.config, "model_type", None) in PADDING_NEUTRAL
    device = next(model.parameters()).device
    vocabulary = int(model.get_input_embeddings().num_embeddings)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (1, 24), generator=generator).to(device)
    whole = model(input_ids=ids).logits[:, -1].double()
    scale = float(whole.std())
    rounding = 5e-2 if next(model.parameters()).dtype in (torch.bfloat16, torch.float16) else 1e-4

    def continues(keyword: str, first: int) -> bool:
        calls = Calls(keyword, True, last_only, False)
        _, cache = forward(model, calls, ids[:, :first], None)
        if cache is None:
            return False
        logits, _ = forward(model, calls, ids[:, first:], cache)
        error = float((logits.double() - whole).std())
        # What the logits would be had the cache been dropped: being right means being far nearer than that.
        restarted = float((model(input_ids=ids[:, first:]).logits[:, -1].double() - whole).std())
        return error <= max(rounding * scale, 0.25 * restarted)

    for keyword in (name for name in CACHE_NAMES if name in parameters):
        if continues(keyword, 23):
            return Calls(keyword, continues(keyword, 11), last_only, padding)
    return Calls(None, False, last_only, padding)


def forward(
    model: nn.Module, calls: Calls, ids: Tensor, cache: Any, attention_mask: Tensor | None = None
) -> tuple[Tensor, Any]:
    """Logits [rows, vocabulary] after the last of ``ids`` [rows, tokens], and the cache that has read them."""
    arguments: dict[str, Any] = {"input_ids": ids, "use_cache": True}
    if calls.cache is not None and cache is not None:
        arguments[calls.cache] = cache
    if calls.last_only:
        arguments["logits_to_keep"] = 1
    if attention_mask is not None:
        arguments["attention_mask"] = attention_mask
    out = model(**arguments)
    caches = (getattr(out, name, None) for name in CACHE_NAMES)
    return out.logits[:, -1], next((cache for cache in caches if cache is not None), None)


def batches(lengths: Sequence[int], *, rows: int, padding: bool, chunk_tokens: int) -> list[list[int]]:
    """Indices of prompts that share a batch: neighbours in length, at most ``rows``.

    Without neutral padding only equal lengths meet; with it, lengths whose padding ends within the first chunk.
    """
    spread = chunk_tokens - 1 if padding else 0
    if padding and lengths:
        # Batches of about one size, so that few shapes occur.
        rows = -(-len(lengths) // -(-len(lengths) // rows))
    result: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        if result and len(result[-1]) < rows and lengths[index] - lengths[result[-1][0]] <= spread:
            result[-1].append(index)
        else:
            result.append([index])
    return result


@torch.inference_mode()
def greedy(
    model: nn.Module,
    calls: Calls,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: frozenset[int],
    chunk_tokens: int,
    decoder: Decoder | None = None,
) -> list[list[int]]:
    """The likeliest continuation of each prompt, token by token, up to and without its first stop token.

    Exactly ``max_new_tokens`` are generated unless every row has stopped. Memory does not grow with prompt length for
    a model of constant state: a chunk of the prompt is read at a time and only the last logits are made. ``decoder``
    makes the steps after that, for example as one CUDA graph; ``None`` calls the model for each.
    """
    lengths = [len(prompt) for prompt in prompts]
    if not lengths or min(lengths) < 1:
        raise ValueError("every prompt needs at least one token")
    longest, shortest = max(lengths), min(lengths)
    if longest != shortest and not calls.padding:
        raise ValueError(f"this model's padding is not known to be neutral; got prompts of {shortest} and {longest}")
    device = next(model.parameters()).device
    if calls.cache is None:
        return _without_cache(model, calls, _columns(prompts, longest, 0, longest).to(device), max_new_tokens, stop_ids)

    chunk = chunk_tokens if calls.chunks else longest
    if longest - shortest >= chunk:
        raise ValueError(f"padding of {longest - shortest} tokens does not end within one chunk of {chunk}")
    padding = longest - torch.tensor(lengths)
    mask = (torch.arange(min(chunk, longest)) >= padding[:, None]).long().to(device) if longest > shortest else None
    cache = decoder.start(len(prompts)) if decoder else None
    for start in range(0, longest, chunk):
        part = _columns(prompts, longest, start, min(start + chunk, longest)).to(device)
        logits, cache = forward(model, calls, part, cache, mask if start == 0 else None)
    step = (decoder or _one_by_one)(model, calls, cache, len(prompts))

    generated = torch.empty(len(prompts), max_new_tokens, dtype=torch.long, device=device)
    stopped = Stopped(stop_ids, len(prompts), device)
    for position in range(max_new_tokens):
        tokens = logits.argmax(-1)
        generated[:, position] = tokens
        if stopped.all(tokens, position) or position == max_new_tokens - 1:
            break
        logits = step(tokens[:, None])
    return cut(generated[:, : position + 1], stop_ids)


def _columns(prompts: Sequence[Sequence[int]], longest: int, start: int, end: int) -> Tensor:
    """Columns ``start`` to ``end`` of the prompts, padded on the left to ``longest`` with ids that the mask hides."""
    columns = np.zeros((len(prompts), end - start), np.int64)
    for row, prompt in zip(columns, prompts, strict=True):
        shift = longest - len(prompt)
        row[max(0, shift - start) :] = prompt[max(0, start - shift) : max(0, end - shift)]
    return torch.from_numpy(columns)


def _one_by_one(model: nn.Module, calls: Calls, cache: Any, rows: int) -> Step:
    def step(tokens: Tensor) -> Tensor:
        nonlocal cache
        logits, cache = forward(model, calls, tokens, cache)
        return logits

    return step


class Stopped:
    """Which rows have met a stop token. On a GPU the answer is fetched every 16th token, so that it seldom waits."""

    def __init__(self, stop_ids: frozenset[int], rows: int, device: torch.device):
        self.every = 16 if device.type == "cuda" else 1
        self.stop_ids = torch.tensor(sorted(stop_ids), device=device)
        self.rows = torch.zeros(rows, dtype=torch.bool, device=device)

    def all(self, tokens: Tensor, position: int) -> bool:
        if not len(self.stop_ids):
            return False
        self.rows |= torch.isin(tokens, self.stop_ids)
        return position % self.every == self.every - 1 and bool(self.rows.all())


def cut(generated: Tensor, stop_ids: frozenset[int]) -> list[list[int]]:
    """Each row up to and without its first stop token."""
    result = []
    for row in generated.tolist():
        end = next((i for i, token in enumerate(row) if token in stop_ids), len(row))
        result.append(row[:end])
    return result


def _without_cache(
    model: nn.Module, calls: Calls, ids: Tensor, max_new_tokens: int, stop_ids: frozenset[int]
) -> list[list[int]]:
    """Reads the whole text again for every token: slow, and right for a model without a working cache."""
    start = ids.shape[1]
    stopped = Stopped(stop_ids, len(ids), ids.device)
    for position in range(max_new_tokens):
        arguments = {"logits_to_keep": 1} if calls.last_only else {}
        tokens = model(input_ids=ids, use_cache=False, **arguments).logits[:, -1].argmax(-1)
        ids = torch.cat([ids, tokens[:, None]], dim=1)
        if stopped.all(tokens, position):
            break
    return cut(ids[:, start:], stop_ids)


def stop_tokens(model: nn.Module, tokenizer: Any) -> frozenset[int]:
    """End-of-text ids of the tokenizer and of the model's generation settings together."""
    found: set[int] = set()
    for owner in (tokenizer, getattr(model, "generation_config", None)):
        ids = getattr(owner, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or [])
    return frozenset(found)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, the mode before restored after."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
