"""InfoPO: GRPO, and where a task's outcomes hardly differ, what the world's reply to a turn changed in the next one."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, isnan
from typing import Annotated, Any, ClassVar

from torch import Tensor

from perturn.extend import Bound, Need, Needs, Trajectory
from perturn.extend.tensors import (
    Deviation,
    GroupCredit,
    Normalization,
    Numbers,
    Visit,
    deviation,
    episode_advantages,
    normalized_within,
    on_each_turn,
    turn_numbers,
    weigh_tasks_with,
)

ReplyGains = Sequence[Sequence[float] | Tensor]
"""Gain of each turn's reply, in nats `[trajectories][turns]`: how much likelier it made each token of the next turn, in
the mean; NaN where no turn follows, or nothing was said."""

SAID = "how much likelier the reply to each turn made the turn after it"


@dataclass(frozen=True)
class Feedback(Need):
    """Log-likelihood gain of each action from seeing the environment's reply to the action before it.

    Given as `feedback`, in nats `[trajectories][turns]`; NaN where no turn follows, or nothing was said.
    """

    name: ClassVar[str] = "feedback"
    placeholder: str
    """Text that replaces the reply."""


def gate(outcomes: Sequence[float], temperature: float, std: str = "sample") -> float:
    """Return the share of its weight that information keeps, in (0, 0.5].

        sigmoid(-std(S) / temperature)

    Args:
        outcomes: S of the trajectories of a task, in units of reward.
        temperature: In the same units; above 0.
        std: Standard deviation, sample or population.
    """
    return 1 / (1 + exp(min(deviation(outcomes, std) / temperature, 700.0)))


@dataclass(frozen=True)
class InfoPO(GroupCredit):
    """GRPO's advantage, plus how much the reply told the policy. The second part counts if outcomes are similar.

        A_it = (S_i - mean(S)) / (std(S) + 1e-6) + beta sigmoid(-std(S) / temperature) z_it
        z_it = (I_it - mean(I)) / (std(I) + 1e-6)
        I_it = mean_j [log pi(y_j | o_(t+1), y_<j) - log pi(y_j | placeholder, y_<j)],   y the tokens of turn t + 1

    mean(I) and std(I) are over the turns of the group that are followed by a reply and another turn; z of all other
    turns is 0.

    Source: Kong et al. 2026, "InfoPO: Information-Driven Policy Optimization for User-Centric Agents",
    arXiv:2603.00656, and its released code (`compute_info_grpo_advantage`, `intrinsic_reward.py`).
    Differs: gains are normalized over turns. The code divides each gain by the number of tokens of its turn first,
    and normalizes over tokens. The placeholder replaces the reply whatever its length; the code repeats or cuts it to
    the same number of tokens. `beta` does not decay over epochs. The code's factor that keeps the deviation of z at
    most 1 is left out, since z has this property. A trajectory alone in its group gets 0.
    """

    beta: Annotated[float, Bound(least=0)] = 0.5
    """Weight of information, before the gate, which multiplies it by at most one half."""

    temperature: Annotated[float, Bound(above=0)] = 0.05
    """Deviation of a group's scores at which the gate begins to close, in units of reward."""

    normalize: Normalization = "std"
    """How scores and gains are normalized: std subtracts their mean and divides by their standard deviation; mean
    subtracts the mean alone."""

    std: Deviation = "sample"
    """Standard deviation: sample (over n - 1), or population."""

    placeholder: str = "No information found."
    """Text that replaces the reply, to see what the policy would have done without the reply."""

    @property
    def needs(self) -> Needs:
        """See `Credit.needs`."""
        return (Feedback(self.placeholder),)

    def __call__(
        self, group: Sequence[Trajectory], *, feedback: ReplyGains | None = None, **_: Any
    ) -> list[Tensor]:
        """Return the advantage of every turn, one tensor per trajectory, without unit [turns].

        Raises:
            ValueError: If `feedback` is missing, infinite, or has not one entry per turn.
        """
        gains, rewards = turn_numbers("feedback", feedback, group, SAID), self.returns(group)
        return weigh_tasks_with(group, rewards, gains, self._fuse)

    def _fuse(self, rewards: Numbers, gains: Numbers) -> Numbers:
        scores = [sum(of_one) for of_one in rewards]
        outcome = episode_advantages(
            scores,
            on_each_turn(scores, rewards),
            normalize=self.normalize,
            statistics="trajectories",
            std=self.std,
        )
        told: list[Visit] = [
            (i, t) for i, of_one in enumerate(gains) for t, gain in enumerate(of_one) if not isnan(gain)
        ]
        weight = self.beta * gate(scores, self.temperature, self.std)
        return [
            [own + weight * z for own, z in zip(of_one, its, strict=True)]
            for of_one, its in zip(
                outcome, normalized_within([told], gains, self.normalize, self.std), strict=True
            )
        ]
