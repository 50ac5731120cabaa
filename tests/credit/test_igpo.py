"""IGPO: gains of the gold answer's likelihood, by hand; what they sum to; where they are not known or not given."""

from math import log, nan

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from perturn.credit import CREDITS
from perturn.credit.answer_gains import information_gains
from perturn.types import Status

QUICK = settings(derandomize=True)
IGPO = CREDITS["igpo"]
ANSWER = [[log(0.2), log(0.5), log(0.9)], [log(0.2), log(0.1), log(0.1)]]


@pytest.fixture
def pair(episode):
    """Two episodes of two turns, won and lost, whose likelihoods are ANSWER."""
    return [episode([None] * 2, [0.0, 1.0]), episode([None] * 2, [0.0, 0.0], sample=1)]


def assert_weights(found, expected):
    """2e-5 covers the 1e-6 that is added to a deviation."""
    for one, other in zip(found, expected, strict=True):
        assert_close(one, torch.tensor(other, dtype=torch.float64), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"normalize": "mean"}, [[0.7, 0.7], [-0.7, -0.3]]),
        ({"normalize": "mean", "gamma": 0.5}, [[0.35, 0.7], [-0.55, -0.3]]),
        ({}, [[1.627467, 1.627467], [-1.627467, -0.697486]]),
        ({"std": "sample"}, [[1.409428, 1.409428], [-1.409428, -0.604040]]),
        ({"normalize": "mean", "pools": "separate"}, [[0.7, 0.5], [-0.7, -0.5]]),
        ({"normalize": "mean", "last_gain": True}, [[0.9, 1.0], [-0.9, -0.4]]),
        ({"normalize": "mean", "gain": "logprob"}, [[1.304718, 0.694214], [-1.304718, -0.305786]]),
    ],
    ids=str,
)
def test_hand_worked(pair, choice, expected):
    """Rewards .3 1 and -.1 0: mean .3, squares .49 .16 .09, deviation sqrt(.74 / 4) = .430116, of a sample .496655.

    Separately the means are .1 and .5. With the last gains, .4 and 0, rewards are .3 1.4 and -.1 0, mean .4. Logarithms
    gain log 2.5 = .916291 and log 1/2 = -.693147; mean of all four .305786.
    """
    assert_weights(IGPO(**choice)(pair, answer=ANSWER), expected)


def test_the_answer_after_the_last_turn_counts_where_so_asked_alone(pair):
    """Another likelihood there moves nothing but with `last_gain`."""
    other = [[*ANSWER[0][:2], log(0.1)], ANSWER[1]]

    assert_weights(IGPO()(pair, answer=other), [one.tolist() for one in IGPO()(pair, answer=ANSWER)])
    found = IGPO(last_gain=True)(pair, answer=other)
    assert not torch.allclose(found[0], IGPO(last_gain=True)(pair, answer=ANSWER)[0])


@QUICK
@given(logprobs=st.lists(st.floats(-9, 0) | st.just(nan), min_size=1, max_size=9))
def test_gains_sum_to_the_last_known_likelihood_less_the_first(logprobs):
    """With none or one known they are 0."""
    known = [each for each in logprobs if each == each]
    whole = 0.0 if not known else known[-1] - known[0]

    found = information_gains(logprobs, "logprob")

    assert len(found) == len(logprobs) - 1
    assert sum(found) == pytest.approx(whole, abs=1e-9)


def test_hand_worked_gains():
    """0.2, not known, 0.5: nothing, then all of it. What is not known at first gains nothing when it is."""
    assert information_gains([log(0.2), nan, log(0.5)]) == pytest.approx([0.0, 0.3])
    assert information_gains([nan, log(0.5), log(0.25)]) == pytest.approx([0.0, -0.25])
    assert information_gains([log(0.5), -torch.inf]) == [-0.5]
    with pytest.raises(ValueError, match="answer must be finite where gains are of log-probabilities"):
        information_gains([-torch.inf, log(0.5)], "logprob")


@QUICK
@given(scores=st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=1, max_size=5), start=st.floats(-9, 0))
def test_one_turn_is_the_answer_and_leaves_grpo(scored, scores, start):
    """There is nothing to gain before it, and the outcome is all there is."""
    group = scored(*scores)
    answer = [[start, -1.0 - i] for i in range(len(scores))]

    found = IGPO()(group, answer=answer)

    for one, other in zip(found, CREDITS["grpo"](std="population")(group), strict=True):
        assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_likelihoods_of_a_failed_episode_count_for_nothing(episode, pair):
    """As if none of its turns had gained: its numbers may be anything, or unknown."""
    failed = episode([None] * 2, [0.0, 5.0], sample=1, status=Status.FAILED)
    flat = [ANSWER[0], [-1.0] * 3]

    found = IGPO(last_gain=True)([pair[0], failed], answer=ANSWER)
    unknown = IGPO(last_gain=True)([pair[0], failed], answer=[ANSWER[0], [nan] * 3])

    assert_weights(found, [one.tolist() for one in IGPO(last_gain=True)([pair[0], pair[1]], answer=flat)])
    assert_weights(unknown, [one.tolist() for one in found])


def test_a_likelihood_that_is_not_read_may_be_0(pair):
    """After a lost episode nobody that is sure would give the answer, which the last turn's gain alone reads."""
    never = [ANSWER[0], [*ANSWER[1][:2], -torch.inf]]
    logarithms = IGPO(gain="logprob")

    for one, other in zip(logarithms(pair, answer=never), logarithms(pair, answer=ANSWER), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(ValueError, match="answer must be finite"):
        IGPO(gain="logprob", last_gain=True)(pair, answer=never)


def test_an_episode_without_turns_has_no_weight(episode, pair):
    """And changes none of the others'."""
    empty = episode([], [], sample=2)

    found = IGPO()([*pair, empty], answer=[*ANSWER, [-1.0]])

    assert found[2].tolist() == []
    assert_weights(found[:2], [one.tolist() for one in IGPO()(pair, answer=ANSWER)])


def test_tensors_and_lists_are_alike(pair):
    tensors = [torch.tensor(each, dtype=torch.float64) for each in ANSWER]

    for one, other in zip(IGPO()(pair, answer=tensors), IGPO()(pair, answer=ANSWER), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "needs answer=, the log-probability of the gold answer"),
        ([[0.0] * 2] * 2, "one entry before each turn and one after the last"),
        ([[0.0] * 3], "one entry before each turn and one after the last"),
    ],
)
def test_missing_or_short_likelihoods_are_refused(pair, answer, message):
    with pytest.raises(ValueError, match=message):
        IGPO()(pair, answer=answer)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"gain": "odds"}, "gain must be one of probability, logprob"),
        ({"pools": "three"}, "pools must be one of joint, separate"),
        ({"normalize": "none"}, "normalize must be one of mean, std"),
        ({"gamma": 1.1}, "gamma must be <= 1, got 1.1"),
    ],
)
def test_settings_outside_their_range_are_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        IGPO(**setting)
