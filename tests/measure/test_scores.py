"""Scores of a credit: what they are for the true advantage, for chance and for its opposite, whatever the noise."""

import numpy as np
import pytest

from perturn.measure.advantages import SPLITS, Measured, typical_variance, value_interval
from perturn.measure.conclusions import sentences, unscored
from perturn.measure.credit_scores import (
    BOUNDS,
    SCORES,
    by_third,
    clusters_of,
    estimate,
    scores_of,
    within_bounds,
)
from perturn.stats import Estimate, mean_interval
from support.benchmarks import benchmark

TASKS, EPISODES, TURNS = 40, 2, 9


def made(noise=0.2, zeros=0.6, seed=0):
    """Turns of which most change nothing, as they are measured with noise, and the true advantages."""
    random = np.random.default_rng(seed)
    count = TASKS * EPISODES * TURNS
    episode = np.repeat(np.arange(TASKS * EPISODES), TURNS)
    true = random.normal(0, 0.3, count) * (random.random(count) > zeros)
    halves = true + random.normal(0, noise * np.sqrt(2), (2, SPLITS, count))
    whole = halves[:, 0].mean(0)
    halves = np.repeat(halves[:, :1], SPLITS, axis=1)
    solved = np.repeat(random.random(TASKS * EPISODES) > 0.6, TURNS)
    place = np.tile(np.arange(TURNS), TASKS * EPISODES)
    turns = Measured(
        episode // EPISODES,
        episode,
        place,
        np.full(count, TURNS),
        solved,
        whole,
        whole - 1,
        whole + 1,
        halves,
        np.zeros(count),
    )
    return turns, true


def holds(found, value):
    return found.low <= value <= found.high


def test_the_true_advantage_scores_fully_once_noise_is_corrected():
    """Uncorrected, the correlation is far below 1."""
    turns, true = made()

    found = scores_of(turns, true)
    assert np.corrcoef(true, turns.advantage)[0, 1] < 0.7
    assert found["correlation"].mean == pytest.approx(1, abs=0.15)
    assert holds(found["correlation"], 1)
    assert found["auc"].mean > 0.97
    assert found["lost_auc"].mean > 0.9
    assert found["sign_errors"].mean < 0.02
    assert abs(found["error_after_scaling"].mean) < 0.3
    assert holds(found["error_after_scaling"], 0)
    assert found["loss_found"].mean > 0.9
    assert {each.n for each in found.values()} == {TASKS}


def test_a_random_credit_is_at_chance():
    random = np.random.default_rng(3)
    hits = {"auc": 0, "lost_auc": 0, "sign_errors": 0}
    for seed in range(5):
        turns, true = made(noise=0.1, seed=seed)
        found = {name: estimate(name, turns, random.normal(size=len(true))) for name in hits}
        for name, each in found.items():
            hits[name] += holds(each, 0.5)

    assert min(hits.values()) >= 3


def test_the_opposite_of_the_advantage_scores_the_opposite():
    turns, true = made(noise=0.05)

    found = scores_of(turns, -true)
    assert found["correlation"].mean == pytest.approx(-1, abs=0.05)
    assert found["auc"].mean < 0.02
    assert found["sign_errors"].mean > 0.95


def test_scores_do_not_depend_on_the_scale_of_a_credit():
    turns, true = made()
    credit = true + 0.1

    one, other = scores_of(turns, credit), scores_of(turns, 100 * credit)
    assert {name: each.mean for name, each in one.items()} == pytest.approx(
        {name: each.mean for name, each in other.items()}
    )


def test_a_credit_of_equal_numbers_has_no_correlation_and_is_at_chance():
    """It cannot find a turn in an episode: this chance is exact, and needs no interval."""
    turns, true = made()

    found = scores_of(turns, np.ones_like(true))
    assert found["correlation"] is None
    assert found["auc"].mean == pytest.approx(0.5)
    lost = found["lost_auc"]
    assert (lost.mean, lost.low, lost.high) == pytest.approx((0.5, 0.5, 0.5))


def test_a_measurement_without_signal_scores_nothing():
    """The product of halves is below 0 about as often as above, and then no score is defined."""
    turns, _ = made(zeros=1.0, seed=1)
    turns.halves[1] = -turns.halves[0]

    found = scores_of(turns, np.arange(len(turns.task)) * 1.0)
    assert set(found.values()) == {None}


@pytest.mark.parametrize("noise", [0.1, 0.2])
def test_the_interval_of_a_score_lies_within_its_bounds(noise):
    """Few tasks and a noisy measurement: the interval of Student's t leaves the bounds here."""
    turns, true = made(noise=noise, seed=2)
    few = turns.task < 12

    found = scores_of(turns.where(few), true[few])
    for name, (lowest, highest) in BOUNDS.items():
        each = found[name]
        assert lowest <= each.low <= each.mean <= each.high <= highest
        assert each.low < each.high


@pytest.mark.parametrize(
    ("found", "within"),
    [
        ((0.8, 0.5, 1.1), (0.8, 0.5, 1)),
        ((1.1, 1.05, 1.15), (1, 0.95, 1)),
        ((-0.2, -0.6, 0.2), (0, 0, 0.4)),
        ((0.5, -np.inf, np.inf), (0.5, -np.inf, np.inf)),
    ],
)
def test_an_estimate_outside_moves_to_the_bound_with_its_interval(found, within):
    cut = within_bounds(Estimate(*found, 9), (0, 1))

    assert (cut.mean, cut.low, cut.high, cut.n) == pytest.approx((*within, 9))


