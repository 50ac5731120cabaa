"""Failed episodes, corrected by the environment's expert from a turn on: the first wrong one, or any."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from perturn.data.pairs import to_correct
from perturn.envs.abilities import lacks
from perturn.episodes.formats import FORMATS
from perturn.episodes.play import Job, episode
from perturn.episodes.replay import play_script, replay
from perturn.errors import ConfigError, DataError, EngineFailure
from perturn.faults import closing_world
from perturn.run.progress import track
from perturn.run.session import make_protocol, world_maker
from perturn.settings.outcomes import Outcomes
from perturn.settings.recipe import Recipe
from perturn.types import Action, Environment, EpisodeProtocol, Trajectory, succeeded


def check_corrector(recipe: Recipe, env: Environment) -> None:
    """Refuse to correct episodes in a world whose expert cannot take over.

    Raises:
        ConfigError: Saying which can.
    """
    pair, outcomes = recipe.pair, recipe.outcomes
    if outcomes is not None and outcomes.way.corrected:
        key, other = "outcomes.name", "take another way"
    elif pair is not None and pair.file is None and pair.within == "correction":
        key, other = "pair.within", "pair within expert, step, group, branch or tree"
    else:
        return
    if problem := lacks(env, "correct"):
        raise ConfigError(f"{key} needs an expert who takes over from another: {problem}, or {other}.")


def corrections(recipe: Recipe, episodes: Iterable[Trajectory]) -> list[Trajectory]:
    """Have the expert correct each episode that failed: its turns up to the first wrong one are kept, and his follow.

    Args:
        recipe: Of the run.
        episodes: Explored ones, with the remaining path of their turns.

    Returns:
        Trajectories in the order of `episodes`, each with its task, sample and seed, where the expert has a way; not
        all succeed. `taken_over` says which turns are the expert's.

    Raises:
        DataError: If a world answers otherwise than it did when an episode was recorded.
    """
    wanted = [(one, turns) for one in episodes if (turns := to_correct(one)) is not None]
    return _corrected(recipe, wanted)


def taken_over(recipe: Recipe, failures: Iterable[Trajectory], settings: Outcomes) -> list[Trajectory]:
    """Have the expert take over in each failure at some of its turns after the first.

    Args:
        recipe: Of the run, whose seed draws turns.
        failures: Explored episodes.
        settings: How many turns of each, at most, and which.

    Returns:
        Those that then succeed, in the order of `failures` and of turns.

    Raises:
        DataError: If a world answers otherwise than it did when an episode was recorded, or nothing says how sure the
            policy was of its actions where that is asked.
    """
    wanted = []
    for one in failures:
        times = min(settings.takeovers, len(one.turns) - 1)
        wanted += [(one, turns) for turns in sorted(_TURNS[settings.takeover](recipe, one, times))]
    return [one for one in _corrected(recipe, wanted) if succeeded(one)]


def _random_turns(recipe: Recipe, episode: Trajectory, times: int) -> list[int]:
    """Turns after the first, drawn by the run's seed and the episode's, which is another one in each iteration."""
    draw = random.Random(f"{recipe.seed} {episode.task.id} {episode.sample} {episode.seed}")
    return draw.sample(range(1, len(episode.turns)), times)


def _unsure_turns(recipe: Recipe, episode: Trajectory, times: int) -> list[int]:
    """Turns after the first whose action the policy was least sure of; of equal ones the first."""
    sure = {}
    for turn in range(1, len(episode.turns)):
        logprobs = episode.turns[turn].action.logprobs
        if logprobs is None:
            raise DataError(
                f"task {episode.task.id!r}, turn {turn}: outcomes.takeover=confidence reads the log-probabilities of "
                "sampled tokens, and none were recorded; explore with an engine that returns them, or take random."
            )
        sure[turn] = fmean(logprobs) if logprobs else 0.0
    return sorted(sure, key=lambda turn: sure[turn])[:times]


_TURNS = {"random": _random_turns, "confidence": _unsure_turns}
"""`outcomes.takeover` -> at which turns."""


def _corrected(recipe: Recipe, wanted: Sequence[tuple[Trajectory, int]]) -> list[Trajectory]:
    """Episodes that the expert finishes after so many of their turns, where he has a way."""
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
    steps = episode(env, Job(begun.task, begun.seed, begun.sample), protocol=protocol, policy="expert")
    return replace(play_script(steps, script, failure), taken_over=turns)
