"""Turn weights from the confidence of the reference policy."""

import torch
from torch import Tensor

from perturn.losses.checks import check_positive, check_unit_interval
from perturn.losses.logprobs import TurnLogprobs


def is_high_weight_turn(side: TurnLogprobs, *, pivot: float) -> Tensor:
    """Return whether the reference is unsure of a turn, so that it takes the high weight.

    Args:
        side: A batch with reference log-probabilities.
        pivot: Confidence up to which a turn takes the high weight, in [0, 1].

    Returns:
        True where p_i <= pivot [turns].
    """
    return side.confidence() <= pivot


def confidence_weights(side: TurnLogprobs, *, pivot: float, low: float, high: float) -> Tensor:
    """Weigh turns the reference already knows lower than the others.

        omega_i = low  if p_i > pivot else high,   p_i = exp(mean_j log pi_ref(y_ij))

    Source: tlm-DRE, Eqs. 9-10.
    Differs: nothing. Read from the reference, never from the policy; carries no gradient.

    Args:
        side: A batch with reference log-probabilities.
        pivot: Confidence up to which a turn takes the high weight, in [0, 1].
        low: Weight of a confident turn, without unit.
        high: Weight of any other turn, without unit.

    Returns:
        Weights, without unit [turns].
    """
    is_high = is_high_weight_turn(side, pivot=pivot)
    weights = torch.full_like(is_high, low, dtype=side.frozen_reference().dtype)
    return weights.masked_fill(is_high, high)


def uniform_weights(side: TurnLogprobs) -> Tensor:
    """Return the weight 1 for every turn, without unit [turns]."""
    dtype = torch.float64 if side.policy.dtype == torch.float64 else torch.float32
    return torch.ones_like(side.turn_trajectory, dtype=dtype)


def check_weight_settings(*, pivot: float, low: float, high: float) -> None:
    """Raise unless 0 <= pivot <= 1 and 0 < low <= high."""
    check_unit_interval("pivot", pivot)
    check_positive("low", low)
    check_positive("high", high)
    if high < low:
        raise ValueError(f"high must be >= low, got high {high} and low {low}.")
