"""Let a person play a task in the terminal, with the prompts that a policy would get."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from shlex import quote

from perturn.config.recipe import Recipe
from perturn.config.sections import Section, Tasks
from perturn.envs.load_environment import environment_maker
from perturn.episodes.formats import FORMATS
from perturn.episodes.play_many import play
from perturn.episodes.seeds import make_jobs
from perturn.errors import ConfigError, EngineFailure, listed
from perturn.faults import closing_world
from perturn.run.protocol_rules import make_protocol
from perturn.run.task_lists import choose_tasks
from perturn.types import Action, EpisodeProtocol, Message, Prompt, Sampling, Task, Trajectory


class Person:
    """An engine whose answers are typed by a person. Each message is shown once."""

    name = "person"

    def __init__(
        self, protocol: EpisodeProtocol, ask: Callable[[], str], show: Callable[[Message], None]
    ) -> None:
        """Create the engine.

        Args:
            protocol: Rules of the episode. Typed actions are put into the protocol's format.
            ask: Function that asks for one action.
            show: Function that shows a message.
        """
        self._format, self._ask, self._show = FORMATS[protocol.format], ask, show

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Action | EngineFailure]:
        """Return the person's answers."""
        return [self._answer(prompt) for prompt in prompts]

    def _answer(self, prompt: Prompt) -> Action:
        for message in (*(() if prompt.turns else prompt.messages), *prompt.observation):
            self._show(message)
        return Action(self._written(self._ask().strip()))

    def _written(self, typed: str) -> str:
        """Return the typed action in the protocol's format. A call may be typed as JSON without its tags."""
        if self._format.native:
            return f"<tool_call>\n{typed}\n</tool_call>" if typed.startswith("{") else typed
        return typed if self._format.parse(typed) else self._format.write("", typed)

    def forget(self, conversation: str) -> None:
        """Do nothing, since no conversation is kept."""

    def close(self) -> None:
        """Do nothing, since the engine holds no resources."""


def play_by_hand(
    recipe: Recipe, task: str | None, ask: Callable[[], str], show: Callable[[Message], None]
) -> Trajectory | None:
    """Let a person play one task.

    Args:
        recipe: Recipe from `scoring_recipe`.
        task: Id of the task. None: the first task of the recipe's task list.
        ask: Function that asks for one action, and raises EOFError when the person leaves.
        show: Function that shows a message.

    Returns:
        The episode; None if the person left.

    Raises:
        PerturnError: If there is no such task, or the environment cannot start.
    """
    assert recipe.environment is not None
    assert recipe.evaluate is not None
    make, protocol = environment_maker(recipe.environment), make_protocol(recipe.protocol)
    with closing_world(make()) as env:
        tasks = choose_tasks(env, recipe.evaluate.tasks if task is None else _all(recipe))
        posed = _find(tasks, task, recipe.environment)
    jobs = make_jobs([posed], recipe.seed)
    person = Person(protocol, ask, show)
    try:
        return next(play(jobs, person, make, protocol=protocol, sampling=Sampling(), concurrency=1))
    except EOFError:
        return None


def _all(recipe: Recipe) -> Tasks:
    """Return the whole split of a recipe's task list."""
    assert recipe.evaluate is not None
    return Tasks(recipe.evaluate.tasks.split)


def _find(tasks: Sequence[Task], wanted: str | None, environment: Section) -> Task:
    """Return the task with the wanted id; the first task if `wanted` is None.

    Raises:
        ConfigError: If there is no such task; names the three nearest ids, and a command that prints all ids.
    """
    found = {task.id: task for task in tasks}
    if wanted is None:
        return tasks[0]
    if wanted not in found:
        split = tasks[0].split
        near = listed([repr(each) for each in get_close_matches(wanted, found, n=3, cutoff=0.0)])
        code = (
            "from perturn.envs.load_environment import make_environment as make; "
            f"print(*[task.id for task in make({dict(environment)!r}).tasks({split!r})], sep=chr(10))"
        )
        raise ConfigError(
            f"no task {wanted!r} in split {split!r}. The nearest of {len(found)} ids: {near}. To list all: "
            f"python -c {quote(code)}"
        )
    return found[wanted]
