"""Plays that were interrupted, whose later play gets only answers to its own prompts, and plays that often fail."""

import pytest

from episodes.counting import PROTOCOL, Counter, Script
from perturn.engines.with_user import with_user
from perturn.episodes.play_many import Job, play
from perturn.types import Action, Sampling, Task
from support.examiner import Examiner


class Stream(Script):
    """A streaming engine whose first pass is interrupted; it has no method `cancel`."""

    def __init__(self, is_interrupted=True):
        super().__init__(lambda prompt: Action(f"Thought: {prompt.seed}\nAction: up"))
        self.open, self.is_interrupted = [], is_interrupted

    def submit(self, prompts, sampling):
        """Keep the prompts."""
        self.open += prompts

    def advance(self):
        """Answer all prompts."""
        if self.is_interrupted:
            self.is_interrupted = False
            raise KeyboardInterrupt
        done, self.open = self.open, []
        return [(prompt, self.answer(prompt)) for prompt in done]


class Cancelling(Stream):
    """A streaming engine that can stop answering a prompt."""

    def cancel(self, conversation):
        """Drop the prompt."""
        self.open = [prompt for prompt in self.open if prompt.conversation != conversation]


def played(engine, **seeds):
    """Texts by task, after playing each task with its seed."""
    jobs = [Job(Task(name), seed) for name, seed in seeds.items()]
    found = play(jobs, engine, Counter, protocol=PROTOCOL, sampling=Sampling())
    return {one.task.id: [turn.action.text for turn in one.turns] for one in found}


@pytest.mark.parametrize("kind", [Stream, Cancelling])
@pytest.mark.parametrize(
    "wrap", [lambda engine: engine, lambda engine: with_user(engine, Examiner(None), None)]
)
def test_a_play_after_an_interrupted_play_gets_its_own_answers(kind, wrap):
    """The first play leaves prompts of `a` and `b` open; the second plays `a` with another seed, and `c`."""
    inner = kind()
    engine = wrap(inner)
    with pytest.raises(KeyboardInterrupt):
        played(engine, a=1, b=2)
    left = inner.open

    assert bool(left) is (kind is Stream)
    assert played(engine, a=3, c=4) == played(Stream(is_interrupted=False), a=3, c=4)


def test_many_failures_of_one_kind_are_not_all_listed(caplog):
    jobs, engine = [Job(Task(f"t/{n}"), 0) for n in range(12)], Script(lambda prompt: Action("Action: crash"))

    assert len(list(play(jobs, engine, Counter, protocol=PROTOCOL, sampling=Sampling()))) == 12
    assert caplog.text.count("the world fell over") == 10
    assert "further episodes that fail with RuntimeError are not listed here" in caplog.text
