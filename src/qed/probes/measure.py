"""All quantities of one model over windows of tokens, in one pass and bounded memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm.auto import tqdm

from qed.data.needle import NeedleConfig, NeedleTask
from qed.model.mixer import QEDMixer
from qed.model.modeling import CACHE_FIELD
from qed.ops import get_arm

from . import inside as algebra
from .hooks import Activations, find_mixers, observe
from .summary import GROUPINGS, JOINT, Bins, Quantity, Summary, log_bins

# Tokens after which states are looked at; it divides the longest span.
PIECE = 64
SPANS = (1, 16, 256)
REMOVED = {"this_step": "this step", "earlier_steps": "earlier steps", "all_steps": "all steps"}
MEASURES = {"relative": "|change of o| / |o|", "norm": "|change of o|"}
FIRST_EDGE = 64
HALF = float(torch.log(torch.tensor(2.0, dtype=torch.float64)))

QUANTITIES = {
    "e": Quantity(
        "e = 1 - a.k, the eigenvalue of I - k a^T that is not 1",
        Bins(-1.5, 1.5, 1500),
        {"outside (0, 1)": lambda x: (x <= 0) | (x >= 1), "outside [-1, 1]": lambda x: (x < -1) | (x > 1)},
    ),
    "projection_change": Quantity(
        "|e with the direction projected - e with it unprojected|, all else fixed; 0 for an arm without a direction",
        log_bins(),
        {"above 0.001": lambda x: x > 1e-3},
    ),
    "rho": Quantity("q.k, of unit vectors", Bins(-1, 1, 1000)),
    "content_norm": Quantity("|Sbar^T d|, d = P(b q) in an arm without a direction", log_bins()),
    "correction_share": Quantity("|strength rho Sbar^T d| / |o|", log_bins()),
    "transition_norm": Quantity(
        "largest singular value of (I - k a^T) Diag(exp g)", Bins(0, 3, 3000), {"above 1": lambda x: x > 1}
    ),
    **{
        f"amplification_{span}": Quantity(
            f"largest singular value of the product of {span} transitions; one product begins every "
            f"{max(span, PIECE)} tokens, its position is its last token's",
            log_bins(1e-12),
            {"above 1": lambda x: x > 1},
        )
        for span in SPANS
    },
    "state_norm": Quantity(f"Frobenius norm of S, every {PIECE} tokens", log_bins()),
    "effective_rank": Quantity(
        f"exp of the entropy of the shares of the squared singular values of S, every {PIECE} tokens",
        Bins(0, 256, 2048),
    ),
    "strength": Quantity(
        "lambda of every layer and head, strength_scale included", Bins(-1, 1, 2000), by_position=False
    ),
    "gate": Quantity("b, every token and channel", Bins(0, 1, 500)),
    "write_gate": Quantity("w, every token and channel", Bins(0, 1, 500)),
    "decay_rate": Quantity("-g, every token and channel, a token", log_bins(1e-9, 1e3)),
    "half_life": Quantity(
        "ln 2 / mean of -g over the probed tokens, one sample a channel, in tokens",
        log_bins(1e-3, 1e9),
        by_position=False,
    ),
}
EFFECTS = {
    (name, measure): Quantity(f"{formula} when the correction is removed at {where}", log_bins())
    for name, where in REMOVED.items()
    for measure, formula in MEASURES.items()
}


@dataclass(frozen=True)
class ProbeConfig:
    """What is read and how much of it.

    ``length``: tokens of a window, read from an empty state; choose it past the training length. ``num_tokens``: in
    all. ``batch_windows``: windows of one length read together; ``chunk_tokens``: tokens of each in one forward pass, a
    multiple of 64. ``needle_length``, ``num_needles``: nominal tokens and number of the needle examples (0: none).
    ``seed``: of the needle examples.
    """

    length: int = 2048
    num_tokens: int = 16384
    batch_windows: int = 4
    chunk_tokens: int = 512
    needle_length: int = 1024
    num_needles: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("length", 2), ("num_tokens", self.length), ("batch_windows", 1), ("num_needles", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}; got {getattr(self, name)}")
        if self.chunk_tokens < PIECE or self.chunk_tokens % PIECE:
            raise ValueError(f"chunk_tokens must be a multiple of {PIECE}; got {self.chunk_tokens}")

    @property
    def edges(self) -> list[int]:
        """Borders of the position buckets: 0, 64, 128, 256, ... and ``length``."""
        edges = [0, FIRST_EDGE]
        while 2 * edges[-1] < self.length:
            edges.append(2 * edges[-1])
        return [*(edge for edge in edges if edge < self.length), self.length]


def text_windows(texts: Iterable[str], tokenizer: Any, config: ProbeConfig) -> list[list[int]]:
    """Windows of ``config.length`` cut from the documents' concatenation, an end-of-text token after each."""
    ending = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    stream: list[int] = []
    for text in texts:
        stream += [*tokenizer(text, verbose=False)["input_ids"], *ending]
        if len(stream) >= config.num_tokens:
            break
    n = config.length
    windows = [stream[i : i + n] for i in range(0, min(len(stream), config.num_tokens) - n + 1, n)]
    if not windows:
        raise ValueError(f"the texts hold {len(stream)} tokens, less than one window; wanted length = {n} or more")
    return windows


