"""Intervals, paired tests and usable context: every number the evaluations state beside an accuracy.

Outcomes are 0/1 (or any real score), one an example. Paired functions take two arrays in the same example order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.proportion import proportion_confint

BEYOND = "beyond the longest tested"
BELOW = "below the shortest tested"
CROSSED = "crossed"


class Difference(NamedTuple):
    """``second - first`` with its interval."""

    estimate: float
    low: float
    high: float


class McNemar(NamedTuple):
    """``n01``: first wrong and second right; ``n10``: first right and second wrong; exact two-sided ``p``."""

    n01: int
    n10: int
    p: float


class Pooled(NamedTuple):
    """Mean difference over seeds. Interval and ``p`` are ``None`` with fewer than two seeds."""

    estimate: float
    low: float | None
    high: float | None
    p: float | None
    num_seeds: int
    between_seed_sd: float | None
    within_seed_se: float
    method: str


class UsableContext(NamedTuple):
    """Length in tokens where accuracy first falls to ``threshold``; a bound is ``None`` outside the tested range.

    ``status``, ``low_status`` and ``high_status`` are ``"crossed"``, ``"beyond the longest tested"`` or
    ``"below the shortest tested"``, for the estimate and for the two ends of its interval.
    """

    threshold: float
    length: float | None
    status: str
    low: float | None
    low_status: str
    high: float | None
    high_status: str


def wilson(num_correct: int, num_examples: int, *, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson score interval of a binomial proportion."""
    return _proportion(num_correct, num_examples, confidence, "wilson")


def clopper_pearson(num_correct: int, num_examples: int, *, confidence: float = 0.95) -> tuple[float, float]:
    """Exact (Clopper-Pearson) interval of a binomial proportion."""
    return _proportion(num_correct, num_examples, confidence, "beta")


def _proportion(num_correct: int, num_examples: int, confidence: float, method: str) -> tuple[float, float]:
    if num_examples < 1 or not 0 <= num_correct <= num_examples:
        raise ValueError(f"need 0 <= num_correct <= num_examples >= 1; got {num_correct} of {num_examples}")
    low, high = proportion_confint(num_correct, num_examples, alpha=1 - _open_unit(confidence), method=method)
    return (float(low) if num_correct else 0.0), (float(high) if num_correct < num_examples else 1.0)


