import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.contingency_tables import mcnemar as library_mcnemar

from qed import statistics


def test_wilson_is_the_formula():
    z, n, p = stats.norm.ppf(0.975), 500, 299 / 500
    centre, half = p + z * z / (2 * n), z * np.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    expected = ((centre - half) / (1 + z * z / n), (centre + half) / (1 + z * z / n))
    assert statistics.wilson(299, 500) == pytest.approx(expected, abs=1e-12)
    low, high = statistics.wilson(0, 200)
    assert low == 0.0
    assert high == pytest.approx(z * z / (200 + z * z))


def test_clopper_pearson_ends_are_binomial_tails():
    low, high = statistics.clopper_pearson(7, 40)
    assert stats.binom.sf(6, 40, low) == pytest.approx(0.025)
    assert stats.binom.cdf(7, 40, high) == pytest.approx(0.025)
    # No successes: the upper end solves (1 - p)^n = alpha / 2.
    assert statistics.clopper_pearson(0, 20) == pytest.approx((0.0, 1 - 0.025 ** (1 / 20)))
    assert statistics.clopper_pearson(20, 20)[1] == 1.0


@pytest.mark.parametrize(("correct", "total"), [(1, 0), (5, 4), (-1, 4)])
def test_impossible_counts_are_refused(correct, total):
    with pytest.raises(ValueError, match="of"):
        statistics.wilson(correct, total)


def test_mcnemar_counts_and_p_by_hand():
    first = [1, 1, 1, 1, 0, 0, 0, 1, 1, 1]
    second = [1, 1, 0, 0, 0, 0, 1, 0, 0, 0]
    # One gained, five lost: p = 2 * (C(6,0) + C(6,1)) / 2^6.
    assert statistics.mcnemar(first, second) == (1, 5, pytest.approx(14 / 64))
    assert statistics.mcnemar(second, first) == (5, 1, pytest.approx(14 / 64))
    assert statistics.mcnemar(first, first) == (0, 0, 1.0)


def test_mcnemar_is_the_library_exact_test():
    generator = np.random.default_rng(0)
    first, second = generator.integers(0, 2, 300), generator.random(300) < 0.6
    table = [[((first == i) & (second == j)).sum() for j in (0, 1)] for i in (0, 1)]
    ours = statistics.mcnemar(first, second)
    assert (ours.n01, ours.n10) == (table[0][1], table[1][0])
    assert ours.p == pytest.approx(library_mcnemar(table, exact=True).pvalue)


def test_mcnemar_refuses_scores_and_unpaired():
    with pytest.raises(ValueError, match="0 or 1"):
        statistics.mcnemar([0.5, 1], [0, 1])
    with pytest.raises(ValueError, match="3 and 2"):
        statistics.mcnemar([0, 1, 1], [0, 1])


def test_holm_by_hand():
    # Sorted .005 .01 .03 .04 times 4 3 2 1, made monotone: .02 .03 .06 .06.
    assert statistics.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert statistics.holm([0.7, 0.9]) == pytest.approx([1.0, 1.0])
    assert statistics.holm([]) == []


def test_paired_bootstrap_matches_scipy_and_normal_theory():
    generator = np.random.default_rng(1)
    first = generator.integers(0, 2, 400)
    second = np.where(generator.random(400) < 0.2, 1, first)
    ours = statistics.paired_bootstrap(first, second, seed=3)
    delta = second - first
    half = stats.norm.ppf(0.975) * delta.std() / np.sqrt(400)
    assert ours.estimate == pytest.approx(delta.mean())
    assert (ours.low, ours.high) == pytest.approx((delta.mean() - half, delta.mean() + half), abs=0.005)
    theirs = stats.bootstrap((delta,), np.mean, method="percentile", rng=np.random.default_rng(0)).confidence_interval
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=0.005)
    assert ours == statistics.paired_bootstrap(first, second, seed=3)


def test_weighted_bootstrap_is_the_ratio_of_sums():
    generator = np.random.default_rng(6)
    weights = generator.integers(1, 20, 300)
    first, second = generator.normal(size=300), generator.normal(0.2, 1, 300)
    ours = statistics.paired_bootstrap(first, second, seed=0, weights=weights)
    mean = (weights * (second - first)).sum() / weights.sum()
    assert ours.estimate == pytest.approx(mean)
    # The linearised standard error of a ratio of means.
    se = np.sqrt((weights**2 * (second - first - mean) ** 2).sum()) / weights.sum()
    assert (ours.low, ours.high) == pytest.approx((mean - 1.96 * se, mean + 1.96 * se), abs=0.15 * se)
    with pytest.raises(ValueError, match="positive"):
        statistics.paired_bootstrap([1, 0], [0, 1], seed=0, weights=[1, 0])


