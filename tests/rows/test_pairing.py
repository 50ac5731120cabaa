from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perturn.config.row_maker_settings import Limit, RowInputs
from perturn.data.origins import branches_of
from perturn.errors import DataError
from perturn.rows.branch_pairs import pair_within_branches
from perturn.rows.correction_pairs import CORRECTED, Corrections, pair_with_corrected, to_correct
from perturn.rows.expert_pairs import ExpertPairs
from perturn.rows.group_pairs import GroupPairs
from perturn.rows.pairing import IN_GROUP, OUTCOMES, pair_with_expert, pair_within_groups
from perturn.types import Action, PreferencePair, Remaining, Status, Task, Trajectory, Turn


def trajectory(reward, *texts, task="a", **changes):
    turns = tuple(Turn((), Action(text)) for text in texts)
    return Trajectory(Task(task), turns, total_reward=reward, **changes)


EXPERT = trajectory(1.0, "look", "take", policy="expert")
TRAJECTORY = st.builds(
    lambda reward, texts, task, status, sample: trajectory(
        reward, *texts, task=task, status=status, sample=sample
    ),
    st.sampled_from([0.0, 0.25, 0.6, 1.0, 1.5]) | st.floats(-2, 2),
    st.lists(st.sampled_from(["look", "take"]), max_size=4),
    st.sampled_from("abc"),
    st.sampled_from(Status),
    st.integers(0, 9),
)


def nonzero(counts):
    return {name: count for name, count in counts.items() if count}


@pytest.mark.parametrize(
    ("explored", "outcome"),
    [
        (trajectory(0.5, "look"), "kept"),
        (trajectory(-3.0, "look"), "kept"),
        (trajectory(0.6, "look"), "gap"),
        (trajectory(0.7, "look"), "gap"),
        (trajectory(1.0, "look"), "tie"),
        (trajectory(1.1, "look"), "better_than_expert"),
        (trajectory(0.0, "look", "take"), "identical"),
        (trajectory(1.0, "look", "take"), "identical"),
        (trajectory(0.0), "no_turns"),
        (trajectory(0.0, "look", task="b"), "no_expert"),
        (trajectory(0.0, "look", status=Status.FAILED), "failed"),
        (trajectory(0.0, "look", task="b", status=Status.FAILED), "failed"),
    ],
)
def test_each_explored_trajectory_has_its_outcome(explored, outcome):
    """The expert has reward 1 and tau is 0.4: 0.6 is not strictly more than tau below it."""
    pairs, counts = pair_with_expert([EXPERT], [explored])

    assert nonzero(counts) == {outcome: 1}
    assert pairs == ([PreferencePair(EXPERT, explored)] if outcome == "kept" else [])


@given(st.lists(TRAJECTORY), st.lists(TRAJECTORY), st.floats(0, 2), st.none() | st.integers(0, 2))
def test_every_explored_trajectory_is_counted_once(experts, explored, threshold, extra):
    """The outcomes sum to the number explored, and the pairs are the kept ones, in order."""
    pairs, counts = pair_with_expert(experts, explored, threshold, max_extra_turns=extra)

    assert sum(counts[outcome] for outcome in OUTCOMES) == len(explored)
    assert set(counts) == {*OUTCOMES, "cut"}
    assert counts["kept"] == len(pairs)
    remaining = iter(explored)
    assert all(any(each.rejected.key == other.key for other in remaining) for each in pairs)
    assert all(each.chosen.total_reward - each.rejected.total_reward > threshold for each in pairs)


def test_rounding_errors_are_no_gaps():
    """0.81 - 0.41 = 0.4 + 6e-17 is not more than 0.4; ten times 0.1 is 1 - 1e-16, a tie even at tau = 0."""
    expert = trajectory(0.81, "look", "take")

    _, at_threshold = pair_with_expert([expert], [trajectory(0.41, "look")], 0.4)
    _, summed = pair_with_expert([EXPERT], [trajectory(sum([0.1] * 10), "look")], 0.0)

    assert nonzero(at_threshold) == {"gap": 1}
    assert nonzero(summed) == {"tie": 1}


