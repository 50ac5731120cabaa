"""Intervals and comparisons: values by hand, agreement with scipy, coverage, and identities."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as reference

from perturn.stats import (
    cluster_interval,
    mean_interval,
    paired_comparison,
    rate_interval,
)
from support.task_scores import by_task, scores

score_lists = st.lists(scores, min_size=1, max_size=40)


def test_rate_by_hand():
    """8 of 10, z = 1.96: centre (0.8 + 0.19207)/1.38415 = 0.71674, half 0.22659."""
    estimate = rate_interval(8, 10)

    assert (estimate.mean, estimate.n) == (0.8, 10)
    assert estimate.low == pytest.approx(0.49016, abs=1e-4)
    assert estimate.high == pytest.approx(0.94333, abs=1e-4)


@pytest.mark.parametrize(("successes", "n"), [(0, 1), (1, 1), (0, 20), (20, 20), (3, 7), (400, 1000)])
@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.99])
def test_rate_agrees_with_scipy(successes, n, confidence):
    expected = reference.binomtest(successes, n).proportion_ci(confidence, method="wilson")

    estimate = rate_interval(successes, n, confidence)

    assert (estimate.low, estimate.high) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_mean_of_few_values_by_hand():
    """0.4, 0.5, 0.6: mean 0.5, error 0.1/sqrt(3), so 0.25/error^2 = 75 trials; t(2)^2 = 18.513.

    Half of the interval is t/(1 + t^2/75) * sqrt(0.25/75 + t^2/(4 * 75^2)) = 3.4509 * 0.064454 = 0.22243.
    """
    estimate = mean_interval([0.4, 0.5, 0.6])

    assert estimate.mean == pytest.approx(0.5)
    assert (estimate.low, estimate.high) == pytest.approx((0.27757, 0.72243), abs=1e-4)


def test_mean_without_bounds_agrees_with_scipy():
    values = [0.05, 0.9, 1.0, 0.7, 1.0]

    expected = reference.ttest_1samp(values, 0).confidence_interval()
    estimate = mean_interval(values, bounds=None)

    assert (estimate.low, estimate.high) == pytest.approx((expected.low, expected.high))


@pytest.mark.parametrize(("successes", "n"), [(1, 1), (0, 1), (0, 20), (55, 56), (3, 7), (120, 134)])
@pytest.mark.parametrize("bounds", [(0.0, 1.0), (-1.0, 1.0), (0.0, 100.0)])
def test_values_at_the_bounds_are_a_rate(successes, n, bounds):
    """Whatever the bounds are called, Wilson's interval, which has a width without a single failure too."""
    low, high = bounds
    expected = rate_interval(successes, n)

    estimate = mean_interval([high] * successes + [low] * (n - successes), bounds=bounds)

    assert estimate.high > estimate.low
    assert (estimate.low, estimate.high) == pytest.approx(
        (low + (high - low) * expected.low, low + (high - low) * expected.high), abs=1e-9
    )


@pytest.mark.parametrize("n", [56, 100, 134])
def test_coverage_of_a_rate_near_one(n):
    """The exact share of samples of 0 and 1 whose interval holds the rate; a bootstrap's held 0.86 of some."""
    rates = np.linspace(0.8, 0.95, 31)
    estimates = [mean_interval([1.0] * hits + [0.0] * (n - hits)) for hits in range(n + 1)]
    held = np.array([[found.low <= rate <= found.high for found in estimates] for rate in rates])

    coverage = (held * reference.binom.pmf(np.arange(n + 1), n, rates[:, None])).sum(1)

    assert coverage.min() > 0.92
    assert coverage.mean() > 0.945


def test_coverage_of_partial_scores_near_one():
    """Nine in ten 1, the rest fractions: nominal 95 %; for 30 tasks a bootstrap's intervals held 0.88."""
    generator = np.random.default_rng(3)
    draws = np.where(generator.random((600, 30)) < 0.9, 1.0, generator.beta(5, 2, (600, 30)).round(2))

    hits = [found.low <= 0.9 + 0.1 * 5 / 7 <= found.high for found in map(mean_interval, draws.tolist())]

    assert np.mean(hits) > 0.9


