"""SIOP: reward a turn for raising the likelihood of the episode's final answer, if other episodes give it too."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, fsum, isnan, log, nan
from operator import index
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from perturn.extend import CODE, Bound, Need, Needs, OneOf, Status, Trajectory, check_bounds
from perturn.extend.tensors import (
    CreditTraits,
    Deviation,
    Normalization,
    Numbers,
    Visit,
    by_task,
    normalized_within,
    returns_to_go,
    turn_gains,
    weigh_tasks,
)


@dataclass(frozen=True)
class AnswerClusters(Need):
    """Clusters of equal final answers, and the policy's likelihood of each episode's cluster.

    The credit gets them as argument `answer_clusters`: one `OwnAnswer` per trajectory.
    """

    name: ClassVar[str] = "answer-clusters"
    same: str = "exact"
    """Answers that form a cluster. exact: answers that are equal after normalization. MODULE:FUNCTION: answers to which
    this function gives equal labels."""
    members: int = 3
    """Maximum number of answers that represent a cluster."""
    gold: bool = False
    """Whether the gold answer replaces the final answer of every episode."""


@dataclass(frozen=True)
class OwnAnswer:
    """Cluster of a trajectory's final answer, and the likelihood of the answers that represent it."""

    cluster: int
    """Number of the cluster within its task; below 0: the trajectory has no answer."""
    logprobs: Sequence[Sequence[float] | Tensor]
    """Mean log-probability of the tokens of each answer that represents the cluster, before each turn and after the
    last turn, in nats `[turns + 1][answers]`; NaN: not known."""


REFERENCES = ("own", "gold")
"""Answers whose likelihood counts. own: the answers of the trajectory's cluster. gold: the gold answer, as the only
cluster."""

LEAST = 1e-8
"""Number added to a likelihood before taking its logarithm, as in the released code."""


def potentials(group: Sequence[Trajectory], answers: Sequence[OwnAnswer] | None) -> Numbers:
    """Return log p of each trajectory's cluster, in nats `[trajectories][turns + 1]`.

        log p_t = log(1e-8 + (1 / K) sum_k exp(mean_j log pi(a_kj | before turn t, a_k,<j)))

    It is NaN if one of the K likelihoods is not known, or if K = 0.

    Raises:
        ValueError: If `answers` is None, or a trajectory does not have the same number of likelihoods before each turn
            and after the last turn.
    """
    if answers is None:
        raise ValueError(
            "this credit needs answer_clusters=, the cluster of each trajectory's final answer, and how likely its "
            "answers are before each turn and after the last."
        )
    found = [
        [torch.as_tensor(each, dtype=torch.float64).reshape(-1).tolist() for each in of_one.logprobs]
        for of_one in answers
    ]
    if [len(of_one) for of_one in found] != [len(one.turns) + 1 for one in group]:
        raise ValueError(
            "answer_clusters must hold one entry before each turn and one after the last, for each trajectory of the "
            "group."
        )
    if any(len(set(map(len, of_one))) > 1 for of_one in found):
        raise ValueError("answer_clusters must hold as many log-probabilities at each entry of a trajectory.")
    return [[_log_mean(each) for each in of_one] for of_one in found]


def _log_mean(logprobs: Sequence[float]) -> float:
    if not logprobs or any(map(isnan, logprobs)):
        return nan
    return log(LEAST + fsum(exp(each) for each in logprobs) / len(logprobs))


def cluster_shares(group: Sequence[Trajectory], answers: Sequence[OwnAnswer]) -> list[float]:
    """Return q, the share of a task's final answers that are in the trajectory's cluster, in [0, 1] [trajectories].

    It is 0 for a trajectory that has no answer or FAILED.

    Raises:
        ValueError: If there is not one integer cluster per trajectory.
    """
    try:
        given = [index(each.cluster) for each in answers]
    except TypeError as error:
        raise ValueError(f"clusters must be integers: {error}.") from error
    if len(given) != len(group):
        raise ValueError(
            f"answer_clusters must hold one for each of {len(group)} trajectories of the group, got {len(given)}."
        )
    found = [0.0] * len(group)
    for members in by_task(group):
        answered = [i for i in members if given[i] >= 0 and group[i].status is not Status.FAILED]
        counts = Counter(given[i] for i in answered)
        for i in answered:
            found[i] = counts[given[i]] / len(answered)
    return found


