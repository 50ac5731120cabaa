"""Identities of the credits of a group, for groups drawn at random."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from perturn.credit import CREDITS
from perturn.types import Action, Status, Task

QUICK = settings(derandomize=True)
GROUP_CREDITS = [name for name, each in CREDITS.items() if each().traits.needs_group]
NOTHING_ALONE = [
    name for name in GROUP_CREDITS if name == "reinforce++" or not CREDITS[name]().traits.weighs_alone
]
"""Credits that give nothing to a trajectory alone. `reinforce++` weighs it against other tasks; here there are none."""
every_credit = pytest.mark.parametrize("name", GROUP_CREDITS)
TURN = st.tuples(st.sampled_from(["a", "b", "c", None]), st.sampled_from([0.0, 0.25, 1.0]), st.booleans())
GROUPS = st.lists(st.lists(TURN, min_size=1, max_size=4), min_size=1, max_size=5)


def build(episode, rows, task="t"):
    """A group from its turns."""
    return [
        episode(
            [s for s, _, _ in row], [r for _, r, _ in row], valid=[v for _, _, v in row], task=task, sample=i
        )
        for i, row in enumerate(rows)
    ]


def changed(group, change):
    """The group with other rewards."""
    found = []
    for each in group:
        turns = tuple(
            dataclasses.replace(turn, reward=change(turn.reward, t == len(each.turns) - 1))
            for t, turn in enumerate(each.turns)
        )
        found.append(dataclasses.replace(each, turns=turns, total_reward=sum(turn.reward for turn in turns)))
    return found


def assert_all_close(found, expected):
    """1e-7: rounding of rewards, grown by a division by the least deviation there is here."""
    assert_close(torch.cat(found), torch.cat(expected), rtol=1e-7, atol=1e-7)


@every_credit
@QUICK
@given(rows=GROUPS, data=st.data())
def test_the_order_of_a_group_changes_no_bit(episode, weigh, name, rows, data):
    order = data.draw(st.permutations(range(len(rows))))
    group = build(episode, rows)

    found = weigh(CREDITS[name](), [group[i] for i in order])

    for one, i in zip(found, order, strict=True):
        assert torch.equal(one, weigh(CREDITS[name](), group)[i])


@every_credit
@QUICK
@given(rows=GROUPS)
def test_weights_are_finite_and_one_a_turn(episode, weigh, name, rows):
    found = weigh(CREDITS[name](), build(episode, rows))

    assert [one.shape for one in found] == [(len(row),) for row in rows]
    assert all(one.dtype == torch.float64 and one.isfinite().all() for one in found)


@pytest.mark.parametrize("name", [name for name in GROUP_CREDITS if not CREDITS[name]().traits.across_tasks])
@QUICK
@given(one=GROUPS, other=GROUPS)
def test_tasks_are_never_compared_with_each_other(episode, weigh, name, one, other):
    """States of the same name in another task are other states, and a group is made by task, never by position."""
    here, there = build(episode, one, "here"), build(episode, other, "there")
    credit, most = CREDITS[name](), max(len(one), len(other))
    mixed = [each for i in range(most) for group in (here, there) for each in group[i : i + 1]]

    found = dict(zip([each.key for each in mixed], weigh(credit, mixed), strict=True))

    for group in (here, there):
        for each, expected in zip(group, weigh(credit, group), strict=True):
            assert torch.equal(found[each.key], expected)


SHIFTED = {
    "grpo": {}, "dr-grpo": {}, "rloo": {}, "reinforce++": {}, "trloo": {}, "anchor-rloo": {},
    "gigpo": {"gamma": 1.0}, "hgpo": {"gamma": 1.0}, "graphgpo": {},
}  # fmt: skip


@pytest.mark.parametrize("name", SHIFTED)
@QUICK
@given(rows=GROUPS, shift=st.sampled_from([-2.0, 0.5, 4.0]))
def test_the_same_reward_for_everybody_at_the_end_changes_nothing(episode, name, rows, shift):
    """Where returns are not discounted."""
    group, credit = build(episode, rows), CREDITS[name](**SHIFTED[name])
    unchanged = [each.success for each in group]

    shifted = changed(group, lambda reward, last: reward + shift * last)

    assert [each.success for each in shifted] == unchanged
    if len(rows) > 1:
        for each in (group, shifted):  # a trajectory whose rewards are all 0 has its total reward at the end
            assert all(math.isclose(sum(t.reward for t in one.turns), one.total_reward) for one in each)
        assert_all_close(credit(shifted), credit(group))


LINEAR = {
    "grpo": {"normalize": "mean"}, "dr-grpo": {}, "rloo": {}, "trloo": {}, "anchor-rloo": {}, "gigpo": {}, "hgpo": {},
}  # fmt: skip


@pytest.mark.parametrize("name", LINEAR)
@QUICK
@given(rows=GROUPS)
def test_twice_the_reward_is_twice_the_advantage(episode, name, rows):
    """In the credits that divide by nothing; hgpo's divisor does not know the rewards."""
    group, credit = build(episode, rows), CREDITS[name](**LINEAR[name])

    found = credit(changed(group, lambda reward, _: 2 * reward))

    assert_all_close(found, [2 * one for one in credit(group)])


