"""Failed episodes, corrected by the environment's expert from a turn on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from perturn.config.recipe import Recipe
from perturn.config.stages import rows_name
from perturn.display.progress_bars import track
from perturn.envs.abilities import lacks
from perturn.episodes.formats import FORMATS
from perturn.episodes.play_many import Job, episode
from perturn.episodes.replay import play_script, replay
from perturn.errors import ConfigError, EngineFailure
from perturn.faults import closing_world
from perturn.run.session import make_protocol, world_maker
from perturn.types import Action, Environment, EpisodeProtocol, Trajectory


def check_corrector(recipe: Recipe, env: Environment) -> None:
    """Refuse to correct episodes in a world whose expert cannot take over.

    Raises:
        ConfigError: Saying which can.
    """
    if recipe.rows is not None and recipe.rows.traits.corrects and (problem := lacks(env, "correct")):
        raise ConfigError(
            f"rows.name={rows_name(recipe)} needs an expert who takes over from another: {problem}, or take another "
            "row maker."
        )


def corrected(recipe: Recipe, wanted: Sequence[tuple[Trajectory, int]]) -> list[Trajectory]:
    """Have the expert finish episodes after so many of their turns.

    Args:
        recipe: Of the run.
        wanted: Explored episodes, and how many of their turns are kept.

    Returns:
        Trajectories in that order, each with its task, sample and seed, where the expert has a way; not all succeed.
        `taken_over` says which turns are the expert's.

    Raises:
        DataError: If a world answers otherwise than it did when an episode was recorded.
    """
    protocol = make_protocol(recipe.protocol)
    with closing_world(world_maker(recipe)()) as env:
        found = [
            correct(env, one, turns, protocol) for one, turns in track(wanted, "corrections", "episodes")
        ]
    return [one for one in found if one is not None]


def correct(env: Any, begun: Trajectory, turns: int, protocol: EpisodeProtocol) -> Trajectory | None:
    """Play the first turns of an episode again, and the expert's after them; None where he has no way.

    Args:
        env: A world that is also a `Corrector`.
        begun: The episode.
        turns: How many of its turns are kept.
        protocol: The rules that it was played by.
    """
    kept = replace(begun, turns=begun.turns[:turns])
    commands = [command for command in replay(env, kept, protocol) if command is not None]
    onward = env.correct(begun.task, commands)
    if onward is None:
        return None
    write = FORMATS[protocol.format].write
    script = [turn.action for turn in kept.turns]
    script += [Action(write(thought, action)) for thought, action in onward]
    failure = EngineFailure(f"the task was not finished after the expert's {len(onward)} actions.")
    job, said = Job(begun.task, begun.seed, begun.sample), [turn.user_said for turn in kept.turns]
    steps = episode(env, job, protocol=protocol, policy="expert", user_said=said)
    return replace(play_script(steps, script, failure), taken_over=turns)