def test_the_first_best_expert_of_a_task_is_taken():
    """Failed ones and ones without turns are none, whatever their reward."""
    experts = [
        trajectory(0.9, "a"),
        trajectory(1.0, "b"),
        trajectory(1.0, "c"),
        trajectory(5.0, "d", status=Status.FAILED),
        trajectory(5.0),
    ]

    pairs, _ = pair_with_expert(experts, [trajectory(0.0, "z")])

    assert [pair.chosen for pair in pairs] == [experts[1]]


def test_actions_that_differ_in_tool_calls_alone_are_not_identical():
    """Native tool calls come with empty texts."""
    one, other = (
        trajectory(reward, "")
        if name is None
        else replace(trajectory(reward, ""), turns=(Turn((), Action("", tool_calls=({"name": name},))),))
        for reward, name in [(1.0, "find"), (0.0, "open")]
    )

    pairs, _ = pair_with_expert([one], [other])

    assert pairs == [PreferencePair(one, other)]


def test_the_rejected_side_is_cut_to_some_turns_more_than_the_expert():
    """Expert 2 turns, 1 extra: 3 of 5 turns stay, of 3 all; the reward is the whole episode's."""
    long = trajectory(0.2, "look", "look", "look", "look", "look", terminated=True)
    short = trajectory(0.2, "look", "look", "look", sample=1, terminated=True)

    pairs, counts = pair_with_expert([EXPERT], [long, short], max_extra_turns=1)

    assert nonzero(counts) == {"kept": 2, "cut": 1}
    assert pairs[0].rejected == replace(long, turns=long.turns[:3], terminated=False, truncated=True)
    assert pairs[1].rejected is short


def test_a_side_that_is_cut_to_the_expert_itself_is_identical():
    """The expert's two actions and one more; without the cut it is a pair."""
    explored = trajectory(0.0, "look", "take", "look")

    _, uncut = pair_with_expert([EXPERT], [explored])
    _, cut = pair_with_expert([EXPERT], [explored], max_extra_turns=0)

    assert nonzero(uncut) == {"kept": 1}
    assert nonzero(cut) == {"identical": 1}


def test_environments_that_differ_are_refused():
    """Rewards of two environments do not compare; a side that does not say is trusted."""
    explored = trajectory(0.0, "look", environment="world-2")

    pairs, _ = pair_with_expert([EXPERT], [explored])
    with pytest.raises(DataError, match=r"task 'a': .* got 'world-1' and 'world-2'"):
        pair_with_expert([replace(EXPERT, environment="world-1")], [explored])

    assert len(pairs) == 1


GROUP = [
    trajectory(reward, text, sample=sample)
    for sample, (reward, text) in enumerate([(0.0, "a"), (1.0, "b"), (0.2, "c"), (0.9, "d"), (0.5, "e")])
]


def rewards(pairs):
    return [(pair.chosen.total_reward, pair.rejected.total_reward) for pair in pairs]


def test_the_best_of_a_group_is_paired_with_its_worst():
    """Of 0, 0.2, 0.5, 0.9, 1 the gaps are 1 and 0.7; 0.5 is left over."""
    one, counts = pair_within_groups(GROUP)
    both, all_counts = pair_within_groups(GROUP, per_group=None)

    assert rewards(one) == [(1.0, 0.0)]
    assert nonzero(counts) == {"kept": 2, "over": 2, "alone": 1}
    assert rewards(both) == [(1.0, 0.0), (0.9, 0.2)]
    assert nonzero(all_counts) == {"kept": 4, "alone": 1}
    assert rewards(pair_within_groups(GROUP, 0.7, per_group=None)[0]) == [(1.0, 0.0)]