def test_thirds_hold_their_own_turns():
    turns, true = made(noise=0.05)
    credit = np.where(turns.third == 0, true, -true)

    found = by_third(turns, credit)
    assert found["early"]["correlation"].mean > 0.9 > -0.9 > found["late"]["correlation"].mean


def test_episodes_of_two_turns_have_no_thirds():
    turns, true = made()
    short = turns.where(turns.position < 2)
    short.length[:] = 2

    found = by_third(short, true[turns.position < 2])
    assert {score for scores in found.values() for score in scores.values()} == {None}


@pytest.mark.parametrize("name", SCORES)
def test_a_score_without_some_tasks_is_that_of_the_others_alone(name):
    """Terms that are computed once are summed over the kept episodes."""
    turns, true = made(noise=0.1)
    credit, keep = np.round(true, 1), turns.task % 3 > 0
    of = SCORES[name]

    alone = of(turns.where(keep), credit[keep])(np.ones(int(keep.sum()), dtype=bool))
    assert of(turns, credit)(keep) == pytest.approx(alone, abs=1e-12)


def test_few_tasks_make_episodes_the_clusters():
    turns, _ = made()

    assert len(set(clusters_of(turns))) == TASKS
    assert set(clusters_of(turns.where(turns.task < 3))) == set(range(3 * EPISODES))


@pytest.mark.parametrize(
    ("auc", "correlation", "said"),
    [
        ([0.7, 0.6, 0.8], None, "better than chance"),
        ([0.3, 0.2, 0.4], None, "worse than chance"),
        ([0.5, 0.47, 0.53], [0.02, -0.04, 0.08], "no better than chance"),
        ([0.5, 0.47, 0.53], [0.1, 0.02, 0.18], None),
        ([0.5, 0.47, 0.53], None, None),
        ([0.5, 0.5, 0.5], None, None),
        ([0.52, 0.3, 0.7], [0.0, -0.01, 0.01], None),
        ([0.52, None, None], None, None),
        (None, None, None),
    ],
)
def test_a_sentence_needs_an_interval(auc, correlation, said):
    """Noise pulls an AUC to 0.5, so that it alone does not show that a credit is as good as chance."""
    found = sentences("gigpo", {"lost_auc": auc, "auc": None, "correlation": correlation}, "alfworld")
    found = [each for each in found if "turn that lost" in each]

    assert [f"turn that lost an episode {said}" in each for each in found] == ([True] if said else [])


def test_a_correlation_of_either_sign_is_told():
    found = [sentences("c", {"correlation": each}, "e") for each in ([0.6, 0.4, 0.8], [-0.6, -0.8, -0.4])]

    assert [one.partition("episode ")[2] for (one,) in found] == [
        "like their advantage (correlation 0.60 [0.40, 0.80]).",
        "against their advantage (correlation -0.60 [-0.80, -0.40]).",
    ]
    assert sentences("c", {"correlation": [0.1, -0.1, 0.3]}, "e") == []


@pytest.mark.parametrize("case", ["step penalties, success 0.1", "similar partial scores, one of ten high"])
def test_a_few_similar_returns_do_not_make_a_value_certain(case):
    """They may all lack the rare success: the score interval alone would contain the value in 57 % of samples."""
    of = benchmark("value_intervals").coverage

    assert 0.55 < of(case, 8, None)[0] < 0.6
    assert all(of(case, n, typical)[0] > 0.95 for n in (4, 8, 12) for typical in (0.05, 0.2))


def test_a_value_is_exactly_known_by_no_sample():
    """The interval grows with the typical spread, and the spread of the sample is never reduced."""
    one, other = (value_interval((0.5, 0.5, 0.5, 0.51), (0.0, 1.0), typical) for typical in (0.1, 0.2))
    varied = (0.1, 0.9, 0.4, 0.6)

    assert 0.2 < one.high - one.low < other.high - other.low
    assert value_interval((0.5,) * 8, (0.0, 1.0), 0.0) == mean_interval((0.5,) * 8)
    assert value_interval((0.5,) * 8, (0.0, 1.0), 0.1).low <= mean_interval((0.5,) * 8).low
    assert value_interval(varied, (0.0, 1.0), 0.01) == mean_interval(varied)
    assert value_interval((0.0, 1.0, 1.0, 1.0), (0.0, 1.0), 9.0) == mean_interval((0.0, 1.0, 1.0, 1.0))
    assert typical_variance([np.array([0.0, 1.0]), np.zeros(3), np.array([0.2])]) == 0.5


@pytest.mark.parametrize(
    ("auc", "said"),
    [
        (None, "differ no more than their noise"),
        ([0.8, None, None], "No score has an interval"),
        ([0.5, 0.5, 0.5], "No score has an interval"),
        ([0.6, 0.5, 0.7], ""),
    ],
)
def test_a_measurement_without_scores_says_why(auc, said):
    """The table would be empty."""
    found = unscored([{"auc": None, "cost": 1.0}, {"auc": auc, "cost": 1.0}], ("correlation", "auc"))

    assert said in found
    assert bool(found) == bool(said)
