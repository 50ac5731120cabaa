"""Change in the likelihood of the gold answer from turn to turn, for the credits that reward this change."""

from collections.abc import Sequence
from math import exp, isinf, isnan

import torch
from torch import Tensor

from perturn.credit.returns import Numbers
from perturn.types import Status, Trajectory

Answers = Sequence[Sequence[float] | Tensor]
"""Mean log-probability of the gold answer's tokens before each turn and after the last turn, in nats
`[trajectories][turns + 1]`; NaN: not known."""

GAINS = ("probability", "logprob")
"""Quantity whose change is the gain of a turn: the geometric mean of the answer's token probabilities, or its
logarithm."""


def answer_numbers(group: Sequence[Trajectory], answer: Answers | None) -> Numbers:
    """Return the log-probability of the answer before each turn and after the last, in nats.

    Returns:
        Mean log-probabilities as Python floats `[trajectories][turns + 1]`.

    Raises:
        ValueError: If `answer` is None, or a trajectory does not have one entry more than it has turns.
    """
    if answer is None:
        raise ValueError(
            "this credit needs answer=, the log-probability of the gold answer before each turn and after the last."
        )
    found = [torch.as_tensor(of_one, dtype=torch.float64).reshape(-1).tolist() for of_one in answer]
    if [len(of_one) for of_one in found] != [len(trajectory.turns) + 1 for trajectory in group]:
        raise ValueError(
            "answer must hold one entry before each turn and one after the last, for each trajectory of the group."
        )
    return found


def information_gains(logprobs: Sequence[float], gain: str = "probability") -> list[float]:
    """Return the increase in the likelihood of the gold answer at each turn, without unit or in nats [turns].

        IG_t = P_(t+1) - P_t,   P_t = exp(mean_j log pi(a_j | before turn t, a_<j))

    An unknown P (NaN) is replaced by the last known P. So the gains of an episode sum to the last known P minus the
    first.

    Source: Wang et al. 2025, "Information Gain-based Policy Optimization", arXiv:2510.14967, and its released code.
    Differs: nothing.

    Args:
        logprobs: Mean log-probability of the answer's tokens before each turn and after the last, in nats [turns + 1].
        gain: One of GAINS.

    Raises:
        ValueError: If a gain is infinite.
    """
    found, known = [], logprobs[0]
    for after in logprobs[1:]:
        if isnan(after) or isnan(known):
            found.append(0.0)
        else:
            found.append(exp(after) - exp(known) if gain == "probability" else after - known)
        known = known if isnan(after) else after
    if any(isinf(each) or isnan(each) for each in found):
        raise ValueError("answer must be finite where gains are of log-probabilities; take gain=probability.")
    return found


def turn_gains(
    trajectory: Trajectory, logprobs: Sequence[float], gain: str = "probability", last: bool = False
) -> list[float]:
    """Return the gain of each turn to use as its reward, without unit or in nats [turns].

    All gains of a FAILED trajectory are 0.

    Args:
        trajectory: Recorded episode.
        logprobs: Mean log-probability of the answer's tokens before each turn and after the last, in nats [turns + 1].
        gain: One of GAINS.
        last: Whether the last turn has a gain. The answer is then scored after the last action, before the
            environment's reply. False: the gain of the last turn is 0.

    Raises:
        ValueError: If a gain is infinite.
    """
    if trajectory.status is Status.FAILED or not trajectory.turns:
        return [0.0] * len(trajectory.turns)
    if last:
        return information_gains(logprobs, gain)
    return [*information_gains(logprobs[:-1], gain), 0.0]
