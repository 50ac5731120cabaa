"""A2TGPO: gains against those at the same turn, by hand; sums of as many terms; the outcome beside them."""

from dataclasses import replace
from math import exp, log, nan, sqrt, tanh
from statistics import fmean, pstdev

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from perturn.credit import CREDITS
from perturn.types import Status, Task

QUICK = settings(derandomize=True)
A2TGPO = CREDITS["a2tgpo"]
ANSWER = [
    [log(0.2), log(0.5), log(0.9), log(0.1)],
    [log(0.2), log(0.1), log(0.3), log(0.1)],
    [log(0.2), log(0.4), log(0.1)],
]
"""Gains .3 .4, -.1 .2 and .2; the last turn's are not read."""


@pytest.fixture
def three(episode):
    """Two episodes of three turns, won and lost, and a lost one of two."""
    return [
        episode([None] * 3, [0.0, 0.0, 1.0]),
        episode([None] * 3, [0.0, 0.0, 0.0], sample=1),
        episode([None] * 2, [0.0, 0.0], sample=2),
    ]


def assert_weights(found, expected):
    """2e-5 covers the 1e-6 that is added to a deviation."""
    for one, other in zip(found, expected, strict=True):
        assert_close(one, torch.tensor(other, dtype=torch.float64), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (
            {"normalize": "mean", "alpha": 1.0},
            [[0.855229, 0.766667, 0.666667], [-0.569035, -0.433333, -0.333333], [-0.266667, -0.333333]],
        ),
        (
            {"normalize": "mean", "alpha": 1.0, "gamma": 0.5},
            [[0.819873, 0.766667, 0.666667], [-0.533680, -0.433333, -0.333333], [-0.266667, -0.333333]],
        ),
        (
            {"normalize": "mean"},
            [[0.723235, 0.696667, 0.666667], [-0.404044, -0.363333, -0.333333], [-0.313333, -0.333333]],
        ),
        (
            {},
            [[1.834359, 1.714214, 1.414214], [-1.210457, -1.007107, -0.707107], [-0.589437, -0.707107]],
        ),
        ({"alpha": 0.0}, [[1.414214] * 3, [-0.707107] * 3, [-0.707107] * 2]),
    ],
    ids=str,
)
def test_hand_worked(three, choice, expected):
    """Outcomes 1 0 0: mean 1/3, deviation sqrt(2)/3, so 1.414214 and -.707107. Turn 0 has gains .3 -.1 .2, mean 2/15.

    Turn 1 has .4 and .2, mean .3. Less the means the sums are .166667 + .1 and -.233333 - .1, over sqrt 2 .188562 and
    -.235702; .066667 stands alone. Deviation of turn 0 is .169967, of turn 1 .1: 0.980581, -1.372813, 0.392232; 1, -1.
    """
    assert_weights(A2TGPO(**choice)(three, answer=ANSWER), expected)


def test_hand_worked_clip_ranges(three):
    """Z 0.980581, -1.372813, 0.392232 at turn 0, 1 and -1 at turn 1; 2 sigmoid(z) - 1 is tanh(z / 2)."""
    expected = [
        [1 + 0.3 * tanh(z / 2) for z in own] for own in ([0.980581, 1, 0], [-1.372813, -1, 0], [0.392232, 0])
    ]

    found = A2TGPO().clips(three, answer=ANSWER)

    assert expected[0] == pytest.approx([1.136334, 1.138635, 1.0], abs=1e-6)
    assert_weights(found, expected)
    assert [one[-1].item() for one in found] == [1.0] * 3
    assert A2TGPO(clip_scale=0.0).clips(three, answer=ANSWER) is None
    for one, other in zip(
        A2TGPO(clip_scale=0.0)(three, answer=ANSWER), A2TGPO()(three, answer=ANSWER), strict=True
    ):
        assert torch.equal(one, other)


def test_a_turn_alone_and_other_tasks_leave_the_clip_range(three):
    """A turn that no other has keeps its range; the episodes of another task do not move it."""
    other = [replace(one, task=Task("other")) for one in three]
    shifted = [[value - 0.4 * t * i for t, value in enumerate(one)] for i, one in enumerate(ANSWER)]

    alone = A2TGPO().clips([three[0], three[2]], answer=[ANSWER[0], ANSWER[2]])
    both = A2TGPO().clips([*other, *three], answer=[*shifted, *ANSWER])

    assert alone[0][1:].tolist() == [1.0, 1.0]
    assert_weights(both[3:], [one.tolist() for one in A2TGPO().clips(three, answer=ANSWER)])
    assert not torch.allclose(both[0], both[3], atol=1e-2)


def by_definition(scores, gains, gamma):
    """The formula over plain lists: z by turn index, the sum of later ones over the root of their number."""

    def z(value, values):
        return (value - fmean(values)) / (pstdev(values) + 1e-6) if len(set(values)) > 1 else 0.0

    found = []
    for score, own in zip(scores, gains, strict=True):
        normal = [
            z(gain, [other[t] for other in gains if len(other) - 1 > t]) for t, gain in enumerate(own[:-1])
        ]
        later = [
            sum(gamma ** (k - t) * normal[k] for k in range(t, len(normal))) / sqrt(len(normal) - t)
            for t in range(len(normal))
        ]
        found.append([z(score, scores) + 0.3 * each for each in (*later, 0.0)])
    return found


