"""Ask the environment about recorded episodes: the distance to a success around each turn, and corrections."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from perturn.config.recipe import REWARD_MODEL, Recipe
from perturn.config.row_maker_settings import sense_in
from perturn.config.stages import rows_name
from perturn.display.progress_bars import track
from perturn.envs.abilities import check_abilities, in_form
from perturn.episodes.formats import FORMATS
from perturn.episodes.play_many import Job, episode
from perturn.episodes.replay import play_script, replay
from perturn.episodes.world_threads import play_again
from perturn.errors import EngineFailure, EnvironmentFailure, RunError, WorldLost, check_fit, required
from perturn.faults import closing_world
from perturn.io.plain_data import named_error, visible
from perturn.needs import Distance, request_of
from perturn.run.protocol_rules import make_protocol
from perturn.run.session import world_maker
from perturn.table import locate
from perturn.types import Action, Environment, EpisodeProtocol, PreferencePair, Remaining, Trajectory, failed

_logger = logging.getLogger(__name__)


def sense_of(recipe: Recipe) -> str | None:
    """Return the measure of the distance to a success that rows or credits read; None if they read none."""
    rows = sense_in(recipe.rows.needs) if recipe.rows else None
    credits = _read_by_credits(recipe)
    explorer = sense_in(recipe.explore.needs) if recipe.explore else None
    senses = {each for each in (rows, explorer, *credits) if each is not None}
    readers = "rows.distance, explore.distance and credit.distance"
    check_fit(
        len(senses) < 2, readers, "be equal, since a run measures the remaining path once", sorted(senses)
    )
    return rows or next(iter(credits), None)


def _read_by_credits(recipe: Recipe) -> set[str]:
    """Return the measures of the distance to a success that the credits of a recipe read."""
    found: list[Distance | None] = []
    for name in (REWARD_MODEL, "align"):
        settings = recipe.training(name)
        if settings is not None:  # otherwise nothing of training is imported
            choose = locate("perturn.training.credit_choice:loss_and_credit")
            _, credit = choose(settings.loss, recipe.credit if name == "align" else None)
            found.append(request_of(credit.needs, Distance))
    return {each.sense for each in found if each is not None}


def check_pathfinder(recipe: Recipe, env: Environment | None) -> None:
    """Reject a recipe that reads the distance to a success if the environment cannot measure it."""
    scored = recipe.evaluate and recipe.evaluate.distance
    if not (sense_of(recipe) or (recipe.explore and sense_in(recipe.explore.needs)) or scored):
        return
    reader = "the recipe reads how far an episode is from its end"
    otherwise = "take rows, credit and explorer that do not read it, and leave evaluate.distance out"
    world = required(env, "environment", f"{reader}, which the environment says", f"set it, or {otherwise}")
    check_abilities(world, "remaining", reader=reader, otherwise=otherwise)


def measured_pairs(recipe: Recipe, pairs: Sequence[PreferencePair]) -> list[PreferencePair]:
    """Return the pairs, with the distance to a success of each turn if the recipe reads it; see `measured`."""
    sides = measured(recipe, [side for pair in pairs for side in (pair.chosen, pair.rejected)])
    return [PreferencePair(*both) for both in zip(sides[::2], sides[1::2], strict=True)]


def measured(recipe: Recipe, episodes: Iterable[Trajectory], sense: str | None = None) -> list[Trajectory]:
    """Return the episodes, with the distance to a success of each turn if the recipe reads it.

    FAILED episodes are returned unchanged, since the environment may fail on their tasks again.

    Args:
        recipe: Recipe of the run.
        episodes: Episodes, in any order.
        sense: Measure of the distance. None: the measure that the recipe's rows or credits read.

    Raises:
        DataError: If the environment's observations differ from the recorded ones.
        EnvironmentFailure: If the environment fails in the replay, or returns a wrong number of distances.
    """
    sense, episodes = sense or sense_of(recipe), list(episodes)
    if sense is None:
        return episodes
    protocol = make_protocol(recipe.protocol)
    found: dict[int, Trajectory] = {}
    with closing_world(world_maker(recipe)()) as env:
        for one in track(episodes, "remaining path", "episodes"):
            if id(one) not in found:  # an expert episode may be in several pairs
                found[id(one)] = (
                    one if failed(one) else _measured(env, one, protocol, sense, recipe.worlds.retries)
                )
    return [found[id(one)] for one in episodes]


def _measured(
    env: Any, recorded: Trajectory, protocol: EpisodeProtocol, sense: str, retries: int
) -> Trajectory:
    """Return an episode with the distance to a success around each turn."""
    sent = replay(env, recorded, protocol, retries)
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


def check_corrector(recipe: Recipe, env: Environment) -> None:
    """Reject a row maker that corrects episodes, if the environment's expert cannot take over an episode."""
    if recipe.rows is not None and recipe.rows.traits.corrects:
        reader = f"rows.name={rows_name(recipe)} needs an expert who takes over from another"
        check_abilities(env, "correct", reader=reader, otherwise="take another row maker")


