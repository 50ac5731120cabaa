"""Implicit rewards: progress advantage beside the outcome, and OPRL's step rewards."""

from dataclasses import replace
from math import inf, nan, sqrt

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from perturn.credit import CREDITS
from perturn.credit.implicit_rewards import normalized_progress, turn_log_ratios
from perturn.needs import Progress
from perturn.types import Status

PROGRESS, OPRL = CREDITS["progress-advantage"], CREDITS["oprl"]
REFERENCE = [[[-1.0, -2.0], [-1.0]], [[-3.0]]]
TRAINED = [[[-0.5, -1.5], [-2.0]], [[-3.0]]]
"""u = 1, -1 and 0; its mean is 0 and its sample deviation 1."""


def pair(episode, *scores):
    """Two trajectories, of two turns and of one."""
    return [episode([None] * 2, [0.0, scores[0]]), episode([None], [scores[1]], sample=1)]


def test_hand_worked_log_ratios(episode):
    """(-0.5 + 1) + (-1.5 + 2) = 1, -2 + 1 = -1 and 0; the mean of the first is 1/2. Nothing of a FAILED trajectory."""
    group = pair(episode, 1.0, 0.0)

    assert turn_log_ratios(group, TRAINED, REFERENCE) == [[1.0, -1.0], [0.0]]
    assert turn_log_ratios(group, TRAINED, REFERENCE, "mean") == [[0.5, -1.0], [0.0]]
    group[1] = replace(group[1], status=Status.FAILED)
    assert str(turn_log_ratios(group, TRAINED, REFERENCE)) == "[[1.0, -1.0], [nan]]"


def test_hand_worked_progress_advantage(episode):
    """RLOO is 1 and -1; z is u over 1 + 1e-6, and alpha 0.25."""
    first, other = PROGRESS(alpha=0.25)(pair(episode, 1.0, 0.0), progress=TRAINED, reference=REFERENCE)

    assert first.tolist() == pytest.approx([1.25, 0.75], abs=1e-6)
    assert other.tolist() == [-1.0]


def test_progress_alone_scores_turns(episode):
    """In nats, less the mean of the group's turns, which is 0; the outcome is not read."""
    credit = PROGRESS(outcome=False, normalize="mean", alpha=1.0)

    found = credit(pair(episode, 1.0, 0.0), progress=TRAINED, reference=REFERENCE)

    assert [one.tolist() for one in found] == [[1.0, -1.0], [0.0]]


def test_hand_worked_oprl(episode):
    """GRPO is 1/2 over sqrt(1/2), and z is u; with later turns the first has 1 - 1."""
    group, grpo = pair(episode, 1.0, 0.0), sqrt(0.5)

    alone = OPRL()(group, progress=TRAINED, reference=REFERENCE)
    summed = OPRL(step_gamma=1.0, alpha=2.0)(group, progress=TRAINED, reference=REFERENCE)

    assert alone[0].tolist() == pytest.approx([grpo + 1, grpo - 1], abs=3e-6)
    assert alone[1].tolist() == pytest.approx([-grpo], abs=3e-6)
    assert summed[0].tolist() == pytest.approx([grpo, grpo - 2], abs=3e-6)


NUMBER = st.integers(-8, 0).map(lambda n: n / 4)
TURN = st.lists(st.tuples(NUMBER, NUMBER), min_size=1, max_size=3)
ROWS = st.lists(
    st.tuples(st.lists(TURN, min_size=1, max_size=4), st.sampled_from([0.0, 1.0])), min_size=2, max_size=4
)


def built(episode, rows):
    """A group, and the log-probabilities of its tokens under both policies."""
    group = [
        episode([None] * len(turns), [0.0] * (len(turns) - 1) + [score], sample=i)
        for i, (turns, score) in enumerate(rows)
    ]
    sides = ([[[pair[side] for pair in turn] for turn in turns] for turns, _ in rows] for side in (0, 1))
    return group, *sides


