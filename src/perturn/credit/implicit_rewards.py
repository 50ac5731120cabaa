"""Implicit reward of each turn: the log-ratio of its likelihood under a trained policy and under its reference."""

from collections.abc import Sequence
from math import fsum, isfinite, isnan, nan

from torch import Tensor

from perturn.credit.group_statistics import Visit, normalized_within
from perturn.credit.returns import Numbers
from perturn.types import Status, Trajectory

Logprobs = Sequence[Sequence[Sequence[float] | Tensor]]
"""Log-probabilities of the tokens of each turn, in nats `[trajectories][turns][tokens]`."""

LOG_RATIO_REDUCTIONS = ("sum", "mean")
"""Reduction from tokens to a turn: the sum over the turn's tokens, or their mean."""


def turn_log_ratios(
    group: Sequence[Trajectory], progress: Logprobs | None, reference: Logprobs | None, reduction: str = "sum"
) -> Numbers:
    """Return the implicit reward of each turn, in nats `[trajectories][turns]`; NaN in a FAILED trajectory.

        u_t = sum_j log pi(y_tj | before) - log pi_ref(y_tj | before)

    Source: Rafailov et al. 2023, arXiv:2305.18290, Eq. 5, for one turn, without beta and without the term that depends
    on the prompt alone. "Neglected Free Lunch from Post-training: Progress Advantage for LLM Agents" calls it progress
    advantage.
    Differs: nothing.

    Args:
        group: Trajectories.
        progress: Log-probabilities under pi, the trained policy.
        reference: Log-probabilities under pi_ref.
        reduction: One of LOG_RATIO_REDUCTIONS.

    Raises:
        ValueError: If `progress` or `reference` is None or not finite, or does not have one entry for each token of
            each turn.
    """
    if progress is None or reference is None:
        raise ValueError(
            "this credit needs progress= and reference=, the log-probabilities of each turn's tokens under a policy "
            "that was trained and under its reference."
        )
    if [len(of_one) for of_one in progress] != [len(one.turns) for one in group] or [
        len(of_one) for of_one in reference
    ] != [len(one.turns) for one in group]:
        raise ValueError(
            "progress and reference must hold one entry per turn, for each trajectory of the group."
        )
    return [
        [nan] * len(one.turns)
        if one.status is Status.FAILED
        else [_log_ratio(*turn, reduction) for turn in zip(ours, theirs, strict=True)]
        for one, ours, theirs in zip(group, progress, reference, strict=True)
    ]


def _log_ratio(ours: Sequence[float] | Tensor, theirs: Sequence[float] | Tensor, reduction: str) -> float:
    """Return the implicit reward of one turn, in nats, from the log-probabilities of its tokens [tokens]."""
    known = [each.tolist() if isinstance(each, Tensor) else each for each in (ours, theirs)]
    if len(known[0]) != len(known[1]) or not known[0]:
        raise ValueError(
            "progress and reference must hold the same tokens of each turn, at least one, got "
            f"{len(known[0])} and {len(known[1])}."
        )
    if not all(map(isfinite, (*known[0], *known[1]))):
        raise ValueError("progress and reference must be finite.")
    total = fsum(own - its for own, its in zip(*known, strict=True))
    return total / len(known[0]) if reduction == "mean" else total


def normalized_progress(ratios: Numbers, normalize: str, std: str = "sample") -> Numbers:
    """Return implicit rewards normalized over all turns of a group; an unknown reward becomes 0.

    Args:
        ratios: Implicit rewards, in nats `[trajectories][turns]`; NaN: not known.
        normalize: mean: subtract the mean. std: then divide by the standard deviation too.
        std: Standard deviation: sample or population.

    Returns:
        Normalized rewards, in nats (mean) or without unit (std) `[trajectories][turns]`.
    """
    known: list[Visit] = [
        (i, t) for i, of_one in enumerate(ratios) for t, ratio in enumerate(of_one) if not isnan(ratio)
    ]
    return normalized_within([known], ratios, normalize, std)
