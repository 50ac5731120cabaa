"""SLATE: compare the score of a single turn with the scores of other turns sampled from the same history."""

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
"""Score of a turn. reward: its reward. progress: 1 if it came closer to success, else 0. valid: 1 if its action was
valid, else 0."""


@dataclass(frozen=True)
class SLATE(GroupCredit):
    """Score of a single turn minus the mean score of the other turns sampled from the same history.

        A = (q - mean of q over the other turns of the fork) / (turns of the fork)

    A fork consists of a turn of an explored episode, and the first own turns of the branches that start there. The
    first turns of explored episodes with the same first prompt are compared too, without the division. A turn without
    another turn to compare with gets 0, and so do turns of a branch after its first own turn. q is 0 in an episode that
    FAILED. q does not contain later rewards.

    Source: "Truncated Step-Level Sampling with Process Rewards for Retrieval-Augmented Reasoning" (SLATE), 2026, by its
    abstract: k samples of the next step from a shared prefix, and a reward for each step.
    Differs: q comes from the environment; in the paper, a language model judges each step. The abstract has no formula.
    The mean over the other turns and the division are Perturn's choices; `normalize` std is GRPO's formula. Set
    `explore.turns: 1` to cut branches after their first turn, as in the paper.
    """

    by: Annotated[str, OneOf(MEASURES)] = "reward"
    """Score of a turn. reward: its reward. progress: 1 if it came closer to success, else 0. valid: 1 if its action was
    valid, else 0."""

    normalize: Normalization = "mean"
    """mean: subtract the mean of the other turns of a fork. std: subtract the mean of all turns of a fork, and divide
    by their standard deviation."""

    distance: Annotated[str, OneOf(SENSES)] = "shortest"
    """With `by` progress, the measure of the distance to success. shortest: the shortest path, with full knowledge of
    the environment. searching: the path of the environment's expert, who knows only what the episode has shown."""

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
    """Yield each set of turns that answered the same history, and the factor on the advantage of its turns."""
    posed: dict[object, list[Visit]] = defaultdict(list)
    for explored, forks in forks_of(group).items():
        for turn, branches in forks.items():
            visits = [(member, turn) for member in (explored, *branches) if len(group[member].turns) > turn]
            yield visits, 1 / len(visits)
        if group[explored].turns:
            posed[repr(group[explored].turns[0].observation)].append((explored, 0))
    yield from ((visits, 1.0) for visits in posed.values())
