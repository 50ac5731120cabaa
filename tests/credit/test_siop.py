"""SIOP: gains of the own answer's likelihood by hand, shares of clusters, and the gold answer as the only one."""

from dataclasses import replace
from math import log, nan

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from perturn.credit import CREDITS
from perturn.methods.siop.siop_credit import OwnAnswer, cluster_shares, potentials
from perturn.types import Status, Task


def own(clusters, answers):
    """What SIOP is given: the cluster of each trajectory, and the log-probabilities of its answers."""
    return [OwnAnswer(*both) for both in zip(clusters, answers, strict=True)]


QUICK = settings(derandomize=True)
SIOP = CREDITS["siop"]
CLUSTERS = [0, 0, 1]
ANSWERS = [
    [[log(0.2), log(0.4)], [log(0.5), log(0.7)], [log(0.9), log(0.9)]],
    [[log(0.1)], [log(0.2)], [log(0.4)]],
    [[log(0.5)], [log(0.25)], [log(0.5)]],
]


@pytest.fixture
def three(episode):
    """Three episodes of two turns, of which the first two end with one answer."""
    return [episode([None] * 2, [0.0, 0.0], sample=i) for i in range(3)]


def assert_weights(found, expected):
    """2e-6 covers the 1e-8 that is added to a likelihood, and the 1e-6 that is added to a deviation."""
    for one, other in zip(found, expected, strict=True):
        assert_close(one, torch.tensor(other, dtype=torch.float64), rtol=0, atol=2e-6)


def test_hand_worked_rewards(three):
    """Shares 2/3 2/3 1/3. Likelihoods .3 .6 .9, .1 .2 .4 and .5 .25 .5: logarithms of 2, 3/2, 2, 2, 1/2 and 2.

    At the last turn also half of the share.
    """
    expected = [
        [0.462098, 0.270310 + 1 / 3],
        [0.462098, 0.462098 + 1 / 3],
        [-0.231049, 0.231049 + 1 / 6],
    ]

    found = SIOP().turn_rewards(three, own(CLUSTERS, ANSWERS))

    assert_weights([torch.tensor(one, dtype=torch.float64) for one in found], expected)
    found = SIOP(lam=1.0, last_gain=False).turn_rewards(three, own(CLUSTERS, ANSWERS))
    assert [one[1] for one in found] == [0.0] * 3


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"normalize": "mean"}, [[0.235762, 0.188654], [0.427550, 0.380442], [-0.663312, -0.017274]]),
        (
            {"normalize": "mean", "gamma": 0.5},
            [[0.141435, 0.188654], [0.237329, 0.380442], [-0.654675, -0.017274]],
        ),
    ],
    ids=str,
)
def test_hand_worked(three, choice, expected):
    """Rewards .462098 .603643, .462098 .795431 and -.231049 .397716, mean .414990.

    Centred: .047108 .188653, .047108 .380441 and -.646039 -.017274; summed from the end.
    """
    assert_weights(SIOP(**choice)(three, answer_clusters=own(CLUSTERS, ANSWERS)), expected)


def test_with_the_gold_answer_alone_it_is_igpo(three):
    """Gains of log-probabilities, one cluster of share 1, and a bonus that is everybody's outcome in IGPO."""
    gold = [[each[0] for each in of_one] for of_one in ANSWERS]
    paid = [replace(one, total_reward=0.5) for one in three]
    igpo = CREDITS["igpo"](gain="logprob", last_gain=True, std="sample")

    found = SIOP()(three, answer_clusters=own([0] * 3, [[[each] for each in of_one] for of_one in gold]))

    assert_weights(found, [one.tolist() for one in igpo(paid, answer=gold)])
    assert any(one.abs().max() > 0.5 for one in found)


