"""A2TGPO: outcome advantage, information gains normalized at each turn index, and a clip range for each turn."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum, sqrt
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from perturn.extend import NOT_NEGATIVE, Answer, Bound, Needs, OneOf, Trajectory
from perturn.extend.tensors import (
    GAINS,
    Answers,
    CreditTraits,
    Deviation,
    GroupCredit,
    Normalization,
    Numbers,
    Visit,
    answer_numbers,
    as_tensors,
    by_task,
    episode_advantages,
    normalized_within,
    on_each_turn,
    returns_to_go,
    turn_gains,
    weigh_tasks_with,
)


@dataclass(frozen=True)
class A2TGPO(GroupCredit):
    """Outcome advantage plus gains in the gold answer's likelihood, compared at each turn index.

        A_it = (S_i - mean(S)) / (std(S) + 1e-6) + alpha D_it / sqrt(T_i - 1 - t)   for t < T_i - 1
        D_it = sum_(k = t)^(T_i - 2) gamma^(k - t) z_ik,   z_ik = (IG_ik - mean_k(IG)) / (std_k(IG) + 1e-6)

    IG comes from `information_gains`. mean_k and std_k are over the trajectories of the group that have a turn after
    turn k. The last turn has the outcome advantage alone. S is the sum of the rewards.

    The clip range of a turn is multiplied by 1 + clip_scale (2 sigmoid(z_it) - 1), and the clip range of the last turn
    by 1. So a turn with a larger gain than other trajectories at this turn index may change more.

    Source: Chen et al. 2026, "A2TGPO: Agentic Turn-Group Policy Optimization with Adaptive Turn-level Clipping",
    arXiv:2605.06200, by its abstract and its released code (a copy of `core_algos.py`, mode turn-group-v1d, with
    `alpha` and `gamma` of its script), not by its equations.
    Differs: a turn whose gain is exactly 0 counts as a turn; the code skips it, which shifts the index of later
    turns. A reward of the environment before the end is part of S; the code has no such rewards. A turn index that no
    other trajectory reached has gain 0, as in the code, and so has every turn of a FAILED trajectory. Equal values have
    advantage 0. With `normalize` mean, z in the clip range is not divided by a deviation either.
    """

    needs: ClassVar[Needs] = (Answer(last_gain=False),)

    alpha: Annotated[float, NOT_NEGATIVE] = 0.3
    """Weight of the gains relative to the outcome, without unit; >= 0."""

    gamma: Annotated[float, Bound(least=0, most=1)] = 1.0
    """Discount from one turn to the next in D, in [0, 1]."""

    gain: Annotated[str, OneOf(GAINS)] = "probability"
    """Quantity whose change is the gain: probability (the geometric mean over the answer's tokens), or logprob (its
    logarithm)."""

    normalize: Normalization = "std"
    """Normalization of outcomes and gains. mean: subtract the mean. std: then divide by the standard deviation too."""

    std: Deviation = "population"
    """Standard deviation: population (over n), or sample (over n - 1)."""

    clip_scale: Annotated[float, Bound(least=0, below=1)] = 0.3
    """Largest relative change of the clip range of a turn, in [0, 1); 0: no change."""

    @property
    def traits(self) -> CreditTraits:
        """See `CreditTraits`."""
        return CreditTraits(needs_group=True, sets_clip=True, discount=self.gamma)

    def __call__(
        self, group: Sequence[Trajectory], *, answer: Answers | None = None, **_: Any
    ) -> list[Tensor]:
        """Return the advantage of every turn, one tensor per trajectory, without unit [turns].

        Raises:
            ValueError: If `answer` is None, does not have one entry more than turns, or gives an infinite gain.
        """
        rewards, gains = self.returns(group), self._standard_gains(group, answer)
        return weigh_tasks_with(group, rewards, gains, self._fuse)

    def clips(
        self, group: Sequence[Trajectory], *, answer: Answers | None = None, **_: Any
    ) -> list[Tensor] | None:
        """Return the factor on the clip range of every turn, without unit [turns]; None if `clip_scale` is 0.

        Raises:
            ValueError: If `answer` is None, does not have one entry more than turns, or gives an infinite gain.
        """
        if not self.clip_scale:
            return None
        gains = as_tensors(self._standard_gains(group, answer))
        return [1 + self.clip_scale * (2 * torch.sigmoid(of_one) - 1) for of_one in gains]

    def _standard_gains(self, group: Sequence[Trajectory], answer: Answers | None) -> Numbers:
        """Return z of each turn, and 0 for each last turn `[trajectories][turns]`."""
        known = answer_numbers(group, answer)
        gains = [turn_gains(one, logprobs, self.gain) for one, logprobs in zip(group, known, strict=True)]
        index: list[list[Visit]] = []
        for members in by_task(group):
            longest = max(len(gains[i]) for i in members)
            index += [[(i, t) for i in members if t < len(gains[i]) - 1] for t in range(longest)]
        return normalized_within(index, gains, self.normalize, self.std)

    def _fuse(self, rewards: Numbers, gains: Numbers) -> Numbers:
        scores = [fsum(of_one) for of_one in rewards]
        copies = on_each_turn(scores, rewards)
        outcome = episode_advantages(
            scores, copies, normalize=self.normalize, statistics="trajectories", std=self.std
        )
        return [
            [own + self.alpha * its for own, its in zip(*both, strict=True)]
            for both in zip(outcome, self._accumulate(gains), strict=True)
        ]

    def _accumulate(self, gains: Numbers) -> Numbers:
        """Return D divided by the square root of its number of terms; 0 for a last turn `[trajectories][turns]`."""
        found = []
        for of_one in gains:
            sums = returns_to_go(of_one[:-1], self.gamma)
            found.append([total / sqrt(len(sums) - t) for t, total in enumerate(sums)] + [0.0] * bool(of_one))
        return found