def mcnemar(first: ArrayLike, second: ArrayLike) -> McNemar:
    """Exact McNemar test of paired 0/1 outcomes: a two-sided binomial test of the discordant pairs against 1/2."""
    a, b = _pairs(first, second)
    if not (np.isin(a, (0, 1)).all() and np.isin(b, (0, 1)).all()):
        raise ValueError("McNemar's test needs outcomes that are 0 or 1")
    n01, n10 = int(((a == 0) & (b == 1)).sum()), int(((a == 1) & (b == 0)).sum())
    p = float(stats.binomtest(n01, n01 + n10, 0.5).pvalue) if n01 + n10 else 1.0
    return McNemar(n01, n10, p)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjusted p-values, in the given order."""
    values = np.asarray(p_values, dtype=float)
    if values.size == 0:
        return []
    if not ((values >= 0) & (values <= 1)).all():
        raise ValueError(f"p-values must lie in [0, 1]; got {list(p_values)}")
    return [float(value) for value in multipletests(values, method="holm")[1]]


def paired_bootstrap(
    first: ArrayLike,
    second: ArrayLike,
    *,
    seed: int,
    weights: ArrayLike | None = None,
    num_resamples: int = 10_000,
    confidence: float = 0.95,
) -> Difference:
    """Mean of ``second - first`` with a percentile interval from resampling examples, both scores of one together.

    With ``weights`` (an example's tokens, say) the mean is weighted and an example's weight is resampled with it.
    Equal examples are tallied first, so a resample is one multinomial draw: the same distribution, less work.
    """
    a, b = _pairs(first, second)
    weight = np.ones_like(a) if weights is None else _vector(weights)
    if weight.size != a.size or not (weight > 0).all():
        raise ValueError(f"weights must be positive, one an example; got {weight.size} for {a.size} examples")
    kinds, counts = np.unique(np.stack([b - a, weight]), axis=1, return_counts=True)
    generator = np.random.default_rng(seed)
    block = max(1, 10_000_000 // counts.size)
    means = []
    for start in range(0, num_resamples, block):
        draws = generator.multinomial(a.size, counts / a.size, size=min(block, num_resamples - start))
        means.append(draws @ (kinds[0] * kinds[1]) / (draws @ kinds[1]))
    low, high = np.quantile(np.concatenate(means), _tails(confidence))
    return Difference(float(np.average(b - a, weights=weight)), float(low), float(high))


def pool_over_seeds(pairs: Sequence[tuple[ArrayLike, ArrayLike]], *, confidence: float = 0.95) -> Pooled:
    """Mean over seeds of the paired difference ``second - first``, with seed as a random effect.

    One pair of outcome arrays a seed. In the one-way random-effects model ``d_si = mu + u_s + e_si`` (seed s, example
    i) with as many examples for every seed, the best estimate of ``mu`` is the mean of the seeds' mean differences,
    and its variance, between and within seeds together, is the variance of those means over their number; the
    interval is Student's with ``num_seeds - 1`` degrees of freedom. Unequal counts keep equal weights. Where the
    seeds agree more closely than their examples allow, the variance within seeds is used instead (a variance between
    seeds cannot be negative). ``between_seed_sd`` is the method-of-moments estimate of the spread of ``u_s``.
    """
    if not pairs:
        raise ValueError("need the outcomes of at least one seed")
    differences = [b - a for a, b in (_pairs(*pair) for pair in pairs)]
    means = np.array([d.mean() for d in differences])
    within = np.array([d.var(ddof=1) / d.size if d.size > 1 else 0.0 for d in differences])
    count = len(means)
    estimate, within_se = float(means.mean()), float(np.sqrt(within.mean() / count))
    if count == 1:
        return Pooled(estimate, None, None, None, 1, None, within_se, "one seed: no interval over seeds")
    between = float(np.sqrt(max(0.0, means.var(ddof=1) - within.mean())))
    se = max(float(np.sqrt(means.var(ddof=1) / count)), within_se)
    method = f"balanced one-way random effects of seed, Student's t with {count - 1} degrees of freedom"
    if se == 0:
        return Pooled(estimate, estimate, estimate, 1.0 if estimate == 0 else 0.0, count, between, within_se, method)
    half = float(stats.t.ppf(_tails(confidence)[1], count - 1)) * se
    p = float(2 * stats.t.sf(abs(estimate) / se, count - 1))
    return Pooled(estimate, estimate - half, estimate + half, p, count, between, within_se, method)


def mean_interval(values: ArrayLike, *, confidence: float = 0.95) -> Difference:
    """Mean of two or more values, one a seed, with Student's interval."""
    array = _vector(values)
    if array.size < 2:
        raise ValueError(f"an interval needs two values or more; got {array.size}")
    middle, half = float(array.mean()), float(stats.t.ppf(_tails(confidence)[1], array.size - 1) * stats.sem(array))
    return Difference(middle, middle - half, middle + half)


def usable_context(
    outcomes: Mapping[int, ArrayLike],
    *,
    threshold: float,
    seed: int,
    num_resamples: int = 10_000,
    confidence: float = 0.95,
) -> UsableContext:
    """Length at which accuracy first falls to ``threshold``, linear in the logarithm of length between tested lengths.

    ``outcomes`` maps a tested length in tokens to its 0/1 outcomes. Accuracy still above the threshold at the longest
    length, or already under it at the shortest, has no crossing and says so. The interval is a percentile bootstrap
    that resamples examples within each length; resamples without a crossing count as the far end they lie at.
    """
    if not outcomes:
        raise ValueError("need outcomes at one length or more")
    _open_unit(threshold, "threshold")
    lengths = np.array(sorted(outcomes), dtype=float)
    if lengths[0] <= 0:
        raise ValueError(f"lengths must be positive; got {lengths[0]:g}")
    scores = [_vector(outcomes[int(length)]) for length in lengths]
    for score in scores:
        if not np.isin(score, (0, 1)).all():
            raise ValueError("usable context needs outcomes that are 0 or 1")
    accuracy = np.array([[score.mean() for score in scores]])
    generator = np.random.default_rng(seed)
    resampled = np.stack([generator.binomial(s.size, s.mean(), num_resamples) / s.size for s in scores], axis=1)
    estimate = float(_crossing(lengths, accuracy, threshold)[0])
    # Ends that are resamples themselves: interpolating between a length and infinity has no meaning.
    tails = _tails(confidence)
    crossings = np.sort(_crossing(lengths, resampled, threshold))
    low = float(np.quantile(crossings, tails[0], method="lower"))
    high = float(np.quantile(crossings, tails[1], method="higher"))
    return UsableContext(threshold, *_bound(estimate), *_bound(low), *_bound(high))


def _crossing(lengths: NDArray, accuracy: NDArray, threshold: float) -> NDArray:
    """First crossing of each row of ``accuracy`` [rows, lengths]; 0 below the shortest, inf beyond the longest."""
    under = accuracy < threshold
    first = np.where(under.any(axis=1), under.argmax(axis=1), len(lengths))
    result = np.full(len(accuracy), np.inf)
    result[first == 0] = 0.0
    inside = (first > 0) & (first < len(lengths))
    after = first[inside]
    rows = np.flatnonzero(inside)
    upper, lower = accuracy[rows, after - 1], accuracy[rows, after]
    share = (upper - threshold) / (upper - lower)
    logs = np.log(lengths)
    result[inside] = np.exp(logs[after - 1] + share * (logs[after] - logs[after - 1]))
    return result


def _bound(length: float) -> tuple[float | None, str]:
    if length == 0:
        return None, BELOW
    if np.isinf(length):
        return None, BEYOND
    return length, CROSSED


def _vector(values: ArrayLike) -> NDArray:
    array = np.asarray(values, dtype=float)
    if array.ndim != 1 or array.size == 0 or not np.isfinite(array).all():
        raise ValueError("outcomes must be a non-empty list of finite numbers, one an example")
    return array


def _pairs(first: ArrayLike, second: ArrayLike) -> tuple[NDArray, NDArray]:
    a, b = _vector(first), _vector(second)
    if a.size != b.size:
        raise ValueError(f"paired outcomes must be of the same examples; got {a.size} and {b.size}")
    return a, b


def _open_unit(value: float, name: str = "confidence") -> float:
    if not 0 < value < 1:
        raise ValueError(f"{name} must lie between 0 and 1; got {value}")
    return value


def _tails(confidence: float) -> tuple[float, float]:
    tail = (1 - _open_unit(confidence)) / 2
    return tail, 1 - tail