@QUICK
@given(
    likelihoods=st.lists(st.floats(0.01, 1), min_size=3, max_size=7),
    share=st.sampled_from([1, 2, 4]),
    lam=st.floats(0, 1),
)
def test_rewards_sum_to_the_share_of_all_that_was_gained(episode, likelihoods, share, lam):
    """And of the bonus: the potential telescopes."""
    turns = len(likelihoods) - 1
    group = [episode([None] * turns, [0.0] * turns, sample=i) for i in range(share)]
    answers = [[[log(each)] for each in likelihoods]] * share

    (first, *_) = SIOP(lam=lam).turn_rewards(group, own(range(share), answers))

    gained = log(likelihoods[-1] + 1e-8) - log(likelihoods[0] + 1e-8)
    assert sum(first) == pytest.approx((gained + 1 - lam) / share, abs=1e-9)


def test_only_answers_are_counted(three):
    """No answer, a FAILED episode and another task take no share, and get none."""
    group = [*three, *(replace(three[0], sample=i) for i in (3, 4)), replace(three[0], task=Task("u"))]
    group[4] = replace(group[4], status=Status.FAILED)

    assert cluster_shares(group, own([0, 0, 1, -1, 1, 1], [[]] * 6)) == pytest.approx(
        [2 / 3, 2 / 3, 1 / 3, 0, 0, 1]
    )
    answers = [*ANSWERS, [[], [], []], ANSWERS[0], ANSWERS[0]]
    assert SIOP().turn_rewards(group, own([0, 0, 1, -1, 1, 1], answers))[3:5] == [[0.0, 0.0]] * 2


def test_rewards_of_the_environment_are_not_read(three):
    other = [replace(one, total_reward=float(i), success=True) for i, one in enumerate(three)]

    for one, same in zip(
        SIOP()(three, answer_clusters=own(CLUSTERS, ANSWERS)),
        SIOP()(other, answer_clusters=own(CLUSTERS, ANSWERS)),
        strict=True,
    ):
        assert torch.equal(one, same)


def test_an_episode_of_one_turn_has_its_share_alone(episode):
    """Its answer was its only turn, and nothing led there."""
    group = [episode([None], [0.0], sample=i) for i in range(3)]
    answers = [[[-3.0], [-0.1]]] * 3

    assert SIOP().turn_rewards(group, own([0, 0, 1], answers)) == [[pytest.approx(1 / 3)]] * 2 + [
        [pytest.approx(1 / 6)]
    ]


def test_where_a_likelihood_is_not_known_the_last_one_stands(three):
    """Of all answers of the cluster together; of none it is never known. One of 0 is not infinitely unlikely."""
    unknown = [[[-1.0, -1.0], [-0.5, nan], [-0.25, -0.25]], [[], [], []], [[-torch.inf], [0.0], [0.0]]]
    found = potentials(three, own([0, 0, 1], unknown))

    assert found[0] == pytest.approx([-1.0, nan, -0.25], abs=1e-6, nan_ok=True)
    assert all(each != each for each in found[1])
    assert found[2] == pytest.approx([log(1e-8), 0.0, 0.0], abs=1e-6)
    rewards = SIOP(lam=1.0).turn_rewards(three, own([0, 0, 1], unknown))
    assert rewards[0] == pytest.approx([0.0, 2 / 3 * 0.75], abs=1e-6)
    assert rewards[1] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "needs answer_clusters=, the cluster of each trajectory's final answer"),
        (own([0, 1], ANSWERS[:2]), "one entry before each turn and one after the last"),
        (own([0, 1, "a"], ANSWERS), "clusters must be integers"),
        (own(CLUSTERS, [*ANSWERS[:2], [[0.0], [0.0], []]]), "as many log-probabilities at each entry"),
    ],
)
def test_what_is_missing_or_short_is_refused(three, given, message):
    with pytest.raises(ValueError, match=message):
        SIOP()(three, answer_clusters=given)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"reference": "silver"}, "reference must be one of own, gold"),
        ({"same": "nearly"}, "same must be exact or MODULE:FUNCTION, got 'nearly'"),
        ({"members": 0}, "members must be >= 1, got 0"),
        ({"lam": 1.1}, "lam must be <= 1, got 1.1"),
        ({"normalize": "none"}, "normalize must be one of mean, std"),
        ({"std": "other"}, "std must be one of sample, population"),
    ],
)
def test_settings_outside_their_range_are_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        SIOP(**setting)
