"""`studies/length_pairs.py`: groups of pairs by the length of the rejected episode."""

from pathlib import Path

import pytest

from perturn.config.row_maker_settings import RowInputs
from perturn.io.user_code import load_object
from perturn.types import Action, Task, Trajectory, Turn

LengthGroup = load_object(f"{Path(__file__).parents[2] / 'studies/length_pairs.py'}:LengthGroup")


def episode(task, turns, reward, **changes):
    played = tuple(Turn((), Action(f"say {at}")) for at in range(turns))
    return Trajectory(Task(task), played, total_reward=reward, **changes)


def groups(lengths, seed=0, number=3):
    """The task and the length of each pair's rejected episode, by group, and the counts of each group."""
    experts = [episode(f"t{index:02d}", 1, 1.0, policy="expert") for index in range(len(lengths))]
    explored = [episode(f"t{index:02d}", turns, 0.0) for index, turns in enumerate(lengths)]
    inputs = RowInputs(explored=explored, experts=experts, seed=seed)
    made = [LengthGroup(group=group, groups=number)(inputs) for group in range(1, number + 1)]
    found = [[(pair.rejected.task.id, len(pair.rejected.turns)) for pair in each.rows] for each in made]
    return found, [each.counts for each in made]


def test_groups_have_equal_sizes_and_share_no_pair():
    """Ten pairs in three groups: the longest pair is left over."""
    found, counts = groups([9, 2, 4, 4, 7, 3, 4, 8, 2, 6])

    assert [sorted(turns for _, turns in group) for group in found] == [[2, 2, 3], [4, 4, 4], [6, 7, 8]]
    assert len({task for group in found for task, _ in group}) == 9
    assert [(each["kept"], each["other_group"]) for each in counts] == [(3, 7)] * 3


def test_equal_lengths_are_divided_at_random_by_the_seed():
    first, again, other = (groups([5] * 30, seed=seed)[0] for seed in (1, 1, 2))

    assert first == again
    assert first != other
    assert first[0] != [(f"t{index:02d}", 5) for index in range(10)]


def test_a_group_without_pairs_says_so():
    made = LengthGroup(group=3)(RowInputs(explored=[episode("a", 2, 0.0)], experts=[episode("a", 1, 1.0)]))

    assert (list(made.rows), made.lacks) == ([], "no pair is left (1 of 1: other group)")


def test_the_number_of_a_group_is_checked():
    with pytest.raises(ValueError, match=r"group must be <= groups=3, got 4\."):
        LengthGroup(group=4)
    with pytest.raises(ValueError, match=r"group must be >= 1, got 0\."):
        LengthGroup(group=0)
