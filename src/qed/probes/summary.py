"""Streaming summaries: what is kept of millions of samples is counts in fixed bins, sums and extremes, by group.

A group is a layer, a head and a bucket of positions. Groups merge without loss beyond the bins, so every marginal comes
from the same counts; a quantile is right to within one bin, everything else but rounding is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import Any, Literal

import torch
from torch import Tensor

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
MOST_SHOWN_BINS = 120
Grouping = tuple[str, ...]
GROUPINGS: tuple[Grouping, ...] = ((), ("layer",), ("layer", "head"), ("position",))
JOINT: Grouping = ("layer", "head", "position")


@dataclass(frozen=True)
class Bins:
    """``num`` bins between ``low`` and ``high``, equal in the value or in its logarithm; one more at either side."""

    low: float
    high: float
    num: int
    scale: Literal["linear", "log"] = "linear"

    def edges(self) -> Tensor:
        """``[num + 1]`` float64."""
        if self.scale == "linear":
            return torch.linspace(self.low, self.high, self.num + 1, dtype=torch.float64)
        ends = torch.tensor([self.low, self.high], dtype=torch.float64).log()
        return torch.linspace(float(ends[0]), float(ends[1]), self.num + 1, dtype=torch.float64).exp()

    def index(self, x: Tensor) -> Tensor:
        """0 below ``low``, ``num + 1`` from ``high`` on, ``num + 2`` where x is not finite."""
        index = torch.bucketize(x, self.edges().to(x.device), right=True)
        return torch.where(x.isfinite(), index, self.num + 2)

    @property
    def resolution(self) -> dict[str, Any]:
        """How far a quantile may be off: a step of the value, or a ratio."""
        if self.scale == "linear":
            return {"scale": "linear", "step": (self.high - self.low) / self.num, "from": self.low, "to": self.high}
        return {"scale": "log", "ratio": (self.high / self.low) ** (1 / self.num), "from": self.low, "to": self.high}


def log_bins(low: float = 1e-9, high: float = 1e6, per_decade: int = 32) -> Bins:
    decades = torch.tensor(high / low, dtype=torch.float64).log10()
    return Bins(low, high, round(float(decades) * per_decade), "log")


@dataclass(frozen=True)
class Quantity:
    """What is summarised: its formula for the record, its bins, and shares of samples counted exactly.

    ``by_position`` is false for what belongs to a head or channel and has no position.
    """

    formula: str
    bins: Bins
    shares: dict[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    by_position: bool = True


class Summary:
    """One quantity over ``[layers, buckets, heads]`` groups.

    Args:
        quantity: bins and shares.
        num_layers, num_heads: of the model.
        edges: bucket i holds positions ``edges[i] <= position < edges[i + 1]``, counted from 0.
        device: where the samples are.
    """

    def __init__(
        self,
        quantity: Quantity,
        *,
        num_layers: int,
        num_heads: int,
        edges: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> None:
        self.quantity = quantity
        self.edges = list(edges) if quantity.by_position else [0, 1]
        groups = (num_layers, len(self.edges) - 1, num_heads)
        self._total = torch.zeros(groups, dtype=torch.float64, device=device)
        self._low = torch.full_like(self._total, torch.inf)
        self._high = torch.full_like(self._total, -torch.inf)
        self._histogram = torch.zeros(*groups, quantity.bins.num + 3, dtype=torch.int64, device=device)
        self._shares = torch.zeros(*groups, len(quantity.shares), dtype=torch.int64, device=device)

    def update(self, layer: int, samples: Tensor, start: int = 0) -> None:
        """Count ``[B, T, H]`` or ``[B, T, H, C]`` samples of tokens at positions ``start`` to ``start + T``."""
        for bucket, part in self._buckets(start, samples.shape[1]):
            x = samples[:, part].movedim(2, 0).flatten(1).contiguous()
            finite = x.isfinite()
            self._total[layer, bucket] += x.where(finite, 0).sum(1)
            self._low[layer, bucket] = torch.minimum(self._low[layer, bucket], x.where(finite, torch.inf).amin(1))
            self._high[layer, bucket] = torch.maximum(self._high[layer, bucket], x.where(finite, -torch.inf).amax(1))
            index = self.quantity.bins.index(x)
            self._histogram[layer, bucket].scatter_add_(1, index, torch.ones_like(index))
            for i, inside in enumerate(self.quantity.shares.values()):
                self._shares[layer, bucket, :, i] += (inside(x) & finite).sum(1)

    def rows(self, name: str, grouping: Grouping) -> Iterator[dict[str, Any]]:
        """One row a group that has samples; ``layer``, ``head``, ``start`` and ``end`` are null where merged."""
        if "position" in grouping and not self.quantity.by_position:
            return
        ranges = zip(("layer", "position", "head"), self._total.shape, strict=True)
        choices = [range(size) if axis in grouping else (None,) for axis, size in ranges]
        for layer, bucket, head in product(*choices):
            found = self._row(tuple(slice(None) if i is None else slice(i, i + 1) for i in (layer, bucket, head)))
            if found is None:
                continue
            values, counts = found
            start, end = (None, None) if bucket is None else self.edges[bucket : bucket + 2]
            if grouping in ((), ("layer",)):
                values["histogram"] = self._shown_histogram(values, counts)
            yield {"quantity": name, "layer": layer, "head": head, "start": start, "end": end, **values}

    def _buckets(self, start: int, num_tokens: int) -> Iterator[tuple[int, slice]]:
        if not self.quantity.by_position:
            yield 0, slice(None)
            return
        for bucket, (low, high) in enumerate(pairwise(self.edges)):
            part = slice(max(low - start, 0), min(high - start, num_tokens))
            if part.start < part.stop:
                yield bucket, part

    def _row(self, group: tuple[slice, ...]) -> tuple[dict[str, Any], Tensor] | None:
        counts = self._histogram[group].sum((0, 1, 2)).cpu()
        num_bad = int(counts[-1])
        counts = counts[:-1]
        count = int(counts.sum())
        if not count:
            return None
        low, high = float(self._low[group].min()), float(self._high[group].max())
        row: dict[str, Any] = {
            "count": count,
            "mean": float(self._total[group].sum()) / count,
            "min": low,
            "max": high,
            "quantiles": {str(q): x for q, x in zip(QUANTILES, self._quantiles(counts, low, high), strict=True)},
        }
        shares = self._shares[group].sum((0, 1, 2)).tolist()
        if shares:
            row["shares"] = {name: n / count for name, n in zip(self.quantity.shares, shares, strict=True)}
        if num_bad:
            row["num_not_finite"] = num_bad
        return row, counts

    def _quantiles(self, counts: Tensor, low: float, high: float) -> list[float]:
        edges = self._all_edges(low, high)
        ends = counts.cumsum(0)
        wanted = torch.tensor(QUANTILES, dtype=torch.float64) * int(ends[-1])
        index = torch.searchsorted(ends.double(), wanted).clamp(max=len(counts) - 1)
        inside = (wanted - (ends - counts)[index]) / counts[index].clamp(min=1)
        left, right = edges[index], edges[index + 1]
        return (left + inside * (right - left)).clamp(low, high).tolist()

    def _all_edges(self, low: float, high: float) -> Tensor:
        edges = self.quantity.bins.edges()
        first, last = min(low, float(edges[0])), max(high, float(edges[-1]))
        return torch.cat([edges.new_tensor([first]), edges, edges.new_tensor([last])])

    def _shown_histogram(self, row: dict[str, Any], counts: Tensor) -> dict[str, Any]:
        """The occupied range in few bins, whole ones merged."""
        edges = self._all_edges(row["min"], row["max"])
        occupied = counts.nonzero()[:, 0]
        first, last = int(occupied[0]), int(occupied[-1]) + 1
        step = -(-(last - first) // MOST_SHOWN_BINS)
        starts = [*range(first, last, step), last]
        merged = [int(counts[i:j].sum()) for i, j in pairwise(starts)]
        return {"counts": merged, "edges": edges[starts].tolist(), "scale": self.quantity.bins.scale}
