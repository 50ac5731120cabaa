"""An engine whose answers are none: the play stops with an error that names the engine, and does not wait for ever."""

import re

import pytest

from episodes.counting import PROTOCOL, Counter, Script, jobs
from perturn.episodes.lockstep_blocks import play_blocks
from perturn.episodes.play_many import play
from perturn.errors import ConfigError
from perturn.types import Sampling


class Streams(Script):
    """A streaming engine."""

    def submit(self, prompts, sampling):
        """Keep the prompts."""
        self.batches += prompts

    def advance(self):
        """Answer all."""
        done, self.batches = self.batches, []
        return [(prompt, self.answer(prompt)) for prompt in done]


class Whole(Script):
    """An engine that returns one object for all prompts."""

    def generate(self, prompts, sampling):
        """Whatever it is."""
        return self.answer


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        (
            Script(lambda prompt: "Action: up"),
            "each answer of engine 'script' must be a perturn.types.Action",
        ),
        (
            Streams(lambda prompt: {"text": "up"}),
            "each answer of engine 'script' must be a perturn.types.Action",
        ),
        (Whole(None), "engine 'script' must return a list of 1 answers, one for each prompt, got None"),
        (Whole([]), "engine 'script' must return a list of 1 answers, one for each prompt, got []"),
    ],
)
def test_an_engine_answers_with_actions(engine, says):
    settings = {"protocol": PROTOCOL, "sampling": Sampling()}

    with pytest.raises(ConfigError, match=f"{re.escape(says)}.*check_engine"):
        list(play(jobs("a"), engine, Counter, **settings))
    if not isinstance(engine, Streams):
        with pytest.raises(ConfigError, match=re.escape(says)):
            list(play_blocks([jobs("a")], engine, Counter, **settings))
