"""Gains of an answer's likelihood, turn by turn: what credits share that ask a policy how likely it finds an answer."""

from collections.abc import Sequence
from math import exp, isinf, isnan

import torch
from torch import Tensor

from perturn.credit.returns import Numbers
from perturn.types import Status, Trajectory

Answers = Sequence[Sequence[float] | Tensor]
"""Mean log-probability of the gold answer's tokens before each turn and after the last one, in nats
`[trajectories][turns + 1]`; NaN: not known."""

GAINS = ("probability", "logprob")
"""A turn's gain: of the geometric mean of the probabilities of the answer's tokens, or of its logarithm."""


def answer_numbers(group: Sequence[Trajectory], answer: Answers | None) -> Numbers:
    """Return the log-probability of the answer around each turn, in nats `[trajectories][turns + 1]`.

    Raises:
        ValueError: If it is missing, or has not one entry before each turn and one after the last.
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
    """Return how much likelier each turn made the gold answer, without unit or in nats [turns].

        IG_t = P_(t+1) - P_t,   P_t = exp(mean_j log pi(a_j | before turn t, a_<j))

    Where P is not known (NaN), the last known P takes its place. So the gains of an episode sum to the last known P
    less the first.

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
    """Return the gain that counts as reward of each turn, without unit or in nats [turns].

    A trajectory that FAILED gains nothing.

    Args:
        trajectory: What was played.
        logprobs: As `information_gains` has it.
        gain: One of GAINS.
        last: Whether the last turn has a gain, by the answer after it, before the world's reply; else 0.

    Raises:
        ValueError: If a gain that counts is infinite.
    """
    if trajectory.status is Status.FAILED or not trajectory.turns:
        return [0.0] * len(trajectory.turns)
    if last:
        return information_gains(logprobs, gain)
    return [*information_gains(logprobs[:-1], gain), 0.0]
