"""What a credit is given of an iteration's episodes, and what it must return."""

import pytest
import torch
from torch.testing import assert_close

from perturn.credit import CREDITS
from perturn.errors import ConfigError
from perturn.run.credit import credit_groups

from .own_credits import Across, Flat, Own, Short, Wrong
from .test_credit import EPISODES


def test_a_credit_is_asked_for_one_task_at_a_time_unless_it_looks_across():
    """By task and sample, whatever the order of the episodes."""
    Own.calls = []
    credit_groups(EPISODES, Own())
    tasks = [
        [key for key in sorted(one.key for one in EPISODES) if key[0] == task]
        for task in ("even", "one", "two")
    ]
    assert Own.calls == tasks

    Across.calls = []
    rows = credit_groups(EPISODES, Across(2.0))
    assert Across.calls == [[key for keys in tasks for key in keys]]
    assert {row.key: row.weight for row in rows}["one", 1] == (3.0,) * 3


def test_what_a_credit_needs_stays_with_its_trajectory():
    """Given in the order of the episodes, read in the order of the groups."""

    class Echo(Own):
        def __call__(self, group, *, given):
            return given

    given = [torch.full((len(one.turns),), float(i + 1)) for i, one in enumerate(EPISODES)]

    rows = credit_groups(EPISODES, Echo(), {"given": given})

    assert {row.key: row.weight for row in rows} == {
        one.key: (i + 1.0,) * len(one.turns) for i, one in enumerate(EPISODES)
    }


def test_reinforce_whitens_over_all_tasks_of_an_iteration():
    """Scores 0 0 / 1 0 0 / 1 1 over three tasks have one mean and one deviation."""
    rows = credit_groups(EPISODES, CREDITS["reinforce++"]())

    ordered = sorted(EPISODES, key=lambda one: one.key)
    expected = CREDITS["reinforce++"]()(ordered)
    for row, weights in zip(rows, expected, strict=True):
        assert_close(torch.tensor(row.weight, dtype=torch.float64), weights, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("credit", "message"),
    [
        (Wrong(), r"credit Wrong cannot weigh the 2 trajectories of task 'even': KeyError: 'state'"),
        (Short(), r"credit Short must return one tensor a trajectory, .* the 1 turns of task 'even'"),
        (Flat(), r"credit Flat must return one tensor a trajectory, .* the 2 turns of task 'one'"),
    ],
)
def test_a_credit_of_somebodys_that_fails_is_named(credit, message):
    with pytest.raises(ConfigError, match=message):
        credit_groups(EPISODES, credit)