@pytest.mark.parametrize("n", [1, 5, 30])
def test_equal_values_within_the_bounds_still_have_an_interval(n):
    """All 0.5: what is 0.5 - 0.5 q below, with 1 - q the Clopper-Pearson end of n ones; 5 gives 0.4782."""
    expected = reference.binomtest(n, n).proportion_ci(0.95, method="exact")

    estimate = mean_interval([0.5] * n)

    assert (estimate.low, estimate.high) == pytest.approx((0.5 * expected.low, 1 - 0.5 * expected.low))


def test_one_value_in_the_middle_leaves_nearly_everything_open():
    """Unseen share q = 0.975: from 0.4 - 0.975 * 0.4 = 0.01 to 0.4 + 0.975 * 0.6 = 0.985."""
    estimate = mean_interval([0.4])

    assert (estimate.low, estimate.high) == pytest.approx((0.01, 0.985))


def test_one_value_without_bounds_has_no_interval():
    estimate = mean_interval([3.0], bounds=None)

    assert (estimate.low, estimate.high) == (-math.inf, math.inf)


@pytest.mark.parametrize("tiny", [5e-324, 1e-300, 1e-160, 1e-13])
def test_a_spread_that_is_nothing_beside_the_bounds_is_none(tiny):
    """Its square may be 0 in floating point; the interval is that of equal values."""
    for found in (mean_interval([0.0, tiny]), cluster_interval([0.0, tiny], ["a", "b"])):
        assert found.low == pytest.approx(0.0, abs=1e-12)
        assert found.high == pytest.approx(mean_interval([tiny, tiny]).high)


def test_rounding_is_not_spread():
    values = [0.1 + 0.2] * 10 + [0.3] * 10

    assert mean_interval(values).low == pytest.approx(mean_interval([0.3] * 20).low)


@pytest.mark.parametrize("n", [5, 12, 30, 80])
def test_coverage_of_the_mean(n):
    """A third of ones, the rest Beta(2, 2): nominal 95 %; over 400 repeats its standard error is 1.1 %."""
    generator = np.random.default_rng(7)
    truth = 1 / 3 + 2 / 3 * 0.5
    draws = np.where(generator.random((400, n)) < 1 / 3, 1.0, generator.beta(2, 2, (400, n)))

    hits = [estimate.low <= truth <= estimate.high for estimate in map(mean_interval, draws.tolist())]

    assert 0.92 <= np.mean(hits) <= 0.985


def test_clusters_by_hand():
    """Clusters (1, 0) and (0, 0, 0, 1): m = 1/3, e = 1/3 and -1/3, error = sqrt(2 * 2/9)/6 = 0.1111."""
    estimate = cluster_interval([1, 0, 0, 0, 0, 1], ["a", "a", "b", "b", "b", "b"], bounds=None)

    half = 12.7062 / 9
    assert (estimate.mean, estimate.n) == (pytest.approx(1 / 3), 2)
    assert (estimate.low, estimate.high) == pytest.approx((1 / 3 - half, 1 / 3 + half), abs=1e-4)


def test_clusters_of_one_value_are_independent_values():
    values = [0.1, 0.9, 0.4, 0.6, 0.7]

    estimate, expected = cluster_interval(values, list(range(5))), mean_interval(values)

    assert (estimate.low, estimate.high) == pytest.approx((expected.low, expected.high))


def test_coverage_with_clusters():
    """Turns share most of their trajectory's noise: ours covers 95 %, the naive interval about half."""
    generator = np.random.default_rng(11)
    clusters = np.repeat(np.arange(40), 10).tolist()
    hits, naive = [], []
    for _ in range(300):
        values = generator.normal(0, 1, 40).repeat(10) + generator.normal(0, 0.5, 400)
        estimate = cluster_interval(values.tolist(), clusters, bounds=None)
        hits.append(estimate.low <= 0 <= estimate.high)
        naive.append(abs(values.mean()) <= 1.96 * values.std() / 20)

    assert 0.92 <= np.mean(hits) <= 0.98
    assert np.mean(naive) < 0.7


