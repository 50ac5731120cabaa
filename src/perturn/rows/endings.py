"""Division of explored episodes into successes and failures, for row makers of single episodes such as RFT."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from perturn.config.row_maker_settings import FATES, RowInputs
from perturn.data.origins import actions_of, digest, exchanges_of
from perturn.episodes.prompts import suffixed
from perturn.types import Trajectory, WeightedTrajectory, failed, succeeded

SUCCESS, FAILURE = "What follows solves the task.", "What follows does not solve the task."
"""Default texts after a task that say whether its episode succeeds."""


@dataclass(frozen=True)
class Divided:
    """Trajectories divided into successes and failures, and by the policy that acted."""

    sft_episodes: Sequence[Trajectory]
    """Successes of an expert on which SFT trains."""
    experts: Sequence[Trajectory]
    """Successes of an expert on explored tasks that fit the length limit; SFT may train on some of them too."""
    successes: Sequence[Trajectory]
    """Successes of the policy."""
    failures: Sequence[Trajectory]
    """Unsuccessful episodes of the policy, without episodes that FAILED."""
    counts: Counter[str]
    """Number of trajectories in `sft_episodes` (key `taught`) and in `experts` (key `expert`), and number of explored
    trajectories for each outcome of `FATES`. `expert_too_long`: the expert's trajectories that do not fit."""


def divide(inputs: RowInputs, *, starts_over: bool, suffixes: tuple[str, str] = ("", "")) -> Divided:
    """Divide explored trajectories into successes and failures.

    Trajectories without turns are left out, and trajectories whose first turn does not fit the length limit. Repeated
    trajectories are left out too: they have the observations and the actions of an earlier trajectory of their task, or
    the actions of an expert's trajectory in the rows. The texts of an expert's observations may have another source.

    Args:
        inputs: Inputs of the row maker. The expert's episodes on unexplored tasks are not in `Divided.experts`.
        starts_over: Expert's episodes that the rows contain. True: the episodes on which SFT trains. False: the
            episodes on explored tasks.
        suffixes: Texts that rows of successes and of failures have after the task, for the length limit.
    """
    trained, experts = (
        [one for one in those if one.turns] for those in (inputs.sft_episodes, inputs.experts)
    )
    known = {(one.task.id, digest(actions_of(one))) for one in (trained if starts_over else experts)}
    found: dict[str, list[Trajectory]] = {fate: [] for fate in FATES}
    played = [one for one in inputs.explored if not failed(one)]
    too_long = _too_long(played, inputs, suffixes)
    for one in inputs.explored:
        found[_fate(one, too_long, known)].append(one)
    tasks = {one.task.id for one in inputs.explored}
    shown = [one for one in experts if one.task.id in tasks]
    unfitting = _too_long(shown, inputs, suffixes)
    fitting = [one for one in shown if one.key not in unfitting]
    fates = {fate: len(those) for fate, those in found.items()}
    experts_too = {"expert": len(fitting), "expert_too_long": len(shown) - len(fitting)}
    counts = Counter({"taught": len(trained), **experts_too, **fates})
    return Divided(trained, fitting, found["success"], found["failure"], counts)


def _too_long(
    episodes: Sequence[Trajectory], inputs: RowInputs, suffixes: tuple[str, str]
) -> set[tuple[str, int]]:
    """Return the keys of the episodes whose first turn, with its suffix, does not fit the length limit."""
    if any(suffixes):
        episodes = [suffixed(one, suffixes[not succeeded(one)]) for one in episodes if one.turns]
    return inputs.limit.too_long(episodes)


def _fate(
    trajectory: Trajectory, too_long: Collection[tuple[str, int]], known: set[tuple[str, bytes]]
) -> str:
    """Return the outcome of a trajectory, one of `FATES`, and add its turns to `known`.

    Args:
        trajectory: An explored trajectory.
        too_long: Keys of the trajectories whose first turn does not fit.
        known: Tasks, with digests of the turns of earlier trajectories and of the actions of the expert's trajectories.
    """
    if failed(trajectory):
        return "failed"
    if not trajectory.turns:
        return "no_turns"
    if trajectory.key in too_long:
        return "too_long"
    exchanges = exchanges_of(trajectory)
    turns, actions = (
        (trajectory.task.id, digest(each)) for each in (exchanges, [action for _, action in exchanges])
    )
    if turns in known or actions in known:
        return "repeated"
    known.add(turns)
    return "success" if succeeded(trajectory) else "failure"


def weighted(trajectory: Trajectory, weight: float = 1.0) -> WeightedTrajectory:
    """Return a row with the same weight at each turn."""
    return WeightedTrajectory(trajectory, (weight,) * len(trajectory.turns))


@dataclass(frozen=True)
class SuffixRows:
    """Settings of row makers whose prompts say whether an episode succeeds."""

    success: str = SUCCESS
    """Text added to the task of a successful episode. In evaluations, it is added to every task."""
    failure: str = FAILURE
    """Text added to the task of an unsuccessful episode."""

    def __post_init__(self) -> None:
        """Reject texts that are empty or equal."""
        texts = self.success, self.failure
        if not all(texts) or self.success == self.failure:
            raise ValueError(f"success and failure must be two texts, got {texts}.")


def suffixed_successes(divided: Divided, success: str) -> list[WeightedTrajectory]:
    """Return rows of the expert's episodes in SFT and of the policy's successes, with the text `success` added."""
    return [weighted(suffixed(one, success)) for one in (*divided.sft_episodes, *divided.successes)]
