"""Rank correlations and their intervals over clusters."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as reference

from perturn.stats import (
    rank_correlation,
    spearman,
)


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=2, max_size=30))
def test_rank_correlation_is_scipys(pairs):
    """Ties have their mean rank; where one side is constant there is none."""
    a, b = zip(*pairs, strict=True)
    if min(len(set(a)), len(set(b))) < 2:
        assert spearman(a, b) is None
        assert rank_correlation(a, b, range(len(a))) is None
    else:
        assert spearman(a, b) == pytest.approx(reference.spearmanr(a, b).statistic, abs=1e-12)


def test_hand_worked_jackknife_of_a_rank_correlation():
    """Ranks 1 2 3 and 1 3 2: r = 1/2. Without one each: -1, 1, 1; pseudo-values 3/2 - 2 r_g: 7/2, -1/2, -1/2.

    Their deviation is 4/sqrt(3), the error 4/3, and t(2) at 95 % is 4.302653: wider than all there is.
    """
    found = rank_correlation([1.0, 2.0, 3.0], [1.0, 3.0, 2.0], "abc")
    narrow = rank_correlation([1.0, 2.0, 3.0], [1.0, 3.0, 2.0], "abc", 0.1)

    assert (found.mean, found.low, found.high, found.n) == (pytest.approx(0.5), -1.0, 1.0, 3)
    assert narrow.high - narrow.mean == pytest.approx(4 / 3 * reference.t.ppf(0.55, 2))


@pytest.mark.slow
def test_the_interval_of_a_rank_correlation_holds_where_clusters_are_alike():
    """Values that share their cluster's number: of 200 samples of 40 clusters, 95 % should hold; 90 % at least do."""
    generator = np.random.default_rng(0)
    clusters = np.arange(40).repeat(5)
    truth = 6 / np.pi * np.arcsin(0.6 / 2)
    held, plain = 0, 0
    for _ in range(200):
        shared = generator.multivariate_normal([0, 0], [[1, 0.6], [0.6, 1]], 40)[clusters]
        own = generator.multivariate_normal([0, 0], [[0.1, 0.06], [0.06, 0.1]], 200)
        a, b = (shared + own).T.tolist()
        found = rank_correlation(a, b, clusters.tolist())
        single = rank_correlation(a, b, range(200))
        held += found.low <= truth <= found.high
        plain += single.low <= truth <= single.high
    assert held >= 180
    assert plain < 150  # as if all turns were independent


def test_many_clusters_are_left_out_in_blocks():
    """A thousand of one value each: the interval is that of a few hundred blocks, near the textbook's."""
    generator = np.random.default_rng(1)
    a = generator.normal(size=1000)
    b = a + generator.normal(size=1000)

    found = rank_correlation(a.tolist(), b.tolist(), range(1000))

    assert found.n == 1000
    assert (found.high - found.low) / 2 == pytest.approx(1.96 * (1 - found.mean**2) / np.sqrt(1000), rel=0.25)


def test_a_rank_correlation_without_spread_between_clusters_is_not_known_exactly():
    """A correlation of 1 in every block, as a rate of n successes in n."""
    found = rank_correlation([1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0], "aabb")

    assert (found.mean, found.high) == (1.0, 1.0)
    assert -1.0 <= found.low < 0.5


def test_a_rank_correlation_that_rests_on_one_value_may_be_anything():
    """Without the single zero of `a`, there is no correlation."""
    a, b = [0.0] + [1.0] * 39, [0.0, 0.0] + [1.0] * 38

    found = rank_correlation(a, b, range(40))

    assert (found.low, found.high) == (-1.0, 1.0)
    assert found.mean == pytest.approx(0.698, abs=1e-3)


def test_rank_correlation_of_lists_of_unequal_length_is_refused():
    with pytest.raises(ValueError, match="got 1 and 2"):
        spearman([1.0], [1.0, 2.0])
