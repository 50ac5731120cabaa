"""Which of several episodes of a task is scored: Best-of-N."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from math import inf, isfinite
from statistics import fmean
from typing import Any

from perturn.data.run_folder import Run
from perturn.envs.load import load_object
from perturn.errors import ConfigError, EngineFailure
from perturn.policy.templates import chat_template
from perturn.run.choice import check_choice
from perturn.run.maker import Maker, maker_of
from perturn.run.session import policy_path
from perturn.run.valued import Values
from perturn.settings.recipe import Recipe
from perturn.settings.stages import IMPLICIT, VALUE
from perturn.table import locate
from perturn.types import Trajectory, failed, score

_logger = logging.getLogger(__name__)

Scores = Sequence[float]
"""One an episode; the highest of a task is chosen."""


def check_best_of(recipe: Recipe, maker: Maker | None = None) -> None:
    """Refuse to choose among equal episodes, or by what is not there.

    Args:
        recipe: Of the run that scores.
        maker: The run that will have made its policy; None: look.

    Raises:
        ConfigError: Saying what to set.
    """
    check_choice(recipe, "best_of", (*_BY, VALUE), read_logprobs=("likelihood",), maker=maker)


def best_of(
    run: Run, policy: str, drawn: Sequence[Trajectory], values: Values | None = None
) -> list[Trajectory]:
    """The episode of each task with the highest score, in the order of tasks; of equal ones the first sample.

    A FAILED episode is chosen where all of its task are.

    Args:
        run: Whose recipe says by what.
        policy: That played.
        drawn: All episodes.
        values: The policy's, where the choice is by them; None: learned here.

    Raises:
        PerturnError: If the engine gave no log-probabilities that are asked for, or a function of the user's fails.
    """
    recipe = run.recipe
    assert recipe.evaluate is not None
    assert recipe.evaluate.best_of is not None
    by = recipe.evaluate.best_of.by
    of_task: dict[str, list[tuple[tuple[bool, float, int], Trajectory]]] = defaultdict(list)
    whole = [one for one in drawn if not failed(one)]
    scores: Scores = []
    if whole:
        scores = (
            _by_value(values or Values(run, policy), whole)
            if by == VALUE
            else _scores(run, policy, by, whole)
        )
    numbers = dict(zip((one.key for one in whole), scores, strict=True))
    for one in drawn:
        rank = one.key in numbers, numbers.get(one.key, -inf), -one.sample
        of_task[one.task.id].append((rank, one))
    return [max(each, key=lambda ranked: ranked[0])[1] for each in of_task.values()]


def _scores(run: Run, policy: str, by: str, episodes: Sequence[Trajectory]) -> Scores:
    """One an episode.

    Raises:
        PerturnError: As `best_of` has it.
    """
    if ":" not in by:
        return _BY[by](run, policy, episodes)
    try:
        found = [float(each) for each in load_object(by)(episodes)]
    except Exception as error:  # a function of others
        raise ConfigError(f"evaluate.best_of.by: {by!r} failed: {type(error).__name__}: {error}") from error
    if len(found) != len(episodes) or not all(map(isfinite, found)):
        raise ConfigError(
            f"evaluate.best_of.by: {by!r} must give one finite number for each of the {len(episodes)} episodes, got "
            f"{len(found)}: {found!r:.80}."
        )
    return found


def _outcome(run: Run, policy: str, episodes: Sequence[Trajectory]) -> Scores:
    return [score(one) for one in episodes]


def _likelihood(run: Run, policy: str, episodes: Sequence[Trajectory]) -> Scores:
    """That of an episode of which nothing is known is the lowest."""
    known = [[each for turn in one.turns for each in turn.action.logprobs or ()] for one in episodes]
    if any(one.turns for one in episodes) and not any(known):
        raise EngineFailure(
            "evaluate.best_of.by=likelihood reads the log-probabilities of what was sampled, and the engine gives "
            "none; take by=outcome, or an engine that does, such as local."
        )
    return [fmean(each) if each else -inf for each in known]


def _implicit(run: Run, policy: str, episodes: Sequence[Trajectory]) -> Scores:
    maker = maker_of(run, policy, IMPLICIT)
    if maker.start is None:
        _logger.warning(
            "policy %s was trained from no other; the first sample of each task is scored.", policy
        )
        return [0.0] * len(episodes)
    template = chat_template(run.recipe.model)
    open_reader = locate("perturn.quantities.readers:open_reader")
    reference_of = locate("perturn.quantities.reference_logprobs:reference_of")
    ours, theirs = (
        reference_of(episodes, open_reader(path, None, template))
        for path in (policy_path(run, policy), policy_path(maker, maker.start))
    )
    return [_sum(own) - _sum(its) for own, its in zip(ours, theirs, strict=True)]


def _by_value(values: Values, episodes: Sequence[Trajectory]) -> Scores:
    found: list[float] = values.learned.of_episodes(episodes)
    return found


def _sum(turns: Sequence[Any]) -> float:
    return sum(float(turn.double().sum()) for turn in turns)


_BY: Mapping[str, Callable[[Run, str, Sequence[Trajectory]], Scores]] = {
    "outcome": _outcome,
    "likelihood": _likelihood,
    IMPLICIT: _implicit,
}
