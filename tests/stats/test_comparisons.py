"""Paired comparisons of scores against values worked by hand, scipy, and their levels."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as reference

from perturn.stats import (
    mean_interval,
    paired_comparison,
)
from support.task_scores import by_task, scores


def test_comparison_by_hand():
    """Differences 0.5, 0.25, -0.25, 0: mean 0.125. Signs of (0.5, 0.25, 0.25) with |sum| >= 0.5: 6 of 8."""
    a = {"t1": 1.0, "t2": 0.75, "t3": 0.25, "t4": 0.5, "only-a": 0.0}
    b = {"t1": 0.5, "t2": 0.5, "t3": 0.5, "t4": 0.5, "only-b": 1.0}

    result = paired_comparison(a, b)

    assert (result.n, result.wins, result.losses, result.ties) == (4, 2, 1, 1)
    assert result.mean_difference == 0.125
    assert result.p_value == 6 / 8


def test_comparison_of_partial_scores_is_the_mean_of_the_differences():
    a, b = by_task(np.random.default_rng(1).random(40)), by_task([0.5] * 40)

    expected = mean_interval([a[task] - b[task] for task in sorted(a)], bounds=(-1, 1))

    assert (paired_comparison(a, b).low, paired_comparison(a, b).high) == (expected.low, expected.high)


def test_rounding_is_not_a_difference():
    result = paired_comparison({"x": 0.1 + 0.2, "y": 0.5}, {"x": 0.3, "y": 0.25})

    assert (result.wins, result.losses, result.ties) == (1, 0, 1)


def test_rounding_does_not_make_a_flip_less_extreme():
    """Differences 0.1, 0.2, 0.3, -0.4, 0.7: |sum| is 0.9. In exact tenths, 14 of 32 flips reach it."""
    result = paired_comparison(by_task([0.1, 0.2, 0.3, 0.0, 0.7]), by_task([0.0, 0.0, 0.0, 0.4, 0.0]))

    assert result.p_value == 14 / 32


def test_comparison_is_exact_when_few_tasks_differ():
    """Ten wins of one size: 2 of 2^10 flips are as extreme; ties change nothing."""
    a = {str(i): 1.0 if i < 10 else 0.5 for i in range(50)}
    b = {str(i): 0.5 for i in range(50)}

    assert paired_comparison(a, b).p_value == 2 / 2**10


@pytest.mark.parametrize("n", [8, 60])
def test_comparison_agrees_with_scipy(n):
    """Exact for 8 tasks; for 60, two estimates of p = 0.008 from 10 000 flips agree to 3 standard errors."""
    generator = np.random.default_rng(n)
    a, b = generator.beta(2, 1, n), generator.beta(1.6, 1.1, n)
    expected = reference.permutation_test(
        (a, b), lambda x, y, axis: np.mean(x - y, axis=axis), permutation_type="samples", vectorized=True,
        n_resamples=9999, rng=3,
    )  # fmt: skip

    result = paired_comparison(by_task(a), by_task(b))

    assert result.mean_difference == pytest.approx(expected.statistic)
    assert result.p_value == pytest.approx(expected.pvalue, abs=1e-12 if n == 8 else 0.004)


def test_comparison_never_gives_a_p_value_of_zero():
    a, b = by_task([1.0] * 100), by_task([0.0] * 100)

    assert paired_comparison(a, b).p_value == 1 / 10_000


def test_comparison_of_equal_scores_says_how_little_is_known():
    """20 ties: a difference may be hiding in 1 - 0.025^(1/20) = 0.16843 of the tasks."""
    result = paired_comparison(by_task([0.3] * 20), by_task([0.3] * 20))

    assert (result.mean_difference, result.p_value, result.ties) == (0.0, 1.0, 20)
    assert (result.low, result.high) == pytest.approx((-0.16843, 0.16843), abs=1e-5)


def test_comparison_rejects_at_its_level():
    """Without a difference, p <= 0.1 comes up in at most about 10 % of 400 comparisons."""
    generator = np.random.default_rng(5)
    a, b = generator.random((400, 12)), generator.random((400, 12))

    below = [paired_comparison(by_task(x), by_task(y)).p_value <= 0.1 for x, y in zip(a, b, strict=True)]

    assert 0.06 <= np.mean(below) <= 0.14


@given(st.lists(st.tuples(scores, scores), min_size=1, max_size=40))
def test_comparison_is_antisymmetric(pairs):
    a, b = (by_task(side) for side in zip(*pairs, strict=True))

    forth, back = paired_comparison(a, b), paired_comparison(b, a)

    assert (forth.wins, forth.losses, forth.ties, forth.n) == (back.losses, back.wins, back.ties, back.n)
    assert forth.p_value == back.p_value
    assert (forth.mean_difference, forth.low, forth.high) == pytest.approx(
        (-back.mean_difference, -back.high, -back.low), abs=1e-12
    )


@given(st.lists(st.tuples(scores, scores), min_size=1, max_size=30), st.randoms())
def test_comparison_does_not_depend_on_the_order_of_tasks(pairs, random):
    a, b = (by_task(side) for side in zip(*pairs, strict=True))
    tasks = list(a)
    random.shuffle(tasks)

    assert paired_comparison({task: a[task] for task in tasks}, b) == paired_comparison(a, b)


def test_comparison_of_successes_by_hand():
    """20 tasks, 5 won and 1 lost; one more of each: mean 4/22, variance 8/22 - (4/22)^2.

    The error is sqrt(0.33058/22) = 0.12258; McNemar: 2 * (1 + 6) / 2^6.
    """
    a = by_task([1] * 5 + [0] + [1] * 10 + [0] * 4)
    b = by_task([0] * 5 + [1] + [1] * 10 + [0] * 4)

    result = paired_comparison(a, b)

    assert (result.wins, result.losses, result.ties) == (5, 1, 14)
    assert result.mean_difference == pytest.approx(0.2)
    assert (result.low, result.high) == pytest.approx(
        (0.18182 - 1.95996 * 0.12258, 0.18182 + 1.95996 * 0.12258), abs=1e-4
    )
    assert result.mcnemar_p_value == pytest.approx(14 / 64)


@pytest.mark.parametrize(
    ("wins", "losses", "ties"), [(0, 0, 9), (1, 0, 0), (0, 1, 3), (12, 3, 41), (40, 20, 5)]
)
def test_mcnemar_stands_beside_the_sign_flips_where_scores_are_successes(wins, losses, ties):
    """Differences of one size: the flips estimate what the binomial gives exactly; up to 16, they are equal."""
    a = by_task([1] * wins + [0] * losses + [1] * ties)
    b = by_task([0] * wins + [1] * losses + [1] * ties)

    result = paired_comparison(a, b)

    expected = reference.binomtest(wins, wins + losses).pvalue if wins + losses else 1.0
    assert result.mcnemar_p_value == pytest.approx(expected)
    assert result.p_value == pytest.approx(expected, abs=1e-12 if wins + losses <= 16 else 0.004)
    assert result.low < result.mean_difference < result.high or wins + losses in (0, 1)
    assert result.low < result.high


def test_mcnemar_is_not_asked_of_partial_scores():
    assert paired_comparison({"x": 1, "y": 0.5}, {"x": 0, "y": 0}).mcnemar_p_value is None
    assert paired_comparison({"x": 1, "y": 0}, {"x": 0, "y": 0}, bounds=None).mcnemar_p_value is None


def test_coverage_of_a_difference_of_successes():
    """20 tasks, 8 % won and 2 % lost: nominal 95 %."""
    generator = np.random.default_rng(9)
    differences = generator.choice([1, -1, 0], p=[0.08, 0.02, 0.9], size=(150, 20))

    found = [
        paired_comparison(by_task(np.maximum(row, 0)), by_task(np.maximum(-row, 0))) for row in differences
    ]

    assert np.mean([result.low <= 0.06 <= result.high for result in found]) > 0.92


def test_large_samples_are_drawn_in_chunks(monkeypatch):
    """Chunks draw the same numbers as one draw would: memory changes, results do not."""
    values = np.random.default_rng(0).random(50)
    a, b = by_task(values), by_task(values[::-1] ** 1.2)
    whole = paired_comparison(a, b)

    monkeypatch.setattr("perturn.stats.paired_tests._CHUNK", 7_000)

    assert paired_comparison(a, b) == whole