@given(st.lists(TRAJECTORY), st.floats(0, 2), st.none() | st.integers(1, 3))
def test_every_trajectory_of_a_group_has_one_outcome(explored, threshold, per_group):
    """Outcomes sum to what was explored; nobody is in two pairs; order does not matter."""
    explored = list({one.key: one for one in explored}.values())
    pairs, counts = pair_within_groups(explored, threshold, per_group=per_group)
    used = [side.key for pair in pairs for side in (pair.chosen, pair.rejected)]

    assert sum(counts.values()) == len(explored)
    assert set(counts) == set(IN_GROUP)
    assert counts["kept"] == len(used) == len(set(used))
    assert all(best - worst > threshold for best, worst in rewards(pairs))
    assert all(pair.chosen.task == pair.rejected.task for pair in pairs)
    assert pair_within_groups(reversed(explored), threshold, per_group=per_group) == (pairs, counts)


def branch(reward, text, turn, origin, sample, **changes):
    """An episode that was played on from a turn of an explored one."""
    return trajectory(reward, text, sample=sample, taken_over=turn, origin=origin, **changes)


EXPLORED = [trajectory(0.5, "e", sample=0), trajectory(0.0, "f", sample=1)]
BRANCHES = [
    branch(1.0, "a", 2, 0, 4),
    branch(0.0, "b", 2, 0, 2),
    branch(0.2, "c", 4, 0, 6),
    branch(0.9, "d", 2, 1, 3),
    branch(0.3, "g", 2, 1, 5, status=Status.FAILED),
]


def test_branches_are_found_by_what_they_were_played_on_from():
    """Whatever their order; those of a turn are in that of their samples."""
    found = branches_of(EXPLORED, reversed(BRANCHES))

    assert [{turn: [one.sample for one in each] for turn, each in of.items()} for of in found] == [
        {2: [2, 4], 4: [6]},
        {2: [3, 5]},
    ]
    assert branches_of(EXPLORED[::-1], BRANCHES) == found[::-1]


@pytest.mark.parametrize("origin", [7, None])
def test_a_branch_of_no_explored_episode_is_refused(origin):
    with pytest.raises(DataError, match=f"got origin {origin}"):
        branches_of(EXPLORED, [branch(1.0, "a", 2, origin, 4)])


@pytest.mark.parametrize(
    ("threshold", "per_group", "expected", "counted"),
    [
        # the groups: rewards 0.5, 0, 1; 0.5, 0.2; 0, 0.9 and one that FAILED
        (0.4, 1, [(1.0, 0.0), (0.9, 0.0)], {"kept": 4, "gap": 2, "alone": 1, "failed": 1}),
        (0.2, 1, [(1.0, 0.0), (0.5, 0.2), (0.9, 0.0)], {"kept": 6, "alone": 1, "failed": 1}),
        (0.95, None, [(1.0, 0.0)], {"kept": 2, "gap": 4, "alone": 1, "failed": 1}),
    ],
)
def test_the_best_that_share_their_first_turns_are_paired(threshold, per_group, expected, counted):
    """The explored one is in each group that was played on from it."""
    pairs, counts = pair_within_branches(EXPLORED, BRANCHES, threshold, per_group=per_group)

    assert rewards(pairs) == expected
    assert nonzero(counts) == counted


def test_as_many_pairs_of_one_turn_as_asked_for():
    """Rewards 0.5, 1, 0.9 and 0 of one turn: by rank 1 over 0 and 0.9 over 0.5; equal ones by sample are tied."""
    branches = [branch(1.0, "a", 2, 0, 2), branch(0.9, "b", 2, 0, 4), branch(0.0, "c", 2, 0, 6)]
    one, counts = pair_within_branches(EXPLORED[:1], branches, 0.1)
    both, _ = pair_within_branches(EXPLORED[:1], branches, 0.1, per_group=2)
    tied, tie = pair_within_branches(EXPLORED[:1], [branch(0.5, "a", 2, 0, 2)], 0.0)

    assert (rewards(one), nonzero(counts)) == ([(1.0, 0.0)], {"kept": 2, "over": 2})
    assert rewards(both) == [(1.0, 0.0), (0.9, 0.5)]
    assert (tied, nonzero(tie)) == ([], {"tie": 2})


