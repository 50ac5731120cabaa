"""Process scores: how good each turn was, by the environment."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perturn.config.parsing import parse
from perturn.config.recipe import Recipe
from perturn.credit import CREDITS
from perturn.errors import DataError
from perturn.run.stages.measure_distance import sense_of
from perturn.run.stages.training_checks import check_training
from perturn.types import Action, Remaining, Status, Task, Trajectory, Turn

QUICK = settings(derandomize=True)
RECIPE = {
    "name": "x",
    "model": {"name": "smollm2-135m"},
    "environment": {"name": "alfworld-like"},
    "protocol": {"name": "alfworld-lab"},
    "align": {"loss": {"name": "w-dpo"}},
    "rows": {"name": "expert-pairs"},
}


def episode(path, valid=None, **facts):
    """A trajectory from the lengths of the way around its turns, and which of these were valid."""
    valid = valid or [True] * (len(path) - 1)
    turns = zip(pairwise(path), valid, strict=True)
    return Trajectory(
        Task("t"),
        tuple(Turn((), Action("go"), valid=fine, remaining=Remaining(*way)) for way, fine in turns),
        **facts,
    )


def scores(one, **choice):
    return CREDITS["process-score"](**choice)([one])[0].tolist()


def test_hand_worked():
    """A way of 5, 4, 4, 3, none: turns 0 and 2 are right, turn 3 is not valid, and 0.25 was earned."""
    one = episode([5, 4, 4, 3, None], [True, True, True, False], total_reward=0.25)

    assert scores(one) == [1, 0, 1, 0]
    assert scores(one, by="valid") == [1, 1, 1, 0]
    assert scores(one, by="outcome") == [0.25] * 4
    assert scores(episode([2, 1], total_reward=1.0, status=Status.FAILED), by="outcome") == [0]


@QUICK
@given(way=st.lists(st.integers(0, 9), min_size=2, max_size=9))
def test_who_comes_to_the_end_has_as_many_right_turns_as_it_took_at_least(way):
    """Each right turn takes one off a way that is counted in turns; the others add to it what they like."""
    path = [way[0]]
    for each in way[1:]:
        path.append(path[-1] - 1 if path[-1] and each < path[-1] else path[-1] + each % 3)

    assert sum(scores(episode(path))) >= path[0] - path[-1]


def test_the_remaining_path_must_be_measured_where_it_is_read():
    """A recipe has it measured for this credit; turns by themselves are refused; other measures need none."""
    bare = Trajectory(Task("t"), (Turn((), Action("go")),))
    credit = CREDITS["process-score"]

    valid = {"credit": {"name": "process-score", "by": "valid"}}
    assert sense_of(parse(Recipe, RECIPE)) == "shortest"
    assert sense_of(parse(Recipe, RECIPE | valid)) is None
    with pytest.raises(DataError, match=r"turns\[0\]\.remaining was not measured"):
        credit()([bare])
    assert scores(bare, by="valid") == [1]


def test_w_dpo_has_it_measured_unless_it_is_told_otherwise():
    """The loss's own credit reads the remaining path; one that is set takes its part."""
    other = {"credit": {"name": "process-score", "distance": "searching"}}

    assert sense_of(parse(Recipe, RECIPE)) == "shortest"
    assert sense_of(parse(Recipe, RECIPE | other)) == "searching"
    check_training(parse(Recipe, RECIPE | {"credit": {"name": "process-score", "by": "valid"}}))


def test_measures_that_there_are_not_are_refused():
    with pytest.raises(ValueError, match="by must be one of progress, valid, outcome, got 'luck'"):
        CREDITS["process-score"](by="luck")
