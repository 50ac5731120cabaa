"""InfoPO: GRPO plus the information in the environment's replies, which counts if outcomes of a task hardly differ."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, isnan
from typing import Annotated, Any, ClassVar

from torch import Tensor

from perturn.extend import NOT_NEGATIVE, Bound, Need, Needs, Trajectory
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
"""Gain of each turn's reply: mean increase in the log-probability of the next turn's tokens, in nats
`[trajectories][turns]`; NaN if no turn follows or there is no reply."""

SAID = "how much likelier the reply to each turn made the turn after it"


@dataclass(frozen=True)
class Feedback(Need):
    """Log-likelihood gain of each action from seeing the environment's reply to the previous action.

    The credit gets it as argument `feedback`, in nats `[trajectories][turns]`; NaN if no turn follows or there is no
    reply.
    """

    name: ClassVar[str] = "feedback"
    placeholder: str
    """Text that replaces the environment's reply."""


def gate(outcomes: Sequence[float], temperature: float, std: str = "sample") -> float:
    """Return the factor on the weight of the information gain, in (0, 0.5].

        sigmoid(-std(S) / temperature)

    Args:
        outcomes: Score S of each trajectory of a task, in units of reward.
        temperature: Temperature of the sigmoid, in units of reward; > 0.
        std: Standard deviation: sample or population.
    """
    return 1 / (1 + exp(min(deviation(outcomes, std) / temperature, 700.0)))


@dataclass(frozen=True)
class InfoPO(GroupCredit):
    """GRPO's advantage, plus the information in the reply to a turn, which counts more if outcomes are similar.

        A_it = (S_i - mean(S)) / (std(S) + 1e-6) + beta sigmoid(-std(S) / temperature) z_it
        z_it = (I_it - mean(I)) / (std(I) + 1e-6)
        I_it = mean_j [log pi(y_j | o_(t+1), y_<j) - log pi(y_j | placeholder, y_<j)],   y the tokens of turn t + 1

    mean(I) and std(I) are over the turns of the group that are followed by a reply and another turn. z of all other
    turns is 0.

    Source: Kong et al. 2026, "InfoPO: Information-Driven Policy Optimization for User-Centric Agents",
    arXiv:2603.00656, and its released code (`compute_info_grpo_advantage`, `intrinsic_reward.py`).
    Differs: gains are normalized over turns. The code divides each gain by the number of tokens of its turn first,
    and normalizes over tokens. The placeholder has a fixed length; the code repeats or cuts it to the length of the
    reply. `beta` does not decay over epochs. The code multiplies z by a factor that keeps its deviation at most 1; it
    is left out, since z has this property with `normalize` std. A trajectory alone in its group gets 0. The defaults
    mix two configurations of the code: `beta` is 0.5 in `sglang_multiturn/config/grpo_multiturn.yaml`, and
    `temperature` is 0.05 in `tau2/config/tau2_trainer.yaml`. `beta` and `temperature` are 0.5 and 0.5 in
    `grpo_multiturn.yaml`, 0.3 and 0.5 in `colbench_trainer.yaml`, and 0.1 and 0.05 in `tau2_trainer.yaml`.
    """

    beta: Annotated[float, NOT_NEGATIVE] = 0.5
    """Weight of z relative to the outcome; >= 0. The gate (see `gate`) then multiplies it by at most 0.5."""

    temperature: Annotated[float, Bound(above=0)] = 0.05
    """Standard deviation of a group's scores at which the gate begins to close, in units of reward; > 0."""

    normalize: Normalization = "std"
    """Normalization of scores and gains. mean: subtract the mean. std: then divide by the standard deviation too."""

    std: Deviation = "sample"
    """Standard deviation: sample (over n - 1), or population."""

    placeholder: str = "No information found."
    """Text that replaces the reply, to compute the action's likelihood without the reply."""

    @property
    def needs(self) -> Needs:
        """See `Credit.needs`."""
        return (Feedback(self.placeholder),)

    def __call__(
        self, group: Sequence[Trajectory], *, feedback: ReplyGains | None = None, **_: Any
    ) -> list[Tensor]:
        """Return the advantage of every turn, one tensor per trajectory, without unit [turns].

        Raises:
            ValueError: If `feedback` is None or infinite, or does not have one entry per turn.
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
        visits: list[Visit] = [
            (i, t) for i, of_one in enumerate(gains) for t, gain in enumerate(of_one) if not isnan(gain)
        ]
        weight = self.beta * gate(scores, self.temperature, self.std)
        return [
            [own + weight * z for own, z in zip(of_one, its, strict=True)]
            for of_one, its in zip(
                outcome, normalized_within([visits], gains, self.normalize, self.std), strict=True
            )
        ]
