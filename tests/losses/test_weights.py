"""The weight of each turn: what a batch holds, and what a loss asks its credit where it holds none."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from perturn.credit import CREDITS
from perturn.losses import LOSSES, TurnLogprobs
from perturn.losses.turn_logprobs import turn_weights
from perturn.types import Action, Task, Trajectory, Turn

QUICK = settings(derandomize=True)
LENGTHS = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=5), min_size=1, max_size=4)
every_credit = pytest.mark.parametrize(
    "name", [name for name, each in CREDITS.items() if hasattr(each, "weigh")]
)


def group_of(*turns):
    """Trajectories of so many turns each."""
    return [
        Trajectory(Task("t"), (Turn((), Action("go")),) * count, sample=i) for i, count in enumerate(turns)
    ]


def nested(side):
    """The reference of a batch as a credit takes it."""
    by_turn = side.reference.split(side.tokens_per_turn.tolist())
    turns = side.turns_per_trajectory.tolist()
    return [list(by_turn[sum(turns[:k]) : sum(turns[: k + 1])]) for k in range(len(turns))]


@every_credit
@QUICK
@given(lengths=LENGTHS)
def test_a_group_is_weighed_as_a_loss_weighs_a_batch(make_side, name, lengths):
    """One computation behind both calls: equal to the last bit, and one number per turn."""
    side, credit = make_side(3, lengths, dtype=torch.float32), CREDITS[name]()
    group = group_of(*map(len, lengths))

    by_group = credit(group, **({"reference": nested(side)} if credit.needs else {}))

    assert [len(one) for one in by_group] == [len(turns) for turns in lengths]
    assert torch.equal(torch.cat(by_group), turn_weights(side, credit))


@every_credit
def test_a_weight_that_a_batch_holds_is_what_every_loss_reads(pair, name):
    """Weights from a credit, written into the batch, replace each loss's own; losses of weight 2w are other losses."""
    credit = CREDITS[name]()
    weighed = [dataclasses.replace(side, weight=turn_weights(side, credit)) for side in pair]

    for loss_name, make in LOSSES.items():
        loss = make()
        if loss.traits.needs_behavior or loss.traits.needs_mismatched:
            continue  # losses on groups and on labels; their own tests have this claim
        if loss_name == "w-dpo":
            continue  # it reads gaps, which are none here
        own = loss.credit == credit
        assert torch.equal(loss(*weighed), loss(*pair)) or not own, loss_name
        doubled = [dataclasses.replace(side, weight=2 * side.weight) for side in weighed]
        assert not torch.equal(loss(*doubled), loss(*weighed)), loss_name


def test_nested_numbers_and_behavior_reach_the_batch():
    """[trajectories][turns] of weights, and log mu nested as the policy is."""
    side = TurnLogprobs.from_nested(
        [[[-0.1, -0.2], [-1.0]], [[-0.5]]],
        weight=[[1.0, -0.5], [2.0]],
        clip=[[1.2, 0.8], [1.0]],
        behavior=[[[-0.3, -0.4], [-2.0]], [[-0.6]]],
    )

    assert side.reference is None
    assert_close(side.weight, torch.tensor([1.0, -0.5, 2.0]))
    assert_close(side.clip, torch.tensor([1.2, 0.8, 1.0]))
    assert_close(side.behavior, torch.tensor([-0.3, -0.4, -2.0, -0.6]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": [[1.0]]}, r"weight must hold one number for each turn, \[2\] by trajectory, got \[1\]"),
        ({"clip": [[1.0]]}, r"clip must hold one number for each turn, \[2\] by trajectory, got \[1\]"),
        ({"clip": [[1.0, 0.0]]}, r"clip must be finite and > 0, got \[1\.0, 0\.0\]"),
        ({"clip": [[1.0, float("inf")]]}, "clip must be finite and > 0"),
        ({"clip": [[float("nan"), 1.0]]}, "clip must be finite and > 0"),
        ({"behavior": [[[-0.1], [-1.0]]]}, "turn 0: policy has 2 tokens, but behavior 1"),
    ],
)
def test_numbers_of_another_nesting_and_factors_that_are_none_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        TurnLogprobs.from_nested([[[-0.1, -0.2], [-1.0]]], **changes)


def test_weights_of_the_wrong_length_are_refused():
    with pytest.raises(ValueError, match=r"weight must have shape \[1\], one for each turn, got \[2\]"):
        TurnLogprobs(torch.zeros(2), None, torch.zeros(2).long(), torch.zeros(2).long(), weight=torch.ones(2))
