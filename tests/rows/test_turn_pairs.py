"""Turns against others from the same turn on: right over wrong ones, better ones over those that cost an episode."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perturn.data.iteration_numbers import ledger_of
from perturn.errors import DataError
from perturn.methods.drop_pairs import DROPS, pair_where_worth_drops
from perturn.methods.step_dpo.progress_pairs import pair_right_with_wrong
from perturn.rows.branch_pairs import pair_within_branches
from perturn.rows.pairing import IN_GROUP
from perturn.types import Action, Remaining, Status, Task, Trajectory, Turn

WAY = ("look", "wait", "run", "rest")


def explored(reward=0.0, *texts, **changes):
    turns = tuple(Turn((), Action(text)) for text in texts or WAY)
    return Trajectory(Task("a"), turns, total_reward=reward, terminated=True, **changes)


def branch(reward, kept, *texts, number=0, **changes):
    """An episode that begins with so many turns of the explored one."""
    return explored(
        reward, *WAY[:kept], *texts, **{"sample": number + 1, "taken_over": kept, "origin": 0, **changes}
    )


def measured(one, turn, wrong):
    """With the way that is left around one of its turns."""
    turns = list(one.turns)
    turns[turn] = replace(turns[turn], remaining=Remaining(3, 3 if wrong else 2))
    return replace(one, turns=tuple(turns))


FAILURE = measured(explored(), 1, wrong=True)
ONWARD = [
    measured(branch(0.0, 1, "go", "look", number=0), 1, wrong=False),
    measured(branch(0.5, 1, "open", "take", number=1), 1, wrong=False),
    measured(branch(1.0, 1, "rest", "go", number=2), 1, wrong=True),
    branch(1.0, 1, "go", number=3, status=Status.FAILED),
]


def texts(side):
    return [turn.action.text for turn in side.turns]


def nonzero(counts):
    return {name: count for name, count in counts.items() if count}


def test_the_best_right_turn_is_chosen_over_the_wrong_one_of_the_episode():
    """Scores of right turns 0 and 0.5, of wrong ones 0 and 1: what went well in spite of a wrong turn is not chosen."""
    pairs, counts = pair_right_with_wrong([FAILURE], ONWARD)

    assert [(pair.chosen, pair.rejected) for pair in pairs] == [(ONWARD[1], FAILURE)]
    assert nonzero(counts) == {"failed": 1, "kept": 2, "over": 2}
    assert set(counts) == set(IN_GROUP)


def test_as_many_right_turns_as_wrong_ones_are_paired_by_rank():
    """0.5 over 0, then 0 over 1; of three right ones and two wrong ones one is alone."""
    more = measured(branch(0.2, 1, "take", number=4), 1, wrong=False)
    pairs, counts = pair_right_with_wrong([FAILURE], [*ONWARD, more], per_group=None, one_turn=True)

    assert [(texts(pair.chosen), texts(pair.rejected)) for pair in pairs] == [
        (["look", "open"], ["look", "wait"]),
        (["look", "take"], ["look", "rest"]),
    ]
    assert nonzero(counts) == {"failed": 1, "kept": 4, "alone": 1}
    assert [pair.chosen.total_reward for pair in pairs] == [0.5, 0.2]
    assert (pairs[0].rejected.truncated, pairs[0].rejected.terminated) == (True, False)
    assert pairs[1].chosen == more  # it ended there by itself


def test_one_action_that_was_right_and_wrong_is_no_pair():
    """In a world of chance the same action may have led nearer and not."""
    lucky = measured(branch(1.0, 1, "wait", number=0), 1, wrong=False)

    assert pair_right_with_wrong([FAILURE], [lucky]) == ([], pair_right_with_wrong([FAILURE], [lucky])[1])
    assert nonzero(pair_right_with_wrong([FAILURE], [lucky])[1]) == {"identical": 2}


def test_a_turn_that_was_not_measured_is_refused():
    with pytest.raises(DataError, match=r"sample 1: turns\[1\]\.remaining was not measured; measure it"):
        pair_right_with_wrong([FAILURE], [branch(0.0, 1, "go")])


def each_worth(*scores):
    """Branches from turns 1, 2 and 3 with these scores, of other actions than the explored episode's."""
    return [
        branch(reward, kept, f"other {number}", number=10 * kept + number)
        for kept, rewards in enumerate(scores, start=1)
        for number, reward in enumerate(rewards)
    ]


@pytest.mark.parametrize(
    ("threshold", "found", "counted"),
    [
        (0.8, [], {"no_drop": 3}),
        (0.75, [], {"no_drop": 3}),
        (0.4, [(2, 21)], {"kept": 1, "no_drop": 2}),
        (0.1, [(2, 21), (3, 31)], {"kept": 2, "no_drop": 1}),
    ],
)
def test_hand_worked_drops(threshold, found, counted):
    """Worth before turns 1, 2, 3 and at the end: 1/2, 1, 1/4, 0; so the steps lose -1/2, 3/4 and 1/4.

    The best other branch from before the step is chosen, the first of equal ones: 21 and 31 in samples from 1.
    """
    branches = each_worth([1.0, 0.0], [1.0, 1.0], [1.0, 0.0, 0.0, 0.0])
    pairs, counts = pair_where_worth_drops([explored()], branches, threshold)

    assert [(pair.chosen.taken_over, pair.chosen.sample) for pair in pairs] == found
    assert all(pair.rejected == explored() for pair in pairs)
    assert nonzero(counts) == counted