@pytest.mark.parametrize("name", ["dr-grpo", "maxrl", "gigpo", "hgpo", "g2po", "igpo", "a2tgpo"])
@QUICK
@given(rows=GROUPS)
def test_a_group_twice_is_the_same_group(episode, weigh, name, rows):
    """Means do not change; deviations of samples and what leaves one out do."""
    group = build(episode, rows)

    found = weigh(CREDITS[name](), group + group)

    if len(group) > 1:
        assert_all_close(found, weigh(CREDITS[name](), group) * 2)


@pytest.mark.parametrize("name", NOTHING_ALONE)
def test_a_trajectory_alone_in_its_group_gets_nothing_and_equal_ones_neither(episode, weigh, name):
    """A baseline of itself would be one, and no deviation divides."""
    alone = [episode(["a", "a"], [0.5, 1.0], valid=[False, True])]
    equal = [episode(["a"], [1.0], sample=i) for i in range(3)]

    assert [one.tolist() for one in weigh(CREDITS[name](), alone)] == [[0.0, 0.0]]
    assert all(one.tolist() == [0.0] for one in weigh(CREDITS[name](), equal))


@pytest.mark.parametrize("name", ["grpo", "dr-grpo", "rloo"])
def test_raw_scores_of_those_alone_must_be_asked_for(scored, name):
    """As verl keeps them; grpo over 1 + 1e-6."""
    assert CREDITS[name]()(scored(2.0))[0].tolist() == [0.0]
    assert CREDITS[name](singleton="raw")(scored(2.0))[0].tolist() == pytest.approx([2.0], abs=3e-6)


@pytest.mark.parametrize("name", [name for name in GROUP_CREDITS if name not in ("siop", "potential")])
def test_a_failed_trajectory_counts_with_score_0_and_may_have_no_turns(episode, weigh, name):
    """Its rewards until then are none; the group is as if it had lost. siop and potential read no rewards."""
    won, lost = episode(["a"], [1.0]), episode(["a"], [0.0], sample=1, success=False)
    failed = episode(["a"], [5.0], sample=1, status=Status.FAILED)
    empty = episode([], [], sample=2, status=Status.FAILED)
    credit = CREDITS[name]()

    found, expected = weigh(credit, [won, failed]), weigh(credit, [won, lost])
    assert [one.tolist() for one in found] == [one.tolist() for one in expected]
    assert [len(one) for one in weigh(credit, [won, lost, empty])] == [1, 1, 0]
    assert all(one.isfinite().all() for one in weigh(credit, [won, lost, empty]))
    assert [len(one) for one in weigh(credit, [empty])] == [0]


