"""A person as the policy: sees what a policy sees, types actions alone."""

import re
import shlex
from dataclasses import replace

import pytest

from perturn.config.sections import ProtocolSettings
from perturn.errors import ConfigError
from perturn.run.human_player import play_by_hand
from perturn.run.score_recipe import scoring_recipe


@pytest.fixture
def recipe(own_environment):
    """Guessing a number from 9 to 12, with thoughts."""
    return scoring_recipe("person", "own_environment:GuessNumber", overrides=["protocol.format=react"])


def typed(*lines):
    """What a person types, then nothing more."""
    said = iter(lines)

    def ask():
        for line in said:
            return line
        raise EOFError

    return ask


def test_a_person_plays_as_a_policy_would(recipe):
    """The secret of guess/10 is 10: higher, then right; the thought is left empty."""
    seen = []

    played = play_by_hand(recipe, "guess/10", typed("9", "Thought: it is 10.\nAction: 10"), seen.append)

    assert (played.success, played.policy, played.task.id) == (True, "person", "guess/10")
    assert [turn.action.text for turn in played.turns] == [
        "Thought: \nAction: 9",
        "Thought: it is 10.\nAction: 10",
    ]
    assert [message["role"] for message in seen] == ["system", "user", "user"]
    assert "Answer with one thought and one action" in seen[0]["content"]
    assert seen[2]["content"] == "higher"


def test_a_person_may_leave(recipe):
    """Nothing is kept of an episode that is not over."""
    assert play_by_hand(recipe, None, typed("9"), lambda _: None) is None


def test_an_action_is_written_in_the_format_of_the_rules(recipe):
    """`action` has no thought."""
    rules = ProtocolSettings("own", format="action", system="Guess.", max_turns=1)

    played = play_by_hand(replace(recipe, protocol=rules), None, typed("9"), lambda _: None)

    assert played.turns[0].action.text == "Action: 9"
    assert played.truncated or played.success


def test_a_task_that_is_not_there_is_refused(recipe, capsys):
    """With the three nearest there are, and a command that prints all."""
    with pytest.raises(ConfigError) as caught:
        play_by_hand(recipe, "guess/13", typed(), lambda _: None)

    message, _, command = str(caught.value).partition(" To list all: ")
    assert re.fullmatch(
        r"no task 'guess/13' in split 'test'\. The nearest of (\d+) ids: '\S+', '\S+' and '\S+'\.", message
    )
    program, option, code = shlex.split(command)
    assert (program, option) == ("python", "-c")
    exec(code)
    printed = capsys.readouterr().out.split()
    assert len(printed) > 3
    assert f" of {len(printed)} ids" in message