@pytest.mark.parametrize("values", [[0.2, 0.8], [0.5, 0.5, 0.5]])
def test_one_cluster_counts_once(values):
    estimate = cluster_interval(values, ["only"] * len(values))

    assert (estimate.low, estimate.high) == pytest.approx((0.0125, 0.9875))


@given(score_lists)
def test_interval_contains_the_mean_and_stays_in_bounds(values):
    for estimate in (mean_interval(values), cluster_interval(values, [i // 3 for i in range(len(values))])):
        assert 0 <= estimate.low <= estimate.mean <= estimate.high <= 1


@given(score_lists, st.sampled_from([0.25, 3.0, 100.0]))
def test_interval_scales_with_its_values(values, factor):
    small = mean_interval(values)
    large = mean_interval([factor * value for value in values], bounds=(0, factor))

    assert (large.low, large.high) == pytest.approx((factor * small.low, factor * small.high), abs=1e-9)


@given(score_lists)
def test_higher_confidence_is_wider(values):
    narrow, wide = mean_interval(values, 0.8), mean_interval(values, 0.99)

    assert wide.low <= narrow.low
    assert narrow.high <= wide.high


def test_coverage_of_a_rate_of_turns_near_zero():
    """3 % of turns invalid, in clusters: nominal 95 %; Student's t held 0.87."""
    generator = np.random.default_rng(13)
    clusters = np.repeat(np.arange(30), 8).tolist()
    hits = []
    for _ in range(400):
        rates = generator.beta(0.3, 9.7, 30).repeat(8)
        estimate = cluster_interval((generator.random(240) < rates).astype(float).tolist(), clusters)
        hits.append(estimate.low <= 0.03 <= estimate.high)

    assert np.mean(hits) > 0.9


def test_the_global_generator_is_left_alone():
    np.random.seed(1)
    before = np.random.get_state()[1].tolist()

    paired_comparison(by_task([0.1 * (i % 7) for i in range(30)]), by_task([0.2] * 30))

    assert np.random.get_state()[1].tolist() == before


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mean_interval([]), "values must hold at least one number, got none"),
        (lambda: mean_interval([0.5, math.nan]), "values must be finite, got nan"),
        (lambda: mean_interval([0.5, math.inf], bounds=None), "values must be finite, got inf"),
        (lambda: mean_interval([[0.5]]), "flat list"),
        (lambda: mean_interval([0.5, 70]), r"values must lie in \[0.0, 1.0\], got 70.0"),
        (lambda: mean_interval([0.5], 95), "confidence must be between 0 and 1, got 95"),
        (lambda: rate_interval(0, 0), "at least one trial"),
        (lambda: rate_interval(3, 2), "between 0 and n = 2, got 3"),
        (lambda: rate_interval(-1, 2), "between 0 and n = 2, got -1"),
        (lambda: rate_interval(1, 2, 1.0), "confidence must be"),
        (lambda: paired_comparison({"x": 1}, {"y": 1}), "none shared"),
        (lambda: paired_comparison({"x": 1}, {"x": math.nan}), "scores of b must be finite"),
        (lambda: paired_comparison({"x": 2}, {"x": 1}), "scores of a must lie in"),
        (lambda: cluster_interval([], []), "at least one number"),
        (lambda: cluster_interval([0.1], ["a", "b"]), "got 2 for 1 values"),
        (lambda: cluster_interval([math.nan], ["a"]), "must be finite"),
        (lambda: cluster_interval([0.1], ["a"], 0), "confidence must be"),
    ],
)
def test_errors_say_what_is_wrong(call, message):
    with pytest.raises(ValueError, match=message):
        call()
