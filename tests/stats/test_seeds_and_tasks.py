"""Scores of seeds on the same tasks: values by hand, coverage and level by simulation, identities, and few values."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as reference

from perturn.stats import (
    crossed_bootstrap,
    crossed_comparison,
    crossed_interval,
    crossed_spread,
    mean_interval,
    paired_comparison,
)

tables = st.tuples(st.integers(1, 4), st.integers(1, 12), st.integers(0, 2**32 - 1)).map(
    lambda shape: np.random.default_rng(shape[2]).integers(0, 2, (2, shape[0], shape[1])).astype(float)
)
"""Two tables of successes, of the same seeds and tasks."""


def simulated(generator, seeds, tasks, *, own=0.0, gain=0.0):
    """Two tables of successes of policies that differ on a few per cent of games, and are alike but for `gain`.

    Games differ in difficulty; a game under a seed in luck that both policies share; and each policy has noise of its
    own, for all games of a seed (`own`), for a game under all seeds, and for a game under a seed.
    """
    shape = (seeds, tasks)
    shared = 0.6 + generator.normal(0, 1.2, (1, tasks)) + generator.normal(0, 0.45, shape)
    sides = (
        shared
        + generator.normal(0, own, (seeds, 1))
        + generator.normal(0, 0.05, (1, tasks))
        + generator.normal(0, 0.1, shape)
        for _ in range(2)
    )
    first, second = sides
    return (first + gain > 0).astype(float).tolist(), (second > 0).astype(float).tolist()


def test_spread_by_hand():
    """Seeds' means 3, 1.5, 0 and tasks' means 2, 1 around 1.5: MS_s = 2 * 2.25, MS_t = 3 * 0.5, MS_e = 1 / 2.

    error^2 = (4.5 + 1) / 6; freedom = 2 (5.5 / 4.5)^2; variances (4.5 - 0.5) / 2 and 1 / 3.
    """
    found = crossed_spread([[4, 2], [2, 1], [0, 0]])

    assert found.error == pytest.approx(math.sqrt(5.5 / 6))
    assert found.freedom == pytest.approx(2.987654, abs=1e-6)
    assert (found.between_seeds, found.between_tasks, found.within) == pytest.approx((2.0, 1 / 3, 0.5))


def test_the_error_is_that_of_the_mean():
    """Variances 0.5 of a seed, 0.3 of a task, 1 of both: 0.5/4 + 0.3/6 + 1/24; 6000 tables know it to 2 %."""
    generator = np.random.default_rng(3)
    made = (
        generator.normal(0, math.sqrt(0.5), (6000, 4, 1))
        + generator.normal(0, math.sqrt(0.3), (6000, 1, 6))
        + generator.normal(0, 1, (6000, 4, 6))
    )

    found = [crossed_spread(table.tolist()) for table in made[:2000]]

    expected = 0.5 / 4 + 0.3 / 6 + 1 / 24
    assert made.mean((1, 2)).var() == pytest.approx(expected, rel=0.06)
    assert np.mean([each.error**2 for each in found]) == pytest.approx(
        expected, rel=0.1
    )  # no variance is below 0
    assert np.mean([each.within for each in found]) == pytest.approx(1, rel=0.05)


def test_one_seed_is_a_sample_of_tasks():
    values = [0.05, 0.9, 1.0, 0.7, 1.0]

    found, expected = crossed_interval([values]), mean_interval(values)

    assert (found.low, found.high, found.n) == (expected.low, expected.high, 5)
    assert crossed_spread([values]).error == pytest.approx(reference.sem(values))


def test_one_seed_is_compared_by_mcnemar():
    """5 wins and no loss in 9: p = 2 / 2^5, which the sign flips agree with."""
    a, b = [[1] * 5 + [0] * 4], [[0] * 9]

    found = crossed_comparison(a, b)
    expected = paired_comparison(dict(zip("abcdefghi", a[0], strict=True)), dict.fromkeys("abcdefghi", 0))

    assert (found.p_value, found.p_value_of_tasks) == (2 / 2**5, 2 / 2**5)
    assert (found.low, found.high) == (expected.low, expected.high)


def test_seeds_that_disagree_widen_the_interval_and_the_p_value():
    """The same gain on average, of every seed or of one: 20 of 100 tasks in each, against 60 in one of three."""
    none = [[0.0] * 100] * 3
    alike = [
        [1.0] * 20 + [0.0] * 80,
        [0.0] * 20 + [1.0] * 20 + [0.0] * 60,
        [0.0] * 40 + [1.0] * 20 + [0.0] * 40,
    ]
    apart = [[1.0] * 60 + [0.0] * 40, [0.0] * 100, [0.0] * 100]

    steady, shaky = crossed_comparison(alike, none), crossed_comparison(apart, none)

    assert steady.mean_difference == shaky.mean_difference == pytest.approx(0.2)
    assert steady.p_value < 0.001 < 0.3 < shaky.p_value
    assert shaky.p_value_of_tasks < 0.001
    assert shaky.low < 0 < steady.low


def test_seeds_that_agree_by_chance_are_no_surer_than_their_tasks():
    """Each of three seeds wins one task of 20: without spread between seeds, yet the flips of 3 tasks give 2/2^3."""
    a = [[float(task == seed) for task in range(20)] for seed in range(3)]

    found = crossed_comparison(a, [[0.0] * 20] * 3)

    assert found.p_value == 0.25
    assert found.low < 0 < found.high


@pytest.mark.parametrize("own", [0.0, 0.15])
@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_level_with_few_seeds(own, seeds):
    """Policies that are alike: p < 0.05 in at most 5 % of 300 studies, whose standard error is 1.3 %.

    The test over tasks alone finds one in a fifth and more of them where a policy has luck of its own under each seed.
    """
    generator = np.random.default_rng(seeds)

    found = [crossed_comparison(*simulated(generator, seeds, 60, own=own)) for _ in range(300)]

    assert np.mean([each.p_value < 0.05 for each in found]) <= 0.08
    assert np.mean([each.low > 0 or each.high < 0 for each in found]) <= 0.08
    if own:
        assert np.mean([each.p_value_of_tasks < 0.05 for each in found]) > 0.2


def test_a_gain_is_found():
    """A gain of some 10 points with five seeds of 140 games, each of its own luck: found in nearly all studies."""
    generator = np.random.default_rng(8)

    found = [crossed_comparison(*simulated(generator, 5, 140, own=0.05, gain=0.4)) for _ in range(40)]

    assert np.mean([each.p_value < 0.05 for each in found]) > 0.9


def test_coverage_of_success():
    """Success of 3 seeds around 0.5 whose chances have a spread of their own: 95 % nominal, 300 studies.

    The bootstrap draws 3 seeds from 3, and misses.
    """
    generator = np.random.default_rng(5)
    held, drawn = [], []
    for _ in range(300):
        chance = np.clip(0.5 + generator.normal(0, 0.15, (3, 1)) + generator.normal(0, 0.1, (1, 140)), 0, 1)
        table = (generator.random((3, 140)) < chance).astype(float).tolist()
        found = crossed_interval(table)
        low, high = crossed_bootstrap(table, draws=300)
        held.append(found.low <= 0.5 <= found.high)
        drawn.append(low <= 0.5 <= high)

    assert np.mean(held) >= 0.92
    assert np.mean(drawn) < 0.9


def test_the_bootstrap_draws_seeds_and_tasks():
    """Two seeds that solve all and none: a quarter of the draws has one of them alone. Of two tasks, the same."""
    assert crossed_bootstrap([[1.0] * 50, [0.0] * 50]) == pytest.approx((0.0, 1.0), abs=1e-12)
    assert crossed_bootstrap([[1.0, 0.0]] * 50) == pytest.approx((0.0, 1.0), abs=1e-12)


def test_the_bootstrap_of_one_seed_is_that_of_its_tasks():
    """40 of 100: scipy's percentile bootstrap has the same ends to a step or two of 1/100."""
    values = np.repeat([1.0, 0.0], [40, 60])
    expected = reference.bootstrap((values,), np.mean, method="percentile", rng=1).confidence_interval

    found = crossed_bootstrap([values.tolist()])

    assert found == pytest.approx(tuple(expected), abs=0.02)
    assert found == crossed_bootstrap([values.tolist()])


