"""Explored episodes by how they ended, for the rows of single episodes that RFT and its kin learn from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from perturn.config.row_maker_settings import RowInputs
from perturn.data.iteration_numbers import FATES
from perturn.data.origins import actions_of
from perturn.episodes.prompts import told
from perturn.types import Trajectory, WeightedTrajectory, failed, succeeded

SUCCESS, FAILURE = "What follows solves the task.", "What follows does not solve the task."
"""Texts after a task that say how its episode ends, unless a recipe sets others."""


@dataclass(frozen=True)
class Divided:
    """Trajectories by how they ended."""

    taught: Sequence[Trajectory]
    """Successes of an expert that SFT is taught."""
    experts: Sequence[Trajectory]
    """Successes of an expert on tasks that the policy has explored; they may be taught too."""
    successes: Sequence[Trajectory]
    """Successes of the policy."""
    failures: Sequence[Trajectory]
    """Other episodes of the policy."""
    counts: Counter[str]
    """How many are `taught` and of the `expert`, and each explored one under one of `FATES`."""


def divide(inputs: RowInputs, *, starts_over: bool) -> Divided:
    """Divide explored trajectories by how they ended, each sequence of actions on a task once; none without turns.

    Args:
        inputs: The expert's episodes and the explored ones; of the expert's, those on tasks that were not explored are
            left out.
        starts_over: Whether the rows hold the expert's episodes that SFT is taught; else those on explored tasks.
    """
    taught, experts = ([one for one in those if one.turns] for those in (inputs.taught, inputs.experts))
    known: dict[str, list[object]] = {}
    for one in taught if starts_over else experts:
        known.setdefault(one.task.id, []).append(actions_of(one))
    found: dict[str, list[Trajectory]] = {fate: [] for fate in FATES}
    for one in inputs.explored:
        found[_fate(one, known.setdefault(one.task.id, []))].append(one)
    tasks = {one.task.id for one in inputs.explored}
    shown = [one for one in experts if one.task.id in tasks]
    fates = {fate: len(those) for fate, those in found.items()}
    counts = Counter({"taught": len(taught), "expert": len(shown), **fates})
    return Divided(taught, shown, found["success"], found["failure"], counts)


def _fate(trajectory: Trajectory, known: list[object]) -> str:
    """Return the fate of a trajectory, whose actions are then known."""
    if failed(trajectory):
        return "failed"
    if not trajectory.turns:
        return "no_turns"
    actions = actions_of(trajectory)
    if actions in known:
        return "repeated"
    known.append(actions)
    return "success" if succeeded(trajectory) else "failure"


def weighted(trajectory: Trajectory, weight: float = 1.0) -> WeightedTrajectory:
    """Return a row with the same weight at each turn."""
    return WeightedTrajectory(trajectory, (weight,) * len(trajectory.turns))


@dataclass(frozen=True)
class ToldRows:
    """Settings of row makers whose prompts say how an episode ends."""

    success: str = SUCCESS
    """Text after the task of a success, and after each task when the policy is evaluated."""
    failure: str = FAILURE
    """Text after the task of a failure."""

    def __post_init__(self) -> None:
        """Reject texts that do not say how an episode ends."""
        texts = self.success, self.failure
        if not all(texts) or self.success == self.failure:
            raise ValueError(f"success and failure must be two texts, got {texts}.")


def told_successes(divided: Divided, success: str) -> list[WeightedTrajectory]:
    """Return the expert's episodes that SFT is taught and own successes, each told that it succeeds."""
    return [weighted(told(one, success)) for one in (*divided.taught, *divided.successes)]
