"""Decoding steps of this package's model as one CUDA graph: shapes and addresses stand still, only values change."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .decode import PADDING_NEUTRAL, Calls, Step, forward

# Graphs kept, each with the states of its rows: one for full batches, one for the last batch of a length.
MOST_GRAPHS = 2
WARM_UP_STEPS = 3


class GraphDecoder:
    """Turns a filled cache into a function from tokens ``[rows, 1]`` to logits ``[rows, vocabulary]``.

    A graph is captured once for a number of rows; another batch of as many reads its prompts into the same states, so
    that a second copy of them is never held. The logits are overwritten by the next step. ``num_captures`` counts the
    graphs made.
    """

    def __init__(self) -> None:
        self.num_captures = 0
        self._captured: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor, Any]] = {}

    def start(self, rows: int) -> Any:
        if rows not in self._captured:
            return None
        cache = self._captured[rows][3]
        cache.reset()
        return cache

    def __call__(self, model: nn.Module, calls: Calls, cache: Any, rows: int) -> Step:
        if rows not in self._captured:
            while len(self._captured) >= MOST_GRAPHS:
                self._captured.pop(next(iter(self._captured)))
            self._captured[rows] = self._capture(model, calls, cache, rows)
        graph, ids, logits, _ = self._captured[rows]

        def step(tokens: Tensor) -> Tensor:
            ids.copy_(tokens)
            graph.replay()
            return logits

        return step

    def _capture(self, model: nn.Module, calls: Calls, cache: Any, rows: int) -> tuple:
        ids = torch.zeros(rows, 1, dtype=torch.long, device=next(model.parameters()).device)
        # Warming up and capturing run the step, which changes the states.
        before = [state.clone() for state in states(cache)]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_STEPS):
                forward(model, calls, ids, cache)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits, _ = forward(model, calls, ids, cache)
        for state, value in zip(states(cache), before, strict=True):
            state.copy_(value)
        self.num_captures += 1
        return graph, ids, logits, cache


def states(cache: Any) -> list[Tensor]:
    """The tensors of a cache of linear-attention layers, which steps change in place."""
    found = []
    for layer in cache.layers:
        for group in (layer.conv_states, layer.recurrent_states):
            tensors = group.values() if isinstance(group, dict) else group if isinstance(group, list) else [group]
            found += [tensor for tensor in tensors if tensor is not None]
    return found


def choose_decoder(model: Any) -> GraphDecoder | None:
    """A graph decoder for this package's model on CUDA; ``None``, which decodes step by step, for any other."""
    on_cuda = next(model.parameters()).is_cuda
    known = getattr(model.config, "model_type", None) in PADDING_NEUTRAL
    return GraphDecoder() if on_cuda and known else None
