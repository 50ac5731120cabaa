"""The weight of each turn that a loss reads: what a credit wrote, or else what the loss's own credit says."""

from torch import Tensor

from perturn.credit import TurnCredit
from perturn.losses.logprobs import TurnLogprobs


def turn_weights(side: TurnLogprobs, credit: TurnCredit) -> Tensor:
    """Return the weights a batch came with; without them, ask a credit.

    Args:
        side: The batch.
        credit: The credit of the loss's paper.

    Returns:
        Weights, without unit, float32 at least [turns]; without gradient.
    """
    if side.weight is not None:
        return side.weight.detach().to(side.precision)
    position = side.turn_position.to(side.precision)
    turns = side.turns_per_trajectory[side.turn_trajectory].to(side.precision)
    confidence = side.confidence() if "reference" in credit.needs else None
    return credit.weigh(position, turns, confidence)
