"""Interface of a credit, which maps a group of trajectories to one number per turn."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from perturn.needs import Needs
from perturn.types import Trajectory


@dataclass(frozen=True)
class CreditTraits:
    """Properties of a credit: the episodes that it accepts, and the gradient that it estimates."""

    needs_group: bool = False
    """Whether the credit compares the trajectories of a group. A trajectory alone in its group then gets weight 0."""
    weighs_alone: bool = False
    """With `needs_group`, whether a trajectory alone in its group still gets weights other than 0."""
    across_tasks: bool = False
    """Whether the statistics of the credit run over several tasks. If True, one call gets all groups of an iteration;
    if False, one call gets one group."""
    unbiased: bool = False
    """Whether the expected gradient is the true gradient, up to a positive factor. `perturn check-credit` measures
    this."""
    discount: float = 1.0
    """Discount from one turn to the next, in [0, 1], of the return whose gradient the credit estimates."""
    trains_branches: bool = False
    """Whether the group contains branches, which are trained on too. Each branch names its explored episode in
    `origin`, and its number of shared turns in `taken_over`. A branch's weights of shared turns are ignored."""
    takes_prover: bool = False
    """Whether the policy that plays the branches may differ from the policy that explored."""
    takes_unfinished: bool = False
    """Whether the credit also weighs UNFINISHED episodes. They resume in the next iteration, so their outcome is not
    known yet."""
    weighs_sides: bool = False
    """Whether the weights are for both sides of a pair, so in a failed episode a larger weight is a larger penalty.
    `perturn measure` negates such weights in failed episodes."""
    compares_states: bool = False
    """Whether the credit compares turns with equal state keys. A run then says how many turns have none."""
    sets_clip: bool = False
    """With `needs_group`, whether the credit has a method `clips` that returns a factor on each turn's clip range."""


class Credit(Protocol):
    """Frozen dataclass of settings that weighs the turns of a group when called.

    The quantities in `needs` are passed as keyword arguments: `tool-matches` becomes `tool_matches`. A quantity that
    has settings is requested by a type of `perturn.needs`, such as `Answer(last_gain=False)`. Its docstring describes
    the argument that the credit gets.

    ```python
    @dataclass(frozen=True)
    class Margin:
        needs: ClassVar[Needs] = ()
        traits: ClassVar[CreditTraits] = CreditTraits(needs_group=True)

        def __call__(self, group, **needed):
            best = max(one.total_reward for one in group)
            return [torch.full((len(one.turns),), one.total_reward - best) for one in group]
    ```
    """

    @property
    def needs(self) -> Needs:
        """Quantities to compute before the call. Define a property if they depend on the settings."""

    @property
    def traits(self) -> CreditTraits:
        """Properties of the credit. Define a property if they depend on the settings."""

    def __init__(self, **settings: Any) -> None:
        """Store the settings, which are given as keyword arguments."""

    def __call__(self, group: Sequence[Trajectory], **needed: Any) -> list[Tensor]:
        """Return the weight of each turn, one tensor per trajectory [turns]."""


class ClipCredit(Credit, Protocol):
    """Credit with the trait `sets_clip`, which also sets the clip range of each turn."""

    def clips(self, group: Sequence[Trajectory], **needed: Any) -> list[Tensor] | None:
        """Return a factor > 0 on the clip range of each turn, one tensor per trajectory [turns].

        None leaves the clip range of the loss unchanged.
        """


@runtime_checkable
class TurnCredit(Credit, Protocol):
    """Credit whose weight depends on the turn alone, so a loss can call it without a group."""

    def weigh(self, position: Tensor, turns: Tensor, confidence: Tensor | None) -> Tensor:
        """Return the weight of each turn, without unit [turns].

        Args:
            position: Position t of each turn in its trajectory, from 0 [turns]; floating point.
            turns: Number of turns T of the trajectory each turn belongs to [turns]; floating point.
            confidence: p, the geometric mean of pi_ref over the tokens of each turn, in (0, 1] [turns]; None unless
                the credit needs `reference`.
        """