def test_one_turn_is_compared_with_another_one_alone():
    """Of the expert's way look, take: who failed after his own turn says nothing against it, and b is rejected.

    Rewards of the whole episodes are 1, 0.9, 0 and 0; the one that did as the best is the last, and would be rejected.
    """
    expert = trajectory(1.0, "look", "take", sample=0)
    turns = {"taken_over": 1, "origin": 0}
    tried = [
        trajectory(0.9, "look", "a", "go", sample=1, **turns),
        trajectory(0.0, "look", "b", "go", sample=2, **turns),
        trajectory(0.0, "look", "take", "go", sample=3, **turns),
    ]
    pairs, counts = pair_within_branches([expert], tried, 0.4, one_turn=True)

    assert pairs == [PreferencePair(expert, replace(tried[1], turns=tried[1].turns[:2], truncated=True))]
    assert nonzero(counts) == {"identical": 1, "kept": 2, "alone": 1}


def explored(way, reward=0.0, **changes):
    """An episode with the remaining path at its start and after each turn, its actions numbered."""
    one = trajectory(reward, *map(str, range(len(way) - 1)), **changes)
    both = [Remaining(before, after) for before, after in pairwise(way)]
    turns = zip(one.turns, both, strict=True)
    return replace(one, turns=tuple(replace(turn, remaining=left) for turn, left in turns))


def correction(of, reward=1.0, **changes):
    """Two turns of the expert after the turns that were right."""
    kept = of.turns[: to_correct(of)]
    added = {"total_reward": reward, "success": True, "taken_over": len(kept), "policy": "expert"}
    return replace(of, turns=(*kept, *EXPERT.turns), **{**added, **changes})


STRAYED = explored([4, 3, 2, 3, 3])


@pytest.mark.parametrize(
    ("one", "turns"),
    [
        (STRAYED, 2),
        (explored([4, 4]), 0),
        (explored([4, 3, 2]), None),
        (explored([4, 3, None]), 1),
        (explored([4, 5, 0], success=True), None),
        (explored([4, 5], status=Status.FAILED), None),
        (trajectory(0.0), None),
    ],
)
def test_an_episode_is_corrected_from_its_first_wrong_turn(one, turns):
    """The first that comes no nearer: of ways 4, 3, 2, 3, 3 the third, of 4, 4 the first."""
    assert to_correct(one) == turns


def test_an_episode_whose_way_was_not_measured_is_refused():
    with pytest.raises(DataError, match=r"was not measured; a run measures it"):
        to_correct(trajectory(0.0, "look"))


def test_a_correction_is_paired_with_its_failure():
    """Of two samples of a task each has its own; they share the turns before the first wrong one."""
    other = explored([4, 4], sample=1)
    pairs, counts = pair_with_corrected([STRAYED, other], [correction(other), correction(STRAYED)])

    assert pairs == [PreferencePair(correction(STRAYED), STRAYED), PreferencePair(correction(other), other)]
    assert [pair.chosen.turns[:2] == STRAYED.turns[:2] for pair in pairs] == [True, False]
    assert nonzero(counts) == {"kept": 2}


