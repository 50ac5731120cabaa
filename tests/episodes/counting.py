"""A world that counts to three, and an engine that answers from a function."""

from dataclasses import dataclass, field

import pytest

from perturn.episodes.play_many import Job
from perturn.errors import EnvironmentFailure
from perturn.types import Action, EpisodeProtocol, Observation, Task

PROTOCOL = EpisodeProtocol(name="plain", format="action", system="Play.", max_turns=4)


@dataclass
class Counter:
    """Count to three with 'up'; 'crash' raises, and so does reset of a task called broken."""

    worlds: list = field(default_factory=list)
    name = "counter-1.0"
    closed = False
    breaks_on_close = False

    def __post_init__(self):
        self.worlds.append(self)

    def tasks(self, split):
        """One task."""
        return [Task("t/1")]

    def reset(self, task, seed):
        """Start at zero."""
        if task.id == "broken":
            raise EnvironmentFailure("no such room")
        self.count, self.seed = 0, seed
        return Observation("count is 0", state_key="0")

    def step(self, action):
        """Count."""
        if action == "crash":
            raise RuntimeError("the world fell over")
        if action != "up":
            return Observation("what?", valid=False, state_key=str(self.count))
        self.count += 1
        done = self.count == 3
        return Observation(
            f"count is {self.count}",
            reward=0.25 * self.count,
            terminated=done,
            success=done,
            state_key=str(self.count),
        )

    def close(self):
        """Once only."""
        assert not self.closed
        self.closed = True
        if self.breaks_on_close:
            raise RuntimeError("cannot close")


@dataclass
class Script:
    """An engine that answers from a function of the prompt, and remembers what it was asked."""

    answer: object
    name: str = "script"
    batches: list = field(default_factory=list)
    forgotten: list = field(default_factory=list)

    def generate(self, prompts, sampling):
        """Answer each, and remember the batch."""
        self.batches.append(prompts)
        return [self.answer(prompt) for prompt in prompts]

    def forget(self, conversation):
        """Remember it."""
        self.forgotten.append(conversation)

    def close(self):
        """Nothing is held."""


def up(prompt):
    return Action("Action: up")


def jobs(*names):
    return [Job(Task(name), seed=index) for index, name in enumerate(names)]


def finish_from(steps, *texts):
    """Send the texts to an episode under way; the trajectory it returns."""
    for text in texts[:-1]:
        steps.send(Action(text))
    with pytest.raises(StopIteration) as end:
        steps.send(Action(texts[-1]))
    return end.value.value


def finish(steps, *texts):
    """Start an episode and send the texts; the trajectory it returns."""
    next(steps)
    return finish_from(steps, *texts)