@given(tables)
def test_comparison_is_antisymmetric_and_within_bounds(both):
    a, b = both.tolist()

    forth, back = crossed_comparison(a, b), crossed_comparison(b, a)

    assert -1 <= forth.low <= forth.mean_difference <= forth.high <= 1
    assert forth.p_value == pytest.approx(back.p_value)
    assert (forth.mean_difference, forth.low, forth.high) == pytest.approx(
        (-back.mean_difference, -back.high, -back.low), abs=1e-12
    )


@given(tables)
def test_neither_the_order_of_seeds_nor_that_of_tasks_matters(both):
    turned = both[:, ::-1, ::-1]

    found, other = crossed_comparison(*both.tolist()), crossed_comparison(*turned.tolist())

    assert (found.low, found.high) == pytest.approx((other.low, other.high))
    assert found.p_value == pytest.approx(
        other.p_value, abs=0.02
    )  # random flips, where more than 16 tasks differ


@pytest.mark.parametrize(("seeds", "tasks"), [(1, 1), (3, 1), (1, 6), (3, 6)])
def test_equal_scores_leave_as_much_open_as_their_tasks(seeds, tasks):
    """No difference in T tasks: one may hide in 1 - 0.025^(1/T) of them, however many seeds say so."""
    same = [[1.0] * tasks] * seeds
    expected = mean_interval([1.0] * tasks)

    found, alone = crossed_comparison(same, same), crossed_interval(same)

    assert (found.mean_difference, found.p_value, found.spread.error) == (0.0, 1.0, 0.0)
    assert found.low == -found.high < 0
    assert (alone.low, alone.high) == (expected.low, expected.high)


def test_one_task_leaves_nearly_everything_open():
    found = crossed_comparison([[1.0], [0.0], [1.0]], [[0.0]] * 3)

    assert found.p_value == 1.0
    assert found.low < 0 < found.high


@pytest.mark.parametrize("table", [[], [[]], [[1.0], [1.0, 0.0]]])
def test_a_table_that_is_none_is_refused(table):
    with pytest.raises(ValueError, match="a row per seed"):
        crossed_spread(table)


def test_tables_of_several_shapes_are_refused():
    with pytest.raises(ValueError, match="tables of one shape"):
        crossed_comparison([[1.0, 0.0]], [[1.0], [0.0]])


def test_the_bootstrap_draws_its_resampling_once(monkeypatch):
    """Tables of one size share the counts, which nothing may change. The result equals the result of fresh draws."""
    made, fresh = [], np.random.default_rng
    monkeypatch.setattr(np.random, "default_rng", lambda seed: made.append(seed) or fresh(seed))
    table = fresh(0).integers(0, 2, (3, 7)).astype(float)

    found = [crossed_bootstrap(each, draws=40, seed=987) for each in (table.tolist(), (1 - table).tolist())]

    generator = fresh(987)
    rows, columns = (generator.multinomial(n, np.full(n, 1 / n), size=40) for n in (3, 7))
    means = ((rows.astype(float) @ table) * columns).sum(1) / 21
    assert found[0] == tuple(np.quantile(means, [0.5 - 0.95 / 2, 0.5 + 0.95 / 2]))
    assert made == [987]