@dataclass(frozen=True)
class SIOP:
    """Increase in the log-likelihood of the episode's answer at each turn, times the share of equal answers.

        r_t = q (log p_(t+1) - log p_t), plus (1 - lam) q at the last turn
        z_t = (r_t - mean(R)) / (std(R) + 1e-6),   A_t = sum_(k >= t) gamma^(k - t) z_k

    q comes from `cluster_shares`, and p_t, before turn t, from `potentials`. R holds the rewards of all turns of the
    group. An unknown p is replaced by the last known p. The environment's rewards are not used, so the credit needs
    neither gold answers nor a verifier.

    Source: Hu et al. 2026, "Self-Induced Outcome Potential: Turn-Level Credit Assignment for Agents without Verifiers",
    arXiv:2605.04984, by its abstract and its released code (dl-m9/SIOP at 33043ff: `siop_process_reward.py`,
    `nli_clustering.py`, `core_algos.py`), not by its equations.
    Differs: answers are in one cluster if they are equal after normalization, unless `same` names a function. The
    code asks an entailment model, and joins each answer with the first answer that agrees, so its clusters depend on
    the order. The most frequent answers represent a cluster; in the code, the first answers do. The code can calibrate
    q by whether observations entail the answer (its eta: 1 in its script, 0 in its functions); q is not calibrated
    here. p after a turn is computed after the environment's reply, except at the last turn; the code computes it before
    the reply. If some likelihoods are unknown, the code uses the known likelihoods, and the turns before and after an
    unknown p get reward 0. A trajectory alone in its group gets 0.
    """

    lam: Annotated[float, Bound(least=0, most=1)] = 0.5
    """Reduction of the last turn's bonus (1 - lam) q, in [0, 1]. At 1 there is no bonus."""

    gamma: Annotated[float, Bound(least=0, most=1)] = 1.0
    """Discount from one turn to the next, in [0, 1]."""

    reference: Annotated[str, OneOf(REFERENCES)] = "own"
    """Answers whose likelihood is computed. own: the answers of the trajectory's cluster. gold: the gold answer, with q
    = 1."""

    members: Annotated[int, Bound(least=1)] = 3
    """Maximum number of distinct answers that represent a cluster; >= 1."""

    same: Annotated[str, CODE] = "exact"
    """Rule by which answers form a cluster. exact: answers are equal apart from case, punctuation, articles and blanks.
    MODULE:FUNCTION: your function gives them equal labels. It gets a task and its distinct answers, and returns one
    label per answer."""

    normalize: Normalization = "std"
    """Normalization of the rewards. mean: subtract the mean. std: then divide by the standard deviation too."""

    std: Deviation = "sample"
    """Standard deviation: sample (over n - 1), or population (over n)."""

    last_gain: bool = True
    """Whether the last turn of an episode with several turns has a gain in addition to the bonus. The answer is then
    scored right after the last action, before the environment's reply. The last action may itself give this answer."""

    def __post_init__(self) -> None:
        """Reject settings outside their range."""
        check_bounds(self)
        if ":" not in self.same and self.same != "exact":
            raise ValueError(f"same must be exact or MODULE:FUNCTION, got {self.same!r}.")

    @property
    def needs(self) -> Needs:
        """See `Credit.needs`."""
        return (AnswerClusters(self.same, self.members, self.reference == "gold"),)

    @property
    def traits(self) -> CreditTraits:
        """See `CreditTraits`."""
        return CreditTraits(needs_group=True, discount=self.gamma)

    def __call__(
        self,
        group: Sequence[Trajectory],
        *,
        answer_clusters: Sequence[OwnAnswer] | None = None,
        **_: Any,
    ) -> list[Tensor]:
        """Return the advantage of every turn, one tensor per trajectory, without unit [turns].

        Raises:
            ValueError: If `answer_clusters` is None, or does not have the group's shape.
        """
        rewards = self.turn_rewards(group, answer_clusters)
        return weigh_tasks(group, lambda _: rewards, self._weigh)

    def turn_rewards(self, group: Sequence[Trajectory], answers: Sequence[OwnAnswer] | None) -> Numbers:
        """Return r of each turn, in nats `[trajectories][turns]`."""
        known_of = potentials(group, answers)
        found = []
        for one, known, q in zip(group, known_of, cluster_shares(group, answers or ()), strict=True):
            rewards = [q * gain for gain in turn_gains(one, known, "logprob", self._has_last_gain(one))]
            if rewards:
                rewards[-1] += (1 - self.lam) * q
            found.append(rewards)
        return found

    def _has_last_gain(self, trajectory: Trajectory) -> bool:
        return self.last_gain and len(trajectory.turns) > 1

    def _weigh(self, group: Sequence[Trajectory], rewards: Numbers) -> Numbers:
        every: list[Visit] = [(i, t) for i, of_one in enumerate(rewards) for t in range(len(of_one))]
        normalized = normalized_within([every], rewards, self.normalize, self.std)
        return [returns_to_go(of_one, self.gamma) for of_one in normalized]