def test_branches_that_did_as_the_episode_count_for_its_worth_and_are_not_chosen():
    """Before turn 3: (1 + 1 + 0)/3 = 2/3, the end 0. Those with "rest" did what it did, whatever came of it."""
    same = [branch(1.0, 3, "rest", number=n) for n in (0, 1)]
    other = branch(0.0, 3, "go", number=2)

    assert nonzero(pair_where_worth_drops([explored()], same, 0.4)[1]) == {"identical": 1}
    assert nonzero(pair_where_worth_drops([explored()], [*same, other], 0.4)[1]) == {"gap": 1}
    well = branch(1.0, 3, "go", number=3)
    pairs, _ = pair_where_worth_drops([explored()], [*same, other, well], 0.4)
    assert [pair.chosen for pair in pairs] == [well]


def test_failed_branches_are_left_out():
    """The worth before turn 3 is 1, by the branch that ended, not 1/2 or 1/3; and none is chosen."""
    lost = branch(0.0, 3, number=0, status=Status.FAILED)
    broken = branch(1.0, 3, "go", number=1, status=Status.FAILED)
    well = branch(1.0, 3, "run", number=2)

    assert nonzero(pair_where_worth_drops([explored()], [lost])[1]) == {"failed": 1}
    assert nonzero(pair_where_worth_drops([explored()], [lost, broken, well], 0.95)[1]) == {"kept": 1}
    assert nonzero(pair_where_worth_drops([explored()], [lost, broken, well], 1.0)[1]) == {"no_drop": 1}
    assert nonzero(pair_where_worth_drops([explored()], [lost, broken])[1]) == {"failed": 1}


@given(
    ends=st.lists(
        st.tuples(
            st.integers(1, 3),
            st.sampled_from([*WAY, "go"]),
            st.sampled_from([0.0, 0.3, 1.0]),
            st.booleans(),
            st.booleans(),
        ),
        max_size=12,
    ),
    per_group=st.sampled_from([1, 2, None]),
    one_turn=st.booleans(),
    backwards=st.booleans(),
)
def test_all_is_counted_and_both_sides_part_at_the_turn_in_question(ends, per_group, one_turn, backwards):
    """Of every kind of pairs of turns, whatever the order of the branches."""
    begun = explored()
    for turn in (1, 2, 3):
        begun = measured(begun, turn, wrong=turn != 2)
    branches = [
        measured(
            branch(reward, kept, text, number=n, status=Status.FAILED if fails else Status.COMPLETED),
            kept,
            wrong,
        )
        for n, (kept, text, reward, fails, wrong) in enumerate(ends)
    ]
    found, groups = branches[::-1] if backwards else branches, len({kept for kept, *_ in ends})
    right, in_groups = pair_right_with_wrong([begun], found, per_group=per_group, one_turn=one_turn)
    better, steps = pair_where_worth_drops([begun], found, 0.1, one_turn=one_turn)
    ended, alike = pair_within_branches([begun], found, 0.1, per_group=per_group, one_turn=one_turn)

    assert in_groups.total() == alike.total() == len(branches) + groups
    assert steps.total() == groups
    assert set(steps) == set(DROPS)
    assert (2 * len(right), len(better), 2 * len(ended)) == (in_groups["kept"], steps["kept"], alike["kept"])
    for pair in (*right, *better, *(ended if one_turn else ())):
        turn = max(pair.chosen.taken_over, pair.rejected.taken_over)
        assert texts(pair.chosen)[:turn] == texts(pair.rejected)[:turn]
        if one_turn:
            assert len(pair.chosen.turns) == len(pair.rejected.turns) == turn + 1
            assert texts(pair.chosen) != texts(pair.rejected)
    for pair in (*better, *ended):
        assert pair.chosen.total_reward > pair.rejected.total_reward


def test_steps_are_a_unit_of_the_ledger():
    """Beside the bins stands how many steps there were."""
    _, counts = pair_where_worth_drops([explored()], each_worth([1.0], [0.0]), 0.4)
    ledger = ledger_of({**counts, "too_long": 1, "steps": 3}, explored=1)

    assert (ledger["unit"], ledger["asked"], sum(ledger["bins"].values())) == ("steps", 3, 3)


def test_a_branch_without_a_turn_of_its_own_is_not_compared():
    """The turn limit cut it where it began."""
    _, counts = pair_right_with_wrong([FAILURE], [ONWARD[1], branch(0.0, 1, number=5, truncated=True)])

    assert nonzero(counts) == {"no_turns": 1, "kept": 2}