@QUICK
@given(rows=GROUPS)
def test_turns_without_a_state_share_none(episode, rows):
    """Then a trajectory has one advantage: that of RLOO, or of the group mean."""
    group = build(episode, [[(None, reward, valid) for _, reward, valid in row] for row in rows])

    assert_all_close(CREDITS["anchor-rloo"]()(group), CREDITS["rloo"]()(group))
    assert_all_close(CREDITS["gigpo"]()(group), CREDITS["dr-grpo"]()(group))
    assert all(not one.any() for one in CREDITS["hgpo"]()(group))


@QUICK
@given(rows=GROUPS)
def test_values_of_nothing_leave_the_return(episode, rows):
    """With gamma = lambda = 1 and V = 0, both levels of GAE are the return from the turn on."""
    group = build(episode, rows)
    values = [[0.0] * len(row) for row in rows]
    returns = [
        torch.tensor([sum(r for _, r, _ in row[t:]) for t in range(len(row))], dtype=torch.float64)
        for row in rows
    ]

    assert_all_close(CREDITS["turn-gae"]()(group, values=values), returns)
    assert_all_close(CREDITS["bi-level-gae"]()(group, values=values), returns)


@QUICK
@given(rows=GROUPS, numbers=st.data())
def test_hiper_is_a_sum_of_differences(episode, rows, numbers):
    """Of each turn that counts, times gamma lam for a turn within the segment, or the other lambda for a new one."""
    floats = st.floats(-2, 2)
    gamma, lam, high = (numbers.draw(st.floats(0, 1)) for _ in range(3))
    group = build(episode, rows)
    values = [[numbers.draw(floats) for _ in row] for row in rows]
    credit = CREDITS["hiper"](switch="a", by="action", gamma=gamma, lam=lam, high_level_lam=high)
    named = [
        dataclasses.replace(
            one,
            turns=tuple(
                dataclasses.replace(turn, action=Action(f"go {turn.state_key}")) for turn in one.turns
            ),
        )
        for one in group
    ]

    expected = []
    for one, own in zip(named, values, strict=True):
        begins = [t == 0 or turn.state_key == "a" for t, turn in enumerate(one.turns)]
        after = [*own[1:], 0.0]
        deltas = [turn.reward + gamma * after[t] - own[t] for t, turn in enumerate(one.turns)]
        found = []
        for t in range(len(own)):
            total, weight = 0.0, 1.0
            for k in range(t, len(own)):
                if k > t:
                    weight *= gamma * (
                        (high if begins[t] else 0.0) if begins[k] else (1.0 if begins[t] else lam)
                    )
                total += weight * deltas[k]
            found.append(total)
        expected.append(torch.tensor(found, dtype=torch.float64))

    assert_all_close(credit(named, values=values), expected)


@QUICK
@given(rows=GROUPS)
def test_hiper_with_a_turn_a_segment_and_with_one_segment_is_turn_gae(episode, rows):
    """By the lambda of segments; or by that of turns, but for the first one, whose advantage is the return less V."""
    group, values = build(episode, rows), [[0.25 * (t + 1) for t in range(len(row))] for row in rows]

    assert_all_close(
        CREDITS["hiper"](gamma=0.9, lam=0.1, high_level_lam=0.5)(group, values=values),
        CREDITS["turn-gae"](gamma=0.9, lam=0.5)(group, values=values),
    )
    whole = CREDITS["hiper"](switch="nowhere", gamma=0.9, lam=0.5)(group, values=values)
    gae = CREDITS["turn-gae"](gamma=0.9, lam=0.5)(group, values=values)
    returns = CREDITS["turn-gae"](gamma=0.9)(group, values=values)
    assert_all_close([one[1:] for one in whole], [one[1:] for one in gae])
    assert_all_close([one[:1] for one in whole], [one[:1] for one in returns])


def test_credits_do_not_touch_what_they_are_given(episode, weigh):
    group = [episode(["a", "b"], [0.0, 1.0]), episode(["a"], [0.0], sample=1)]
    copy = [dataclasses.replace(each, task=Task("t")) for each in group]

    for name in GROUP_CREDITS:
        weigh(CREDITS[name](), group)

    assert group == copy