def corrected(recipe: Recipe, wanted: Sequence[tuple[Trajectory, int]]) -> list[Trajectory]:
    """Let the expert finish episodes after a given number of their turns.

    Args:
        recipe: Recipe of the run.
        wanted: Explored episodes, each with the number of turns to keep.

    Returns:
        Corrected episodes in the same order, with task, sample and seed of the explored episode. Episodes without a
        solution of the expert are left out, and episodes for which the expert or the environment raises. Not all
        corrected episodes succeed. The turns after the first `taken_over` turns are the expert's.

    Raises:
        DataError: If the environment's observations differ from the recorded ones.
    """
    protocol = make_protocol(recipe.protocol)
    with closing_world(world_maker(recipe)()) as env:
        found = [
            correct(env, one, turns, protocol, recipe.worlds.retries)
            for one, turns in track(wanted, "corrections", "episodes")
        ]
    return [one for one in found if one is not None]


def correct(
    env: Any, begun: Trajectory, turns: int, protocol: EpisodeProtocol, retries: int = 1
) -> Trajectory | None:
    """Replay the first turns of an episode, then play the expert's actions; None if the expert has none.

    The result is also None if the expert or the environment raises.

    Args:
        env: An environment that is also a `Corrector`.
        begun: The episode.
        turns: Number of turns to keep.
        protocol: The protocol of the episode.
        retries: Number of times to replay the first turns again, to ask the expert again, and to play the episode
            again, if the environment died or hung.
    """
    kept = replace(begun, turns=begun.turns[:turns])
    try:
        commands = [command for command in replay(env, kept, protocol, retries) if command is not None]
    except EnvironmentFailure as error:
        _logger.warning("%s This episode is not corrected.", visible(str(error)))
        return None
    onward = _onward(env, begun, commands, FORMATS[protocol.format].write, retries)
    if onward is None:
        return None
    failure = EngineFailure(f"the task was not finished after the expert's {len(onward)} actions.")
    job, said = Job(begun.task, begun.seed, begun.sample), [turn.user_said for turn in kept.turns]

    def played() -> Trajectory:
        steps = episode(env, job, protocol=protocol, policy="expert", user_said=said)
        return play_script(steps, [*(turn.action for turn in kept.turns), *onward], failure)

    return replace(play_again(played, retries), taken_over=turns)


def _onward(
    env: Any, begun: Trajectory, commands: list[str], write: Callable[[str, str], str], retries: int
) -> list[Action] | None:
    """Return the expert's actions after given commands; None if the expert has none or raises. See `correct`."""
    try:
        onward = env.correct(begun.task, commands)
        turns = onward if onward is None else in_form("turns", onward, "correct must return")
    except RunError:
        raise
    except Exception as error:  # noqa: BLE001  environments are code of others
        if isinstance(error, WorldLost) and retries:
            return _onward(env, begun, commands, write, retries - 1)
        warning = "task %.80r, sample %d: the expert cannot correct the episode, which is left out: %s"
        _logger.warning(warning, begun.task.id, begun.sample, named_error(error))
        return None
    return None if turns is None else [Action(write(thought, action)) for thought, action in turns]