@pytest.mark.parametrize(
    ("one", "mended", "outcome"),
    [
        (STRAYED, correction(STRAYED), "kept"),
        (STRAYED, correction(STRAYED, reward=0.4), "gap"),
        (STRAYED, correction(STRAYED, reward=-1.0), "gap"),
        (STRAYED, correction(STRAYED, success=False), "not_corrected"),
        (STRAYED, correction(STRAYED, status=Status.FAILED), "not_corrected"),
        (STRAYED, correction(STRAYED, sample=1), "not_corrected"),
        (explored([4, 3, 2]), correction(STRAYED), "no_wrong_turn"),
        (explored([1, 0], success=True), correction(STRAYED), "succeeded"),
        (explored([4, 4], status=Status.FAILED), correction(STRAYED), "failed"),
        (trajectory(0.0), correction(STRAYED), "no_turns"),
    ],
)
def test_each_episode_that_may_be_corrected_has_its_outcome(one, mended, outcome):
    """Tau is 0.4: a correction that earns 0.4 is not clearly better than nothing."""
    pairs, counts = pair_with_corrected([one], [mended])

    assert nonzero(counts) == {outcome: 1}
    assert set(counts) == {*CORRECTED, "cut"}
    assert pairs == ([PreferencePair(mended, one)] if outcome == "kept" else [])


def test_a_corrected_failure_is_cut_to_some_turns_more_than_its_correction():
    """Correction 2 + 2 turns, 1 extra: 5 of 8 turns stay."""
    long = explored([4, 3, 2, 3, 3, 3, 3, 3, 3])
    pairs, counts = pair_with_corrected([long], [correction(long)], max_extra_turns=1)

    assert nonzero(counts) == {"kept": 1, "cut": 1}
    assert pairs[0].rejected == replace(long, turns=long.turns[:5], truncated=True)


def test_corrections_of_another_environment_are_refused():
    begun = replace(STRAYED, environment="world-1")

    with pytest.raises(DataError, match=r"task 'a': .* got 'world-2' and 'world-1'"):
        pair_with_corrected([begun], [correction(begun, environment="world-2")])


def test_a_correction_of_one_turn_ends_with_it():
    """Two turns in common, then one each; their rewards stay those of the whole episodes."""
    pairs, counts = pair_with_corrected([STRAYED], [correction(STRAYED)], one_turn=True)
    (pair,) = pairs

    assert [len(side.turns) for side in (pair.chosen, pair.rejected)] == [3, 3]
    assert pair.chosen.turns == correction(STRAYED).turns[:3]
    assert pair.rejected.turns == STRAYED.turns[:3]
    assert (pair.chosen.total_reward, pair.rejected.total_reward) == (1.0, 0.0)
    assert nonzero(counts) == {"kept": 1}


def test_a_correction_that_does_the_same_is_no_pair():
    """In a world of chance the expert may do what the policy did."""
    mended = correction(STRAYED)
    same = replace(mended, turns=(*mended.turns[:2], STRAYED.turns[2], *mended.turns[3:]))

    assert nonzero(pair_with_corrected([STRAYED], [same], one_turn=True)[1]) == {"identical": 1}
    assert nonzero(pair_with_corrected([STRAYED], [same])[1]) == {"kept": 1}


def test_pairs_of_episodes_that_do_not_differ_within_the_limit_are_counted():
    """There are two pairs. The sides of the second have equal tokens within the limit."""
    limit = Limit(equal=lambda pairs: [False, True])
    experts, played = (
        [trajectory(reward, *text, task=task, sample=at) for task in "xy"]
        for at, (reward, text) in enumerate(((1.0, ("a",)), (0.0, ("b", "b"))))
    )
    of_expert = ExpertPairs(max_extra_turns=0)(RowInputs(played, experts, limit=limit))
    of_group = GroupPairs()(RowInputs([*played, *experts], limit=limit))

    assert [pair.chosen.task.id for pair in (*of_expert.rows, *of_group.rows)] == ["x", "x"]
    assert nonzero(of_expert.counts) == {"kept": 1, "too_long": 1, "cut": 1}
    assert nonzero(of_group.counts) == {"kept": 2, "too_long": 2}


def test_pairs_of_one_turn_are_not_counted_as_cut():
    """The only pair has equal tokens within the limit, and its sides end with the wrong turn."""
    limit = Limit(equal=lambda pairs: [True] * len(pairs))
    inputs = RowInputs([STRAYED], limit=limit, correct=lambda _: [correction(STRAYED)])

    assert nonzero(Corrections(length="turn")(inputs).counts) == {"too_long": 1}
