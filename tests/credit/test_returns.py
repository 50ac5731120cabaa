"""The return that every credit of a group starts from."""

import dataclasses

import pytest

from perturn.config.parsing import build
from perturn.credit import CREDITS
from perturn.credit.returns import Return
from perturn.errors import ConfigError
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
