"""How much of the way to a success is left around each turn of recorded episodes, measured by playing them again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from perturn.config.recipe import Recipe
from perturn.config.row_maker_settings import sense_in
from perturn.display.progress_bars import track
from perturn.envs.abilities import lacks
from perturn.episodes.replay import replay
from perturn.errors import ConfigError, EnvironmentFailure
from perturn.faults import closing_world
from perturn.run.session import make_protocol, world_maker
from perturn.table import locate
from perturn.types import Environment, EpisodeProtocol, PreferencePair, Remaining, Trajectory


def sense_of(recipe: Recipe) -> str | None:
    """The sense in which rows or credits read the remaining path of each turn; None: they do not."""
    rows = sense_in(recipe.rows.needs) if recipe.rows else None
    credits = locate("perturn.run.stages.training_checks:distances_read")(recipe)
    explorer = sense_in(recipe.explore.needs) if recipe.explore else None
    if len({rows, explorer, *credits} - {None}) > 1:
        raise ConfigError(
            "the remaining path is read both as shortest and as searching, and a run measures it once; set "
            "rows.distance, explore.distance and credit.distance alike."
        )
    return rows or next(iter(credits), None)


def check_pathfinder(recipe: Recipe, env: Environment | None) -> None:
    """Refuse to measure in a world that cannot say how far an episode is from its end."""
    read = sense_of(recipe) or (recipe.explore and sense_in(recipe.explore.needs))
    problem = lacks(env, "remaining") if env else "it has no environment, which would say"
    if read and problem:
        raise ConfigError(
            f"the recipe reads how far an episode is from its end: {problem}, or take rows, credit and explorer that "
            "do not read it."
        )


def measured_pairs(
    recipe: Recipe, pairs: Sequence[PreferencePair], sense: str | None = None
) -> list[PreferencePair]:
    """The pairs, with the remaining path of their turns if the recipe asks for it; see `measured`."""
    sides = measured(recipe, [side for pair in pairs for side in (pair.chosen, pair.rejected)], sense)
    return [PreferencePair(*both) for both in zip(sides[::2], sides[1::2], strict=True)]


def measured(recipe: Recipe, episodes: Iterable[Trajectory], sense: str | None = None) -> list[Trajectory]:
    """The episodes, with the remaining path of their turns if the recipe asks for it.

    Args:
        recipe: Of the run.
        episodes: In any order.
        sense: In which sense; None: as the rows ask for it.

    Raises:
        DataError: If a world answers otherwise than it did when an episode was recorded.
        EnvironmentFailure: If the world's answer is no path.
    """
    sense, episodes = sense or sense_of(recipe), list(episodes)
    if sense is None:
        return episodes
    protocol = make_protocol(recipe.protocol)
    found: dict[int, Trajectory] = {}
    with closing_world(world_maker(recipe)()) as env:
        for one in track(episodes, "remaining path", "episodes"):
            if id(one) not in found:  # an expert's episode may be in several pairs
                found[id(one)] = _measured(env, one, protocol, sense)
    return [found[id(one)] for one in episodes]


def _measured(env: Any, recorded: Trajectory, protocol: EpisodeProtocol, sense: str) -> Trajectory:
    """One episode with the remaining path of its turns."""
    sent = replay(env, recorded, protocol)
    commands = [command for command in sent if command is not None]
    left = list(env.remaining(recorded.task, commands, sense))
    if len(left) != len(commands) + 1:
        raise EnvironmentFailure(
            f"remaining of task {recorded.task.id!r:.80}: expected {len(commands) + 1} numbers for {len(commands)} "
            f"actions, got {len(left)}."
        )
    after = iter(left)
    path = [next(after)]
    for command in sent:
        path.append(path[-1] if command is None else next(after))
    turns = zip(recorded.turns, pairwise(path), strict=True)
    return replace(recorded, turns=tuple(replace(turn, remaining=Remaining(*both)) for turn, both in turns))
