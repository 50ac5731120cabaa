"""The return that every credit of a group starts from."""

import dataclasses

import pytest

from perturn.config.parsing import build
from perturn.credit import CREDITS
from perturn.credit.returns import Return
from perturn.data.records import trajectory_to_dict
from perturn.errors import ConfigError, DataError
from perturn.formats.read_rows import own_row
from perturn.types import Status


@pytest.fixture
def trajectory(episode):
    """Rewards 0.25, 0, 1; its second action was invalid."""
    return episode([None] * 3, [0.25, 0.0, 1.0], valid=[True, False, True])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.25, 0.0, 1.0]),
        ({"rewards": "outcome"}, [0.0, 0.0, 1.25]),
        ({"rewards": "success"}, [0.0, 0.0, 1.0]),
        ({"invalid_penalty": 0.5}, [0.25, -0.5, 1.0]),
        ({"rewards": "success", "invalid_penalty": 0.5}, [0.0, -0.5, 1.0]),
    ],
)
def test_hand_worked_rewards(trajectory, settings, expected):
    assert Return(**settings)([trajectory]) == [expected]


def test_a_total_reward_alone_is_that_of_the_last_turn(episode):
    bare = dataclasses.replace(episode([None] * 2, [0.0, 0.0]), total_reward=0.5)

    assert Return()([bare]) == [[0.0, 0.5]]


def test_a_total_reward_that_is_not_the_sum_of_the_rewards_is_refused(trajectory):
    """The rewards of the turns would hide the score; where they are ignored, nothing is refused."""
    for total in (0.0, 1.0):
        scored = dataclasses.replace(trajectory, total_reward=total)

        said = f"task 't', sample 0: the rewards of the turns sum to 1.25, but total_reward is {total:g}"
        said += r" \(0 is its default\)\." if not total else r"\."
        with pytest.raises(DataError, match=said):
            Return()([scored])
        assert Return(rewards="success")([scored]) == [[0.0, 0.0, 1.0]]
    assert Return()([dataclasses.replace(trajectory, total_reward=1.25 + 1e-9)]) == [[0.25, 0.0, 1.0]]


def test_a_row_without_a_total_reward_has_the_sum_of_its_turns(trajectory):
    """A row that says 0 is wrong."""
    record = trajectory_to_dict(trajectory)
    zero, none = record | {"total_reward": 0.0}, {key: record[key] for key in record if key != "total_reward"}

    assert own_row(none).total_reward == 1.25
    assert own_row(zero).total_reward == 0.0


def test_a_failed_trajectory_has_no_reward_and_no_penalty(trajectory):
    failed = dataclasses.replace(trajectory, status=Status.FAILED)

    for settings in ({}, {"rewards": "outcome"}, {"rewards": "success"}, {"invalid_penalty": 0.5}):
        assert Return(**settings)([failed]) == [[0.0, 0.0, 0.0]]


def test_a_recipe_sets_it_in_a_section_of_the_credit(trajectory, episode):
    """Scores 1.25 - 0.5 and 0: 0.75 less 0."""
    credit = build(CREDITS, {"name": "rloo", "returns": {"invalid_penalty": 0.5}}, "credit")

    found = credit([trajectory, episode([None], [0.0], sample=1)])

    assert [one.tolist() for one in found] == [[0.75] * 3, [-0.75]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rewards": "all"}, "credit.returns.rewards must be one of turns, outcome, success, got 'all'"),
        ({"invalid_penalty": -1.0}, r"credit.returns.invalid_penalty must be >= 0, got -1\.0"),
    ],
)
def test_settings_outside_their_range_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        build(CREDITS, {"name": "grpo", "returns": settings}, "credit")
