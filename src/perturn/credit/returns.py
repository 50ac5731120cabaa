"""Rewards that a credit counts, and the penalty of an invalid action."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from perturn.bounds import NOT_NEGATIVE, OneOf, bounded
from perturn.errors import DataError
from perturn.types import Status, Trajectory, unfinished

Numbers = list[list[float]]
"""One number for each turn `[trajectories][turns]`."""
_ROUNDING = 1e-6
"""Largest difference between a total reward and the sum of its parts, as a share of 1 plus the absolute parts."""


def recorded_rewards(trajectory: Trajectory) -> list[float]:
    """Return the recorded reward of each turn, in units of reward [turns].

    If no turn has a reward, the last turn gets the total reward. In a FAILED trajectory all rewards are 0.

    Raises:
        DataError: If turns have rewards that do not sum to the total reward.
    """
    rewards = [turn.reward for turn in trajectory.turns]
    if trajectory.status is Status.FAILED:
        return [0.0] * len(rewards)
    total = trajectory.total_reward
    if not any(rewards):
        return _at_the_end(total, len(rewards))
    if abs(sum(rewards) - total) > _ROUNDING * (1 + sum(map(abs, rewards))):
        default = "" if total else " (0 is its default)"
        raise DataError(
            f"task {trajectory.task.id!r:.80}, sample {trajectory.sample}: the rewards of the turns sum to "
            f"{sum(rewards):g}, but total_reward is {total:g}{default}. Add the difference to the reward of the last "
            "turn, or set total_reward to the sum."
        )
    return rewards


def solved(trajectory: Trajectory) -> bool:
    """Return whether the trajectory solved its task; a FAILED trajectory did not."""
    return trajectory.success and trajectory.status is not Status.FAILED


@dataclass(frozen=True)
@bounded
class Return:
    """Settings for the rewards of a trajectory's turns, from which every group credit starts."""

    rewards: Annotated[str, OneOf(("turns", "outcome", "success"))] = "turns"
    """Rewards to count. turns: the environment's reward at each turn. outcome: their sum, at the last turn. success: 1
    or 0, at the last turn. An UNFINISHED episode has no outcome or success yet, so it gets 0."""

    invalid_penalty: Annotated[float, NOT_NEGATIVE] = 0.0
    """Penalty subtracted from the reward of each turn whose action was invalid, in units of reward; >= 0."""

    def __call__(self, group: Sequence[Trajectory]) -> Numbers:
        """Return the reward of each turn, in units of reward `[trajectories][turns]`."""
        return [self._rewards(trajectory) for trajectory in group]

    def _rewards(self, trajectory: Trajectory) -> list[float]:
        if self.rewards == "turns":
            rewards = recorded_rewards(trajectory)
        else:
            by_sum = self.rewards == "outcome"
            outcome = sum(recorded_rewards(trajectory)) if by_sum else float(solved(trajectory))
            rewards = _at_the_end(0.0 if unfinished(trajectory) else outcome, len(trajectory.turns))
        if not self.invalid_penalty or trajectory.status is Status.FAILED:
            return rewards
        return [
            reward if turn.valid else reward - self.invalid_penalty
            for reward, turn in zip(rewards, trajectory.turns, strict=True)
        ]


def _at_the_end(reward: float, turns: int) -> list[float]:
    return [*[0.0] * (turns - 1), reward][:turns]