def needle_windows(tokenizer: Any, config: ProbeConfig) -> list[list[int]]:
    """S-NIAH-1 prompts of at most ``config.length`` tokens, each with its answer."""
    task = NeedleTask(needle_config(config.length), tokenizer, config.seed)
    examples = (task[i] for i in range(config.num_tokens // config.length))
    return [task.encode(f"{example.prompt} {example.answer}")[: config.length] for example in examples]


def needle_config(length: int) -> NeedleConfig:
    """Words and numbers of the evaluation half, filled to the last noise unit."""
    return NeedleConfig(length=length, num_answer_tokens=16, fill="unit", split="eval")


@dataclass
class _Carried:
    """One layer between two chunks of the same windows."""

    tail: Tensor
    full: Tensor
    without: Tensor
    product: Tensor
    position: int = 0


@dataclass
class Observer:
    """Receives every layer's activations in order of position; :meth:`begin` starts new windows."""

    mixers: Sequence[QEDMixer]
    edges: Sequence[int]
    device: torch.device | str = "cpu"
    summaries: dict[Any, Summary] = field(init=False)

    def __post_init__(self) -> None:
        num_layers, num_heads = len(self.mixers), self.mixers[0].num_heads
        sizes: dict[str, Any] = {"num_layers": num_layers, "num_heads": num_heads, "edges": self.edges}
        self.corrects = get_arm(self.mixers[0].config.arm).direction != "none"
        wanted = QUANTITIES | (EFFECTS if self.corrects else {})
        self.summaries = {name: Summary(one, **sizes, device=self.device) for name, one in wanted.items()}
        if not self.corrects:
            del self.summaries["correction_share"]
        groups = (num_layers, len(self.edges) - 1, num_heads)
        zeros = torch.zeros(groups, dtype=torch.float64, device=self.device)
        self.energies = {name: zeros.clone() for name in (*REMOVED, "output", "this_step_along_all")}
        shape = (num_layers, num_heads, self.mixers[0].key_dim)
        self._rates = torch.zeros(shape, dtype=torch.float64, device=self.device)
        self._num_tokens = [0] * num_layers
        self._carried: dict[int, _Carried] = {}
        for layer, mixer in enumerate(self.mixers):
            self._add("strength", layer, mixer.strength().detach().double()[None, None])

    def begin(self) -> None:
        """Forget the states: the next activations are at position 0."""
        self._carried = {}

    def state(self, layer: int) -> Tensor:
        """``[B, H, K, V]`` after the tokens received since :meth:`begin`."""
        return self._carried[layer].full

    @torch.no_grad()
    def receive(self, layer: int, mixer: QEDMixer, activations: Activations) -> None:
        carried = self._carried.get(layer)
        inside, tail = algebra.look_inside(mixer, activations, None if carried is None else carried.tail)
        B, T, H, K = inside.k.shape
        if carried is None:
            empty = inside.v.new_zeros(B, H, K, inside.v.shape[-1])
            carried = self._carried[layer] = _Carried(tail, empty, empty, _identity(inside))
        if carried.position % PIECE:
            raise ValueError(f"every pass but a window's last must be a multiple of {PIECE} tokens long")
        carried.tail = tail
        self._tokens(layer, inside, carried.position)
        for start in range(0, T, PIECE):
            self._piece(layer, inside.part(slice(start, min(start + PIECE, T))), carried)

    def _add(self, name: Any, layer: int, samples: Tensor, start: int = 0) -> None:
        self.summaries[name].update(layer, samples, start)

    def _tokens(self, layer: int, inside: algebra.Inside, start: int) -> None:
        samples = {
            "e": inside.e,
            "projection_change": inside.projection_change.abs(),
            "rho": inside.rho,
            "transition_norm": algebra.transition_norm(inside.k, inside.a, inside.g),
            "gate": inside.b,
            "write_gate": inside.w,
            "decay_rate": -inside.g,
        }
        for name, x in samples.items():
            self._add(name, layer, x, start)
        self._rates[layer] -= inside.g.sum((0, 1))
        self._num_tokens[layer] += inside.g.shape[0] * inside.g.shape[1]

    def _piece(self, layer: int, inside: algebra.Inside, carried: _Carried) -> None:
        start, size = carried.position, inside.k.shape[1]
        last = carried.position = start + size
        full = algebra.run(inside, carried.full, a=inside.a, direction=inside.d)
        carried.full = full.state
        self._add("content_norm", layer, full.content.norm(dim=-1), start)
        if self.corrects:
            without = algebra.run(inside, carried.without, a=inside.base, direction=inside.d)
            carried.without = without.state
            self._effects(layer, algebra.effects(inside, full, without), full, start)
        carried.product = algebra.transition(inside, carried.product)
        for span in SPANS:
            if span <= PIECE and span <= size:
                product = algebra.transition(inside.part(slice(0, span)), _identity(inside))
                self._add(f"amplification_{span}", layer, _largest(product), start + span - 1)
            elif span > PIECE and last % span == 0:
                self._add(f"amplification_{span}", layer, _largest(carried.product), last - 1)
                carried.product = _identity(inside)
        if size == PIECE:
            norm = full.state.flatten(-2).norm(dim=-1)
            self._add("state_norm", layer, norm[:, None], last - 1)
            self._add("effective_rank", layer, algebra.effective_rank(full.state)[:, None], last - 1)

    def _effects(self, layer: int, effects: algebra.Effects, full: algebra.Read, start: int) -> None:
        size = full.output.norm(dim=-1)
        for name, change in effects._asdict().items():
            norm = change.norm(dim=-1)
            self._add((name, "norm"), layer, norm, start)
            self._add((name, "relative"), layer, norm / size, start)
            self._sum(name, layer, norm.square(), start)
        self._add("correction_share", layer, effects.this_step.norm(dim=-1) / size, start)
        self._sum("output", layer, size.square(), start)
        self._sum("this_step_along_all", layer, (effects.this_step * effects.all_steps).sum(-1), start)

    def _sum(self, name: str, layer: int, samples: Tensor, start: int) -> None:
        for bucket, (low, high) in enumerate(pairwise(self.edges)):
            part = samples[:, max(low - start, 0) : max(high - start, 0)]
            self.energies[name][layer, bucket] += part.sum((0, 1))

    def half_lives(self) -> Tensor:
        """``[L, H, K]``, tokens: ``ln 2`` over the mean of ``-g``."""
        counts = torch.tensor(self._num_tokens, dtype=torch.float64, device=self._rates.device)
        return HALF / (self._rates / counts[:, None, None])

    def result(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """What the record holds, and the rows by layer, head and position bucket together."""
        half_lives = self.half_lives()
        summary = Summary(
            QUANTITIES["half_life"], num_layers=len(half_lives), num_heads=half_lives.shape[1], edges=self.edges,
            device=self.device,
        )  # fmt: skip
        for layer, values in enumerate(half_lives):
            summary.update(layer, values[None, None])
        self.summaries["half_life"] = summary
        named = {name: one for name, one in self.summaries.items() if isinstance(name, str)}
        summaries = [row for grouping in GROUPINGS for name, one in named.items() for row in one.rows(name, grouping)]
        rows = [row for name, one in named.items() for row in one.rows(name, JOINT)]
        effects = []
        for (name, measure), one in ((key, one) for key, one in self.summaries.items() if not isinstance(key, str)):
            label = f"effect_{name}" if measure == "relative" else f"effect_norm_{name}"
            effects += [{"removed": REMOVED[name], "measure": measure, **row} for row in one.rows(label, ())]
            summaries += [row for grouping in GROUPINGS[1:] for row in one.rows(label, grouping)]
            rows += list(one.rows(label, JOINT))
        rows += [
            {"quantity": "half_life_by_channel", "layer": layer, "head": head, "tokens": _finite(values)}
            for layer, heads in enumerate(half_lives.tolist())
            for head, values in enumerate(heads)
        ]
        formulas = {
            name: {"formula": one.quantity.formula, "resolution": one.quantity.bins.resolution}
            for name, one in named.items()
        }
        record = {
            "quantities": formulas, "summaries": summaries, "effects": effects, "attribution": self._attribution()
        }  # fmt: skip
        return record, rows

    def _attribution(self) -> list[dict[str, Any]]:
        """Root mean squares over tokens and heads, and the shares of the whole effect, in all, by layer and by bucket.

        ``o - o_without`` is the change at this step plus the change through the state, exactly; each share is its
        projection on the sum, over the sum's square: they add up to 1, and one may be negative.
        """
        if not self.corrects:
            return []
        energies = {name: one.cpu() for name, one in self.energies.items()}
        layers: list[int | None] = [None, *range(len(self.mixers))]
        groups = [(layer, None) for layer in layers] + [(None, i) for i in range(len(self.edges) - 1)]
        rows = []
        for layer, bucket in groups:
            index = tuple(slice(None) if i is None else slice(i, i + 1) for i in (layer, bucket))
            sums = {name: float(one[index].sum()) for name, one in energies.items()}
            if not sums["output"]:
                continue
            start, end = (None, None) if bucket is None else self.edges[bucket : bucket + 2]
            row: dict[str, Any] = {"layer": layer, "start": start, "end": end}
            row |= {f"rms_{name}_over_output": (sums[name] / sums["output"]) ** 0.5 for name in REMOVED}
            share = sums["this_step_along_all"] / sums["all_steps"] if sums["all_steps"] else None
            row |= {"share_this_step": share, "share_through_state": None if share is None else 1 - share}
            rows.append(row)
        return rows


def measure(
    model: nn.Module, windows: Sequence[Sequence[int]], config: ProbeConfig, *, progress: bool = True
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Every quantity over ``windows``; returns the record's part and its rows.

    The model is left as it was. ``state_difference``: the largest relative difference between the states that the probe
    carries in float64 and the model's own at the ends of windows, which shows what the model's arithmetic rounds.
    """
    mixers = find_mixers(model)
    device = next(model.parameters()).device
    observer = Observer(mixers, config.edges, device)
    groups = list(_batches(windows, config.batch_windows))
    passes = 1 + observer.corrects
    difference = 0.0
    nats = {name: torch.zeros(len(config.edges) - 1, dtype=torch.float64) for name in ("as_trained", "without")}
    counts = torch.zeros(len(config.edges) - 1, dtype=torch.int64)
    total = passes * sum(map(len, windows))
    with tqdm(total=total, unit="tok", unit_scale=True, disable=not progress, desc="probe") as bar:
        for group in groups:
            ids = torch.tensor(group, device=device)
            observer.begin()
            with observe(model, observer.receive):
                losses, cache = read(model, ids, config.chunk_tokens, bar)
            for layer in range(len(mixers)):
                own = cache.layers[layer].recurrent_states[0].double()
                gap = (observer.state(layer) - own).norm() / own.norm()
                difference = max(difference, float(gap))
            if not bool(losses.isfinite().all()):
                raise ValueError("the model's loss is not finite on these tokens, so there is nothing to measure")
            _add_losses(nats["as_trained"], losses, config.edges)
            _add_losses(counts, torch.ones_like(losses, dtype=torch.int64), config.edges)
            if observer.corrects:
                with strength_scale(model, 0.0):
                    _add_losses(nats["without"], read(model, ids, config.chunk_tokens, bar)[0], config.edges)
    if not observer.corrects:
        del nats["without"]
    record, rows = observer.result()
    record |= {"state_difference": difference, "loss": _losses(nats, counts, config.edges)}
    return record, rows


@torch.inference_mode()
def read(model: Any, ids: Tensor, chunk_tokens: int, bar: Any = None) -> tuple[Tensor, Any]:
    """Losses ``[B, T - 1]`` in nats, target by target, and the cache after ``[B, T]`` tokens, chunk by chunk."""
    losses, cache = [], None
    targets = F.pad(ids[:, 1:], (0, 1))
    for start in range(0, ids.shape[1], chunk_tokens):
        part = slice(start, start + chunk_tokens)
        out = model(input_ids=ids[:, part], cache=cache, use_cache=True)
        cache = getattr(out, CACHE_FIELD)
        losses.append(F.cross_entropy(out.logits.mT.float(), targets[:, part], reduction="none"))
        if bar is not None:
            bar.update(ids[:, part].numel())
    return torch.cat(losses, 1)[:, :-1], cache


@contextmanager
def strength_scale(model: Any, scale: float) -> Iterator[None]:
    """All strengths times ``scale`` inside; the scale before is restored after."""
    before = model.config.strength_scale
    model.config.strength_scale = scale
    try:
        yield
    finally:
        model.config.strength_scale = before


def _batches(windows: Sequence[Sequence[int]], size: int) -> Iterator[list[Sequence[int]]]:
    """Neighbours of one length, at most ``size`` together."""
    for _, same in groupby(windows, len):
        group = list(same)
        yield from (group[i : i + size] for i in range(0, len(group), size))


def _add_losses(sums: Tensor, losses: Tensor, edges: Sequence[int]) -> None:
    """A target belongs to the bucket of its own position, which is at least 1."""
    for bucket, (low, high) in enumerate(pairwise(edges)):
        sums[bucket] += losses[:, max(low - 1, 0) : high - 1].sum(dtype=sums.dtype).cpu()


def _losses(nats: dict[str, Tensor], counts: Tensor, edges: Sequence[int]) -> dict[str, Any]:
    """Nats a target with the strengths as trained and with all of them 0."""
    buckets = [
        {"start": low, "end": high, "num_targets": int(count)}
        | {name: float(one[i]) / int(count) for name, one in nats.items()}
        for i, ((low, high), count) in enumerate(zip(pairwise(edges), counts, strict=True))
        if count
    ]
    total = {name: float(one.sum()) / int(counts.sum()) for name, one in nats.items()}
    return {**total, "num_targets": int(counts.sum()), "buckets": buckets}


def _identity(inside: algebra.Inside) -> Tensor:
    B, _, H, K = inside.k.shape
    return torch.eye(K, dtype=inside.k.dtype, device=inside.k.device).expand(B, H, K, K).contiguous()


def _largest(product: Tensor) -> Tensor:
    """``[B, 1, H]``."""
    return torch.linalg.matrix_norm(product, 2)[:, None]


def _finite(values: list[float]) -> list[float | None]:
    return [x if abs(x) != float("inf") and x == x else None for x in values]
