"""A recorded episode is played again: what the world was sent, and whether it still answers alike."""

from dataclasses import replace

import pytest

from perturn.episodes.episode import episode
from perturn.episodes.play_many import Job
from perturn.episodes.replay import play_script, replay
from perturn.errors import DataError, EngineFailure, EnvironmentFailure
from perturn.types import Action, Task

from .counting import PROTOCOL, Counter

UP, VAIN, BROKEN = "Action: up", "Action: down", "I go up."


def record(*texts):
    steps = episode(Counter(), Job(Task("t/1"), seed=0), protocol=PROTOCOL)
    return play_script(steps, [Action(text) for text in texts], EngineFailure("no more"))


def test_it_says_what_the_world_was_sent():
    """Nothing where an action broke the format; episodes that ended, failed or were cut are all the same."""
    whole = record(UP, BROKEN, VAIN, UP)
    cut = replace(whole, turns=whole.turns[:2])

    assert replay(Counter(), whole, PROTOCOL) == ["up", None, "down", "up"]
    assert replay(Counter(), cut, PROTOCOL) == ["up", None]
    assert replay(Counter(), record(UP, UP), PROTOCOL) == ["up", "up"]
    assert replay(Counter(), replace(whole, turns=()), PROTOCOL) == []


def test_a_world_that_answers_otherwise_is_told():
    """The first turn whose observation differs is named, with both texts."""
    recorded = record(UP, VAIN, UP)
    other = replace(recorded.turns[2], observation=({"role": "user", "content": "why?"},))

    with pytest.raises(
        DataError, match=r"task 't/1', sample 0: turns\[2\]\.observation: recorded was .*'why\?'.*'what\?'"
    ):
        replay(Counter(), replace(recorded, turns=(*recorded.turns[:2], other)), PROTOCOL)


def test_a_world_that_ends_sooner_or_fails_is_told():
    recorded = record(UP, VAIN, UP)

    with pytest.raises(DataError, match=r"turns\[3\]\.observation: .* ends the episode before it when"):
        replay(Counter(), replace(recorded, turns=(*record(UP, UP, UP).turns, recorded.turns[0])), PROTOCOL)
    with pytest.raises(
        EnvironmentFailure, match=r"sample 0: the environment failed at turn 0 .*no such room"
    ):
        replay(Counter(), replace(recorded, task=Task("broken")), PROTOCOL)
