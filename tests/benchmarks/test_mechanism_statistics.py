"""The statistics of benchmarks/mechanism.py, worked by hand, and how often their intervals hold."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "mechanism_statistics.py"
spec = importlib.util.spec_from_file_location("mechanism_statistics", FILE)
sys.modules["mechanism_statistics"] = found = importlib.util.module_from_spec(spec)
spec.loader.exec_module(found)
Turns = found.Turns
auc = found.auc
confidence_weights = found.confidence_weights
difference = found.difference
interval = found.interval
matched_difference = found.matched_difference
mean_of = found.mean_of
share_on_wrong = found.share_on_wrong
shuffled_shares = found.shuffled_shares
uniform_weights = found.uniform_weights


def turns(rows, base=0, task=0):
    """Episodes as lists of (confidence, whether it is wrong)."""
    flat = [(number, place, *turn) for number, row in enumerate(rows) for place, turn in enumerate(row)]
    episode, position, confidence, wrong = map(np.array, zip(*flat, strict=True))
    ones = np.ones(len(episode), dtype=bool)
    return Turns(
        base=np.broadcast_to(base, len(episode)),
        task=np.broadcast_to(task, len(episode)),
        episode=episode,
        position=position,
        rejected=ones,
        valid=ones,
        wrong=wrong.astype(bool),
        away=~ones,
        confidence=confidence.astype(float),
    )


TWO = turns([[(0.9, 0), (0.5, 1), (0.7, 0), (0.5, 1)], [(0.8, 0), (0.6, 0), (0.7, 1)]])
ONCE = np.ones(7)


def test_the_first_wrong_turn_and_those_before_it():
    assert TWO.first.tolist() == [False, True, False, False, False, False, True]
    assert TWO.before.tolist() == [True, False, False, False, True, True, False]
    assert turns([[(0.9, 0), (0.8, 0)]]).before.all()
    assert not turns([[(0.9, 0), (0.8, 0)]]).first.any()


def test_auc_by_hand():
    """Wrong 0.5, 0.5, 0.7 against right 0.9, 0.7, 0.8, 0.6: 4 + 4 + (2 + 1/2) of 12. Counting 0.7 twice: 13/16."""
    statistic = auc(lambda each: each.wrong, lambda each: ~each.wrong)

    assert statistic(TWO, ONCE) == pytest.approx(10.5 / 12)
    assert statistic(TWO, np.array([1, 1, 1, 1, 1, 1, 2.0])) == pytest.approx(13 / 16)
    assert np.isnan(statistic(TWO, ONCE * ~TWO.wrong))


def test_means_and_differences_by_hand():
    """Wrong: 1.7 / 3; right: 3.0 / 4."""
    wrong = mean_of(lambda each: each.wrong, lambda each: each.confidence)
    right = mean_of(lambda each: ~each.wrong, lambda each: each.confidence)

    assert wrong(TWO, ONCE) == pytest.approx(1.7 / 3)
    assert difference(wrong, right)(TWO, ONCE) == pytest.approx(1.7 / 3 - 0.75)


def test_confidence_at_first_wrong_turns_is_compared_at_their_position():
    """Position 1: 0.5 against 0.6; position 2: 0.7 against 0.7. The mean gap is -0.05; with the first twice -0.2/3."""
    assert matched_difference(TWO, ONCE) == pytest.approx(-0.05)
    assert matched_difference(TWO, np.array([1, 2, 1, 1, 1, 1, 1.0])) == pytest.approx(-0.2 / 3)


def test_share_of_the_weight_by_hand():
    """With pivot 0.65: 0.2 1 0.2 1 and 0.2 1 0.2. Wrong turns have 2 of 2.4 and 0.2 of 1.4; uniform 2/4 and 1/3."""
    weigh = share_on_wrong(lambda confidence: confidence_weights(confidence, pivot=0.65))

    assert weigh(TWO, ONCE) == pytest.approx((2 / 2.4 + 0.2 / 1.4) / 2)
    assert share_on_wrong(uniform_weights)(TWO, ONCE) == pytest.approx((1 / 2 + 1 / 3) / 2)
    assert confidence_weights(np.array([0.9, 0.91])).tolist() == [1.0, 0.2]


def test_an_episode_without_a_wrong_turn_has_no_share():
    more = turns([[(0.9, 0), (0.5, 1)], [(0.8, 0)]])

    assert share_on_wrong(uniform_weights)(more, np.ones(3)) == pytest.approx(0.5)


def test_weights_dealt_at_random_have_the_share_of_the_uniform_weight():
    """On average over deals; and no weight leaves its episode."""
    random = np.random.default_rng(3)
    many = turns([[(random.random(), random.random() < 0.4) for _ in range(9)] for _ in range(60)])

    found = shuffled_shares(many, 400)
    assert found.mean() == pytest.approx(share_on_wrong(uniform_weights)(many, np.ones(540)), abs=0.003)
    assert found.std() > 0.001
    alone = turns([[(0.1, 1), (0.95, 0)], [(0.1, 0)]])
    assert set(np.round(shuffled_shares(alone, 50), 6)) == {round(1 / 1.2, 6), round(0.2 / 1.2, 6)}


def study(random, bases, tasks, spread):
    """Confidences whose mean differs by base and by task; the true mean is 0.5."""
    rows = []
    for base in range(bases):
        luck = random.normal(0, spread)
        for task in range(tasks):
            own = 0.5 + luck + random.normal(0, 0.1)
            rows += [(base, task, own + random.normal(0, 0.05)) for _ in range(4)]
    base, task, confidence = map(np.array, zip(*rows, strict=True))
    flat = turns([[(each, 0)] for each in confidence])
    return Turns(**(vars(flat) | {"base": base, "task": task}))


@pytest.mark.parametrize(("bases", "spread", "least"), [(1, 0.0, 0.85), (8, 0.1, 0.78)])
def test_intervals_hold_the_truth_about_as_often_as_they_say(bases, spread, least):
    """Of 60 studies 95 % would; few bases make percentile intervals narrow. As if turns were free, fewer hold."""
    random = np.random.default_rng(5)
    mean = mean_of(lambda each: each.rejected, lambda each: each.confidence)
    held = naive = 0
    for _ in range(60):
        drawn = study(random, bases, 20, spread)
        _, low, high = interval(mean, drawn, draws=200)
        held += low <= 0.5 <= high
        error = 1.96 * drawn.confidence.std() / np.sqrt(len(drawn.confidence))
        naive += abs(drawn.confidence.mean() - 0.5) <= error

    assert held / 60 >= least
    assert naive < held


def test_a_statistic_of_nothing_has_no_interval():
    value, low, high = interval(auc(lambda each: each.away, lambda each: ~each.wrong), TWO, draws=20)

    assert np.isnan([value, low, high]).all()
