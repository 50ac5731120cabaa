"""Interface between every loss and the trainer."""

from typing import Any, ClassVar, Protocol

from torch import Tensor

from perturn.credit import Credit
from perturn.losses.logprobs import TurnLogprobs


class Loss(Protocol):
    """A frozen dataclass of settings that computes a loss once called.

    A loss may also have `diagnostics(chosen, rejected)`: tensors by name to average and log. A tensor with a value for
    each token is logged as a mean over tokens, a tensor with a value for each trajectory as a mean over trajectories.
    The values replace what the trainer logs under their name; of no value, nothing is logged.

    A loss that couples the pairs of an optimizer step has `step_statistic(chosen)`: a number for each pair [pairs],
    or several [pairs, numbers], from reference, weights and counts alone, so that they are known of the whole step
    before the first pass. The loss and its diagnostics then take `step`, these numbers of all pairs of the step;
    without it, the pairs given are the step.

    A loss whose reference point is the policy's view of others' actions has `needs_mismatched = True`: its rows are
    labelled by the sign of their weights. It has `mismatch(side)`: a number for each trajectory of which the prompt is
    one row's and the actions are another's [trajectories], without gradient. The loss and its diagnostics then take
    `step`, that number of all rows of the step.

    A loss on what a policy has sampled has `needs_behavior = True`: it reads the log-probabilities that the actions
    were sampled with. It may have `needs_proximal`, which says whether it reads what training computed of them before
    the first step, and `turn_diagnostics(chosen)`: tensors by name to average by the position of a turn [turns].

    A loss that multiplies the clip range of a turn by `TurnLogprobs.clip` has `reads_clip = True`; credits and rows
    that have such factors are refused with any other.
    """

    needs_rejected: ClassVar[bool]
    """Whether the loss reads the rejected side."""

    @property
    def needs_reference(self) -> bool:
        """Whether the loss reads reference log-probabilities."""

    @property
    def credit(self) -> Credit:
        """The credit of its paper, asked where turns come without a weight."""

    def __init__(self, **settings: Any) -> None:
        """Take the settings by name."""

    def __call__(self, chosen: TurnLogprobs, rejected: TurnLogprobs) -> Tensor:
        """Return the loss [pairs]."""

    def rewards(self, side: TurnLogprobs) -> Tensor:
        """Return the implicit reward [trajectories], without gradient."""
