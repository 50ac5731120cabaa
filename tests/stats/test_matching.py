"""Matchings of small matrices by hand, against all that there are, and shares against the conditions of an optimum."""

from itertools import permutations
from math import exp, log

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from perturn.stats.matching import _plan, greedy_matches, hard_matches, soft_matches

QUICK = settings(derandomize=True)
VALUES = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])


@st.composite
def matrices(draw, most=4):
    """A matrix of quarters, so that sums are exact and ties frequent."""
    rows, columns = draw(st.integers(1, most)), draw(st.integers(1, most))
    return [[draw(VALUES) for _ in range(columns)] for _ in range(rows)]


def every_matching(similarity):
    """All ways to match as many as can be, as what each row gets."""
    rows, columns = len(similarity), len(similarity[0])
    size = max(rows, columns)
    for order in permutations(range(size)):
        yield [similarity[i][order[i]] if order[i] < columns else 0.0 for i in range(rows)]


def test_hand_worked_hard_matching():
    """0.9 + 0.1 is less than 0.8 + 0.75, though 0.9 is the largest; the third row is left."""
    similarity = [[0.9, 0.8], [0.75, 0.1], [0.0, 0.5]]

    assert hard_matches(similarity) == [0.8, 0.75, 0.0]
    assert greedy_matches(similarity) == [0.9, 0.0, 0.5]


def test_a_repetition_is_matched_less_than_the_first_of_its_kind():
    """Three equal calls for two gold ones; and where two sums are equal, the first row has the more similar one."""
    assert hard_matches([[1.0, 1.0]] * 3) == greedy_matches([[1.0, 1.0]] * 3) == [1.0, 1.0, 0.0]
    assert hard_matches([[1.0], [1.0]]) == [1.0, 0.0]
    assert hard_matches([[1.0, 0.5], [1.0, 0.5]]) == [1.0, 0.5]
    assert hard_matches([[0.5, 0.0], [1.0, 0.5]]) == [0.5, 0.5]


@pytest.mark.parametrize("empty", [[], [[], []]])
def test_nothing_is_matched_with_nothing(empty):
    assert hard_matches(empty) == greedy_matches(empty) == soft_matches(empty, 0.1) == [0.0] * len(empty)


@QUICK
@given(matrices())
def test_a_hard_matching_is_the_best_of_all(similarity):
    """Largest sum; among those the one that is best for earlier rows, with weights P, P - 1, ..., 1."""
    rows = len(similarity)
    ways = list(every_matching(similarity))
    largest = max(map(sum, ways))
    early = max(sum((rows - i) * each for i, each in enumerate(way)) for way in ways if sum(way) == largest)

    found = hard_matches(similarity)

    assert found in ways
    assert sum(found) == largest
    assert sum((rows - i) * each for i, each in enumerate(found)) == early


@QUICK
@given(matrices())
def test_a_greedy_matching_takes_the_largest_that_is_left(similarity):
    """Crossing out rows and columns by hand; it never sums to more than the hard one, and to half of it at least."""
    left, expected = np.array(similarity), [0.0] * len(similarity)
    while left.max() > 0:
        i, j = np.unravel_index(left.argmax(), left.shape)
        expected[i] = left[i, j]
        left[i, :], left[:, j] = 0, 0

    found = greedy_matches(similarity)

    assert found == expected
    assert sum(hard_matches(similarity)) / 2 <= sum(found) <= sum(hard_matches(similarity))


def test_hand_worked_shares():
    """S = I, eps 0.5: a plan a, b with a + b = 1/2 and a / b = e^2, so 1/2 / (1 + e^-2) = 0.440399 of each row."""
    assert_allclose(soft_matches(np.eye(2), 0.5), [0.5 / (1 + exp(-2))] * 2, rtol=1e-9)
    assert_allclose(soft_matches([[1.0], [0.5]], 0.1), [0.5, 0.25], rtol=1e-12)
    assert_allclose(soft_matches([[1.0, 0.0]], 0.1), [0.5], rtol=1e-12)


@settings(QUICK, max_examples=40)
@given(matrices(), st.sampled_from([0.5, 2.0]))
def test_shares_are_the_optimum(similarity, regularization):
    """Its masses are right, and log T - S / eps is a row term plus a column term, which no other plan's is."""
    given_ = np.array(similarity)
    rows, columns = given_.shape
    plan = _plan(given_, regularization)
    rest = np.log(plan) - given_ / regularization

    assert_allclose(plan.sum(1), 1 / rows, rtol=1e-12)
    assert_allclose(plan.sum(0), 1 / columns, rtol=1e-8)
    assert_allclose(rest - rest[:1] - rest[:, :1] + rest[0, 0], 0, atol=1e-9)
    assert_allclose(soft_matches(similarity, regularization), (plan * given_).sum(1), rtol=0, atol=0)


def test_a_small_regularization_overflows_nothing_and_is_near_to_one_to_one():
    """exp(1 / 1e-4) is beyond float64; the shares of two clear pairs are 1/2 each."""
    assert_allclose(soft_matches([[1.0, 0.2], [0.1, 0.9]], 1e-4), [0.5, 0.45], rtol=1e-9)
    assert log(np.finfo(float).max) < 1 / 1e-4


@pytest.mark.parametrize("matched", [hard_matches, greedy_matches, lambda s: soft_matches(s, 0.1)])
def test_calls_that_are_similar_to_nothing_get_nothing(matched):
    assert matched([[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("small", [0.0, 1e-7, float("nan")])
def test_a_regularization_at_which_digits_are_lost_is_refused(small):
    with pytest.raises(ValueError, match="regularization must be >= 1e-06, got"):
        soft_matches([[1.0, 0.5]], small)