@given(rows=ROWS)
def test_a_policy_that_is_its_own_reference_leaves_the_outcome(episode, rows):
    """As before the first update, or where a reward model found no pair: to the bit."""
    group, ours, _ = built(episode, rows)
    given_ = {"progress": ours, "reference": ours}

    for credit, outcome in ((PROGRESS(alpha=3.0), "rloo"), (OPRL(step_gamma=0.5), "grpo")):
        for one, other in zip(credit(group, **given_), CREDITS[outcome]()(group), strict=True):
            assert_close(one, other, rtol=0, atol=1e-12)


@given(rows=ROWS)
def test_without_weight_nothing_of_the_policies_counts(episode, rows):
    """The rest is RLOO, or GRPO."""
    group, ours, theirs = built(episode, rows)

    for name, outcome in (("progress-advantage", "rloo"), ("oprl", "grpo")):
        found = CREDITS[name](alpha=0.0)(group, progress=ours, reference=theirs)
        for one, other in zip(found, CREDITS[outcome]()(group), strict=True):
            assert_close(one, other, rtol=0, atol=1e-12)


@given(rows=ROWS, shift=NUMBER)
def test_what_all_turns_have_gained_is_nothing(episode, rows, shift):
    """As many nats more a turn, by its first token, change no weight; 1e-9 is rounding over the least deviation."""
    group, ours, theirs = built(episode, rows)
    grown = [[[turn[0] + shift, *turn[1:]] for turn in of_one] for of_one in ours]

    for credit in (PROGRESS(), OPRL(), OPRL(normalize="mean", step_gamma=1.0)):
        before = credit(group, progress=ours, reference=theirs)
        after = credit(group, progress=grown, reference=theirs)
        assert_close(torch.cat(after), torch.cat(before), rtol=0, atol=1e-9)


def test_a_failed_trajectory_has_no_progress_and_counts_with_score_0(episode):
    """Its turn is no 0 among those that are compared: u is 1 and -1 then, and z 1/2 and -1/2 of 2 over sqrt(2)."""
    group = pair(episode, 1.0, 1.0)
    group[1] = replace(group[1], status=Status.FAILED)

    found = PROGRESS(alpha=1.0, normalize="mean")(group, progress=TRAINED, reference=REFERENCE)

    assert [one.tolist() for one in found] == [[2.0, 0.0], [-1.0]]
    assert normalized_progress([[1.0, nan], [-1.0]], "mean") == [[1.0, 0.0], [-1.0]]


@pytest.mark.parametrize("credit", [PROGRESS(), OPRL()])
@pytest.mark.parametrize(
    ("progress", "reference", "said"),
    [
        (None, REFERENCE, "needs progress= and reference="),
        (TRAINED, None, "needs progress= and reference="),
        (TRAINED[:1], REFERENCE, "one entry per turn, for each trajectory"),
        (TRAINED, [[[-1.0, -2.0]], [[-3.0]]], "one entry per turn, for each trajectory"),
        ([[[-0.5], [-2.0]], [[-3.0]]], REFERENCE, "the same tokens of each turn, at least one, got 1 and 2"),
        ([[[], [-2.0]], [[-3.0]]], [[[], [-1.0]], [[-3.0]]], "at least one, got 0 and 0"),
        ([[[-inf, 0.0], [-2.0]], [[-3.0]]], REFERENCE, "must be finite"),
    ],
)
def test_other_log_probabilities_are_refused(episode, credit, progress, reference, said):
    with pytest.raises(ValueError, match=said):
        credit(pair(episode, 1.0, 0.0), progress=progress, reference=reference)


@pytest.mark.parametrize("kind", [PROGRESS, OPRL])
@pytest.mark.parametrize(
    "settings", [{"alpha": -0.1}, {"normalize": "max"}, {"std": "both"}, {"reduction": "max"}]
)
def test_settings_outside_their_range_are_refused(kind, settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        kind(**settings)


def test_a_named_policy_takes_the_place_of_the_reward_model():
    """Then nothing is trained for it."""
    assert OPRL().needs == ("reference", Progress(reward_model=True))
    assert OPRL(checkpoint="some/model").needs == ("reference", Progress("some/model"))
    assert PROGRESS().needs == ("reference", Progress())
    assert PROGRESS(alpha=0.0).traits.unbiased
    assert not PROGRESS(alpha=0.0, outcome=False).traits.unbiased
