"""SLATE: how good a turn was by itself, against other turns that answered the same history."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from perturn.extend import SENSES, Distance, Needs, OneOf, Trajectory, failed
from perturn.extend.tensors import (
    EPSILON,
    SCORES,
    CreditTraits,
    GroupCredit,
    Normalization,
    Numbers,
    Visit,
    deviation,
    forks_of,
    mean,
    means_of_others,
)

MEASURES = ("reward", "progress", "valid")
"""How good a turn was: the reward that counts; 1 where it brought the success nearer; 1 where it could be executed."""


@dataclass(frozen=True)
class SLATE(GroupCredit):
    """Score of a single turn minus the mean of other turns that were sampled from the same history.

        A = (q - mean of q over the other turns of the fork) / (turns of the fork)

    A fork has the turn of an explored episode, and the first turn of each branch from there. The first turns of
    explored episodes with the same first prompt are compared too; each of them counts once, and so do all turns of a
    fork together. A turn without another turn to compare has 0, and so have turns of a branch after its first turn. q
    is 0 in an episode that FAILED. q does not contain later rewards.

    Source: "Truncated Step-Level Sampling with Process Rewards for Retrieval-Augmented Reasoning" (SLATE), 2026, by its
    abstract: k samples of the next step from a shared prefix, and a reward for each step.
    Differs: the environment gives q; in the paper a language model judges each step. The abstract gives no formula,
    so the mean of the other turns and the shares are Perturn's (`normalize` std is GRPO's). `explore.turns: 1` cuts
    branches after their first turn, as the paper does.
    """

    by: Annotated[str, OneOf(MEASURES)] = "reward"
    """Score of a turn: its reward (reward), whether it brought the success nearer (progress), or whether its action
    could be executed (valid)."""

    normalize: Normalization = "mean"
    """mean; or std, which subtracts the mean of all turns of a fork and divides by their deviation."""

    distance: Annotated[str, OneOf(SENSES)] = "shortest"
    """With `by` progress, how the way to a success is measured: `shortest`, with full knowledge of the world,
    or `searching`, by the environment's expert, who knows only what the episode has shown."""

    @property
    def needs(self) -> Needs:
        """See `Credit.needs`."""
        return (Distance(self.distance),) if self.by == "progress" else ()

    @property
    def traits(self) -> CreditTraits:
        """See `CreditTraits`."""
        return CreditTraits(needs_group=True, trains_branches=True, takes_unfinished=True)

    def _weigh(self, group: Sequence[Trajectory], rewards: Numbers) -> Numbers:
        scores = rewards
        if self.by != "reward":
            scores = [[0.0] * len(one.turns) if failed(one) else SCORES[self.by](one) for one in group]
        found = [[0.0] * len(of_one) for of_one in rewards]
        for visits, share in _forks(group):
            own = [scores[member][turn] for member, turn in visits]
            if len(set(own)) < 2:
                continue
            centres, scale = means_of_others(range(len(own)), own), 1.0
            if self.normalize == "std":
                centres, scale = dict.fromkeys(centres, mean(own)), deviation(own) + EPSILON
            for at, (member, turn) in enumerate(visits):
                found[member][turn] = share * (own[at] - centres[at]) / scale
        return found


def _forks(group: Sequence[Trajectory]) -> Iterator[tuple[list[Visit], float]]:
    """Yield turns that answered the same history, and the share of each of them."""
    posed: dict[object, list[Visit]] = defaultdict(list)
    for explored, forks in forks_of(group).items():
        for turn, branches in forks.items():
            visits = [(member, turn) for member in (explored, *branches) if len(group[member].turns) > turn]
            yield visits, 1 / len(visits)
        if group[explored].turns:
            posed[repr(group[explored].turns[0].observation)].append((explored, 0))
    yield from ((visits, 1.0) for visits in posed.values())
