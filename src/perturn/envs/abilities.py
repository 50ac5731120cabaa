"""Abilities: optional methods of an environment besides posing tasks. All code asks for them here.

`ABILITIES` has the signature of each, by which one generic call forwards it to a world in another process or on another
node. An environment has an ability if its class has the method. For the type checker, the Protocols below say more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from perturn.envs import ENVIRONMENTS
from perturn.errors import ConfigError
from perturn.table import Table
from perturn.traits import Ability, traits_of
from perturn.types import Environment, EpisodeProtocol, Task, Trajectory

if TYPE_CHECKING:
    from perturn.episodes.episode import Job

ABILITIES: Table[Ability] = Table(
    "perturn.abilities",
    {
        "expert": Ability(("task",), "actions"),
        "demonstration": Ability(("task",), "turns"),
        "clumsy": Ability(("task", "plain"), "actions"),
        "aimless": Ability(("task", "plain", "plain"), "actions"),
        "remaining": Ability(("task", "actions", "plain"), "plain"),
        "correct": Ability(("task", "actions"), "turns", or_none=True),
        "show": Ability(("plain", "plain", "plain"), "plain", crosses=False),
        "read_experts": Ability(("plain", "plain", "plain"), "plain", crosses=False),
    },
)
"""Signature of each optional method by its name. An installed package may add abilities of other environments."""

EXPERTS = frozenset({"expert", "show"})
"""Abilities of which an environment whose expert plays has one: it says actions, or shows whole episodes."""


def signatures(environment: Any) -> dict[str, Ability]:
    """Return the signature of each ability that an environment, or its class, has: of the table, and of its own."""
    known = {**ABILITIES, **traits_of(environment).abilities}
    return {name: each for name, each in known.items() if callable(getattr(environment, name, None))}


def abilities_of(environment: Environment) -> frozenset[str]:
    """Return the names of the abilities that an environment has."""
    return frozenset(signatures(environment))


def ability(environment: Environment, name: str) -> Callable[..., Any]:
    """Return an optional method of an environment.

    Raises:
        ConfigError: If the environment has no such ability.
    """
    if problem := lacks(environment, name):
        raise ConfigError(f"{problem}.")
    return cast(Callable[..., Any], getattr(environment, name))


def check_abilities(environment: Environment, *names: str, reader: str, otherwise: str) -> None:
    """Reject an environment that lacks optional methods.

    Args:
        environment: The world.
        names: Its methods.
        reader: The part that calls them, and its purpose.
        otherwise: What to do in another environment than those that have them.

    Raises:
        ConfigError: Such as `base needs an expert: environment x has no method expert() ..., or leave base out.`
    """
    if problem := lacks(environment, *names):
        raise ConfigError(f"{reader}: {problem}, or {otherwise}.")


def lacks(environment: Environment, *names: str) -> str:
    """Say which of some abilities an environment lacks, and which environments have them all; empty if it has all."""
    missing = [name for name in names if name not in abilities_of(environment)]
    if not missing:
        return ""
    others = [name for name, entry in ENVIRONMENTS.items() if set(names) <= signatures(entry).keys()]
    take = f"; take {' or '.join(others)}" if others else ""
    methods = " and ".join(f"{name}()" for name in missing)
    return f"environment {environment.name} has no method {methods} (see perturn.envs.abilities){take}"


class Expert(Protocol):
    """An environment that can also show how its tasks are solved."""

    def expert(self, task: Task) -> Sequence[str]:
        """Return actions that solve the task, to be verified by playing them."""
        ...


class Demonstrator(Expert, Protocol):
    """An expert that also gives its thoughts; optional, since formats without thoughts leave them out."""

    def demonstration(self, task: Task) -> Sequence[tuple[str, str]]:
        """Return (thought, action) a turn; the actions equal the actions of `expert`."""
        ...


class Teacher(Expert, Protocol):
    """An expert that also shows mistakes and all texts of the environment, to train a policy from scratch; optional."""

    def clumsy(self, task: Task, seed: int) -> Sequence[str]:
        """Return actions of an expert that errs and recovers, different ones for each seed."""
        ...

    def aimless(self, task: Task, seed: int, turns: int) -> Sequence[str]:
        """Return at most a number of actions of random play: commands that can be done, without a goal."""
        ...


class Pathfinder(Protocol):
    """An environment that also knows how far an episode is from its end; optional."""

    def remaining(self, task: Task, actions: Sequence[str], sense: str) -> Sequence[int | None]:
        """Return turns that the way to a success still takes, at the start of an episode and after each of its actions.

        The world replays the actions by itself, and leaves a running episode alone.

        Args:
            task: The task.
            actions: What the world was sent, in order.
            sense: `shortest`: with full knowledge of the world. `searching`: by an expert that takes over there, and
                knows only the observations of the episode.

        Returns: Number of turns [actions + 1]; None if the success can no longer be reached.
        """
        ...


class Corrector(Expert, Protocol):
    """An expert that also finishes another policy's episode, to show where it went wrong; optional."""

    def correct(self, task: Task, actions: Sequence[str]) -> Sequence[tuple[str, str]] | None:
        """Return a (thought, action) per turn that solves the task after another's actions, to be verified by playing.

        The expert knows the observations of the episode. The world replays the actions by itself, and leaves a running
        episode alone. None if the success can no longer be reached, or the expert finds no way.
        """
        ...


class Shower(Protocol):
    """An environment that plays its episodes itself, also the expert's episodes; optional."""

    def show(self, job: Job, protocol: EpisodeProtocol, folder: Path | None) -> Trajectory:
        """Return the expert's episode of a task; an episode that goes wrong is marked FAILED.

        Args:
            job: The episode.
            protocol: Its rules.
            folder: Folder of paid answers, so that no answer is bought twice; None: in memory.
        """
        ...


class ExpertReader(Protocol):
    """An environment that also reads episodes which others recorded, in the form that they published."""

    def read_experts(
        self, file: Path, tasks: Sequence[Task], write: Callable[[str, str], str]
    ) -> Iterable[Trajectory]:
        """Return episodes that someone else recorded, as trajectories of the tasks they answer; others are left out.

        Args:
            file: What was published.
            tasks: Tasks to find the episodes' among.
            write: (thought, action) -> the text of a turn.
        """
        ...
