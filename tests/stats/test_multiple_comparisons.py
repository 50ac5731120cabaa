"""Holm's correction and the smallest difference: values by hand, agreement with simulation, and both ends."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as reference

from perturn.stats import benjamini_hochberg, holm, smallest_difference

shares = st.lists(st.floats(0, 1), max_size=12)


def test_holm_by_hand():
    """0.01 * 4, then 0.03 * 3, then 0.04 * 2 which is raised to 0.09, then 0.5 * 1."""
    assert holm([0.01, 0.04, 0.03, 0.5]) == pytest.approx([0.04, 0.09, 0.09, 0.5])


@given(shares)
def test_holm_is_between_nothing_and_bonferroni_and_keeps_the_order(p_values):
    found = holm(p_values)

    assert all(p <= each <= min(1, p * len(p_values)) for p, each in zip(p_values, found, strict=True))
    order = np.argsort(p_values, kind="stable")
    assert np.all(np.diff(np.array(found)[order]) >= 0) if found else found == []


def test_holm_finds_nothing_where_nothing_is():
    """Five true hypotheses: any is below 0.05 in at most 5 % of 4000 draws."""
    draws = np.random.default_rng(2).random((4000, 5))

    assert np.mean([min(holm(each)) < 0.05 for each in draws.tolist()]) == pytest.approx(0.049, abs=0.01)


def test_holm_refuses_what_is_no_share():
    with pytest.raises(ValueError, match="between 0 and 1"):
        holm([0.2, math.nan])


def test_q_values_by_hand():
    """0.01 * 4/1; 0.03 * 4/2 = 0.06 and 0.04 * 4/3 = 0.0533, which the one before is lowered to; 0.5 * 4/4."""
    assert benjamini_hochberg([0.01, 0.04, 0.03, 0.5]) == pytest.approx([0.04, 0.16 / 3, 0.16 / 3, 0.5])


@given(shares)
def test_q_values_agree_with_scipy(p_values):
    expected = reference.false_discovery_control(p_values).tolist() if p_values else []

    assert benjamini_hochberg(p_values) == pytest.approx(expected)


def test_q_values_refuse_what_is_no_share():
    with pytest.raises(ValueError, match="between 0 and 1"):
        benjamini_hochberg([1.2])


def test_smallest_difference_by_hand():
    """Without a limit of freedom: 1.95996 + 0.84162 standard errors, but for the other tail, which is nothing."""
    assert smallest_difference(0.5, math.inf) == pytest.approx(0.5 * 2.80159, abs=1e-4)


@pytest.mark.parametrize("freedom", [2, 4, 9, 139])
def test_smallest_difference_has_its_power(freedom):
    """Student's t of values drawn around it: 80 % of 20 000 tests find it, to three standard errors of 0.3 %."""
    size = smallest_difference(1.0, freedom, level=0.02)
    generator = np.random.default_rng(freedom)
    error = np.sqrt(generator.chisquare(freedom, 20_000) / freedom)

    t = (generator.normal(size, 1, 20_000)) / error

    assert np.mean(np.abs(t) > reference.t.isf(0.01, freedom)) == pytest.approx(0.8, abs=0.01)


@pytest.mark.parametrize("freedom", [9, 139])
def test_smallest_difference_agrees_with_the_noncentral_t(freedom):
    size, quantile = smallest_difference(1.0, freedom), reference.t.isf(0.025, freedom)

    assert reference.nct.sf(quantile, freedom, size) == pytest.approx(0.8, abs=2e-3)


def test_smallest_difference_at_both_ends():
    """Nothing differs: nothing is needed. One degree of freedom and many comparisons: it stays finite."""
    assert smallest_difference(0.0, 3) == 0.0
    assert 100 < smallest_difference(1.0, 1, level=0.05 / 20) < 2000


@pytest.mark.parametrize(("level", "power"), [(0, 0.8), (0.05, 1), (0.5, 0.4)])
def test_smallest_difference_refuses_what_is_no_test(level, power):
    with pytest.raises(ValueError, match="level"):
        smallest_difference(1.0, 5, level=level, power=power)