def test_pooling_over_seeds_is_the_t_interval_of_seed_means():
    # Seeds differ far more than their 200 examples explain, so the plain one-sample t test is the answer.
    generator = np.random.default_rng(2)
    rates = [(0.9, 0.2), (0.5, 0.6), (0.1, 0.95), (0.3, 0.4)]
    pairs = [((generator.random(200) < p).astype(int), (generator.random(200) < q).astype(int)) for p, q in rates]
    means = [np.mean(b) - np.mean(a) for a, b in pairs]
    pooled = statistics.pool_over_seeds(pairs)
    test = stats.ttest_1samp(means, 0)
    interval = test.confidence_interval()
    assert pooled.estimate == pytest.approx(np.mean(means))
    assert pooled.p == pytest.approx(test.pvalue)
    assert (pooled.low, pooled.high) == pytest.approx((interval.low, interval.high))
    within = np.mean([np.var(b - a, ddof=1) / 200 for a, b in pairs])
    assert pooled.between_seed_sd == pytest.approx(np.sqrt(np.var(means, ddof=1) - within))


def test_pooling_never_claims_less_variance_than_the_examples_have():
    same = ([0, 1, 0, 1, 1, 0], [1, 1, 0, 0, 1, 1])
    pooled = statistics.pool_over_seeds([same, same, same])
    assert pooled.between_seed_sd == 0
    se = np.sqrt(np.var(np.subtract(same[1], same[0]), ddof=1) / 6 / 3)
    assert pooled.high - pooled.estimate == pytest.approx(stats.t.ppf(0.975, 2) * se)
    one = statistics.pool_over_seeds([same])
    assert (one.low, one.p, one.num_seeds) == (None, None, 1)


def test_pooled_interval_covers():
    generator = np.random.default_rng(4)
    covered = 0
    for _ in range(300):
        pairs = []
        for effect in 0.1 + 0.1 * generator.standard_normal(4):
            first = generator.random(100) < 0.4
            pairs.append((first.astype(int), (generator.random(100) < 0.4 + effect).astype(int)))
        pooled = statistics.pool_over_seeds(pairs)
        covered += pooled.low <= 0.1 <= pooled.high
    assert 0.91 <= covered / 300 <= 0.99


def outcomes(**accuracy_percent):
    return {int(name[1:]): [1] * percent + [0] * (100 - percent) for name, percent in accuracy_percent.items()}


def test_usable_context_interpolates_in_log_length():
    # From 80 % at 1024 to 20 % at 4096: half way in accuracy is half way in log length.
    result = statistics.usable_context(outcomes(n1024=80, n4096=20), threshold=0.5, seed=0)
    assert result.status == statistics.CROSSED
    assert result.length == pytest.approx(2048)
    assert result.low < 2048 < result.high
    assert result.low >= 1024
    assert result.high <= 4096


def test_usable_context_is_the_first_crossing():
    result = statistics.usable_context(outcomes(n256=100, n512=0, n1024=100, n2048=0), threshold=0.5, seed=0)
    assert result.length == pytest.approx(np.sqrt(256 * 512))
    at_threshold = statistics.usable_context(outcomes(n256=90, n512=50, n1024=0), threshold=0.5, seed=0)
    assert at_threshold.length == pytest.approx(512)


def test_usable_context_outside_the_tested_range():
    beyond = statistics.usable_context(outcomes(n256=100, n512=100), threshold=0.8, seed=0)
    assert beyond == (0.8, None, statistics.BEYOND, None, statistics.BEYOND, None, statistics.BEYOND)
    below = statistics.usable_context(outcomes(n256=0, n512=0), threshold=0.8, seed=0)
    assert below.status == below.low_status == below.high_status == statistics.BELOW
    # Near the threshold at the last length: the estimate is inside, the interval's upper end is not.
    edge = statistics.usable_context(outcomes(n256=100, n512=78), threshold=0.8, seed=0)
    assert edge.status == edge.low_status == statistics.CROSSED
    assert edge.high_status == statistics.BEYOND
    assert edge.high is None


def test_usable_context_bootstrap_covers():
    generator = np.random.default_rng(5)
    covered = 0
    truth = [(256, 0.97), (512, 0.7), (1024, 0.1)]
    for trial in range(200):
        sample = {length: (generator.random(100) < p).astype(int) for length, p in truth}
        result = statistics.usable_context(sample, threshold=0.5, seed=trial, num_resamples=500)
        covered += result.low <= 512 * 2 ** (1 / 3) <= result.high
    assert covered / 200 >= 0.9


def test_mean_interval_is_students():
    values = [0.1, 0.4, 0.35, 0.2]
    found = statistics.mean_interval(values)
    wanted = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    np.testing.assert_allclose(found, [np.mean(values), wanted.low, wanted.high])
    with pytest.raises(ValueError, match="two values or more"):
        statistics.mean_interval([0.1])
