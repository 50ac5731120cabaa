"""Let a person play a task in the terminal, with the prompts that a policy would get."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from perturn.config.recipe import Recipe
from perturn.config.sections import Tasks
from perturn.envs.load_environment import environment_maker
from perturn.episodes.formats import FORMATS
from perturn.episodes.play_many import play
from perturn.episodes.seeds import make_jobs
from perturn.errors import EngineFailure, check_known
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
        posed = _find(choose_tasks(env, recipe.evaluate.tasks if task is None else _all(recipe)), task)
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


def _find(tasks: Sequence[Task], wanted: str | None) -> Task:
    """Return the task with the wanted id; the first task if `wanted` is None."""
    found = {task.id: task for task in tasks}
    if wanted is None:
        return tasks[0]
    check_known(wanted, found, f"no task {wanted!r} in split {tasks[0].split!r}")
    return found[wanted]
