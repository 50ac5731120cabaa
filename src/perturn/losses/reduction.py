"""From tokens to one number for each trajectory, with a weight on each turn.

Write x_ij for token j of turn i, n_i its tokens, n = sum_i n_i, T turns and w_i the weight of turn i.
"""

from collections.abc import Callable

from torch import Tensor

from perturn.losses.logprobs import TurnLogprobs


def weighted_sum(side: TurnLogprobs, values: Tensor, turn_weights: Tensor) -> Tensor:
    """Return sum_i w_i sum_j x_ij: the logarithm of a product over tokens, as papers write it.

    Args:
        side: The batch the values belong to.
        values: x, in any unit [tokens].
        turn_weights: w, without unit [turns].

    Returns:
        Reduced values, in the unit of x [trajectories].
    """
    return side.sum_over_turns(turn_weights * side.sum_by_turn(values))


def weighted_token_mean(side: TurnLogprobs, values: Tensor, turn_weights: Tensor) -> Tensor:
    """Return (1/n) sum_i w_i sum_j x_ij: every token has an equal vote, then its turn's weight.

    The divisor is n and not sum_i w_i n_i, so that weights keep their size: all 0.2 gives a fifth of all 1.

    Args:
        side: The batch the values belong to.
        values: x, in any unit [tokens].
        turn_weights: w, without unit [turns].

    Returns:
        Reduced values, in the unit of x [trajectories].
    """
    return weighted_sum(side, values, turn_weights) / side.tokens_per_trajectory


def weighted_turn_mean(side: TurnLogprobs, values: Tensor, turn_weights: Tensor) -> Tensor:
    """Return (1/T) sum_i w_i (1/n_i) sum_j x_ij: every turn has an equal vote, then its weight.

    Args:
        side: The batch the values belong to.
        values: x, in any unit [tokens].
        turn_weights: w, without unit [turns].

    Returns:
        Reduced values, in the unit of x [trajectories].
    """
    return side.mean_over_turns(turn_weights * side.mean_by_turn(values))


REDUCTIONS: dict[str, Callable[[TurnLogprobs, Tensor, Tensor], Tensor]] = {
    "sum": weighted_sum,
    "token_mean": weighted_token_mean,
    "turn_mean": weighted_turn_mean,
}
"""Reduction by name."""