@QUICK
@given(
    rows=st.lists(st.lists(st.floats(0.01, 1), min_size=2, max_size=6), min_size=2, max_size=5),
    gamma=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_it_is_the_definition(episode, rows, gamma):
    """Outcomes are drawn with the likelihoods; 1e-4 for spreads that the added 1e-6 is seen beside."""
    rows = [[round(each, 2) for each in row] for row in rows]
    group = [
        episode([None] * (len(row) - 1), [0.0] * (len(row) - 2) + [row[0]], sample=i)
        for i, row in enumerate(rows)
    ]
    gains = [[b - a for a, b in zip(map(log, row), map(log, row[1:]), strict=False)] for row in rows]

    found = A2TGPO(gamma=gamma, gain="logprob")(group, answer=[list(map(log, row)) for row in rows])

    for one, other in zip(found, by_definition([row[0] for row in rows], gains, gamma), strict=True):
        assert one.tolist() == pytest.approx(other, abs=1e-4)


def test_the_same_gain_for_everybody_at_a_turn_changes_nothing(three):
    """Only a comparison at the turn index does not see it; IGPO's does."""
    shifted = [
        [log(exp(value) + 0.05 * (t > 0)) for t, value in enumerate(one)] for one in ANSWER
    ]  # the gain of turn 0

    assert_weights(A2TGPO()(three, answer=shifted), [one.tolist() for one in A2TGPO()(three, answer=ANSWER)])
    igpo = CREDITS["igpo"]()
    assert not torch.allclose(igpo(three, answer=shifted)[0], igpo(three, answer=ANSWER)[0], atol=1e-2)


def test_a_turn_that_no_other_has_gains_nothing(three):
    """Whatever it gained; the terms are as many as before."""
    alone = [three[0], three[2]]
    other = [[*ANSWER[0][:2], log(0.01), log(0.9)], ANSWER[2]]

    found = A2TGPO()(alone, answer=[ANSWER[0], ANSWER[2]])

    assert found[0][1] == found[0][2]
    assert_weights(A2TGPO()(alone, answer=other), [one.tolist() for one in found])


def test_the_last_likelihood_is_not_read(three):
    """Nor any other of an episode of one turn, which leaves GRPO."""
    unknown = [[*one[:-1], nan] for one in ANSWER]
    short = [replace(one, turns=one.turns[-1:]) for one in three]

    for one, other in zip(A2TGPO()(three, answer=unknown), A2TGPO()(three, answer=ANSWER), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(
        A2TGPO()(short, answer=[[-1.0, nan]] * 3), CREDITS["grpo"](std="population")(short), strict=True
    ):
        assert torch.equal(one, other)


def test_a_failed_episode_counts_as_lost_and_without_gains(three):
    """Whatever was computed of it."""
    failed = [three[0], replace(three[1], status=Status.FAILED), three[2]]
    flat = [ANSWER[0], [-1.0] * 4, ANSWER[2]]

    found = A2TGPO()(failed, answer=ANSWER)

    assert_weights(found, [one.tolist() for one in A2TGPO()(three, answer=flat)])


def test_tasks_are_apart(three):
    """In one call, and whatever their order."""
    other = [replace(one, task=Task("other")) for one in three]
    mixed = [each for both in zip(three, other, strict=True) for each in both]

    answers = [[[value - 0.3 * t * i for t, value in enumerate(one)] for i, one in enumerate(ANSWER)], ANSWER]

    found = A2TGPO()(mixed, answer=[each for both in zip(*answers, strict=True) for each in both])

    for first, answer in enumerate(answers):
        for one, expected in zip(found[first::2], A2TGPO()(three, answer=answer), strict=True):
            assert torch.equal(one, expected)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "needs answer=, the log-probability of the gold answer"),
        ([[0.0] * 2] * 3, "one entry before each turn and one after the last"),
    ],
)
def test_missing_or_short_likelihoods_are_refused(three, answer, message):
    with pytest.raises(ValueError, match=message):
        A2TGPO()(three, answer=answer)
    with pytest.raises(ValueError, match=message):
        A2TGPO().clips(three, answer=answer)
    with pytest.raises(ValueError, match="answer must be finite where gains are of log-probabilities"):
        A2TGPO(gain="logprob")(three, answer=[[-torch.inf, *each[1:]] for each in ANSWER])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"gain": "odds"}, "gain must be one of probability, logprob"),
        ({"normalize": "none"}, "normalize must be one of mean, std"),
        ({"alpha": -0.1}, "alpha must be >= 0, got -0.1"),
        ({"gamma": 1.1}, "gamma must be <= 1, got 1.1"),
        ({"clip_scale": 1.0}, "clip_scale must be < 1, got 1.0"),
        ({"clip_scale": -0.1}, "clip_scale must be >= 0, got -0.1"),
    ],
)
def test_settings_outside_their_range_are_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        A2TGPO(**setting)
