"""A credit's contract: a group of trajectories in, a number per turn out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from perturn.needs import Needs
from perturn.types import Trajectory


@dataclass(frozen=True)
class CreditTraits:
    """Properties of a credit, and the episodes that it takes."""

    needs_group: bool = False
    """It compares the trajectories of a group, so that one by itself gets nothing."""
    weighs_alone: bool = False
    """With `needs_group`: a trajectory alone in its group gets weights all the same."""
    across_tasks: bool = False
    """Its statistics run over several tasks: it is given all groups of an iteration in one call, else one per
    call."""
    unbiased: bool = False
    """Its expected gradient is the true gradient, up to a positive factor; `perturn check-credit` measures it."""
    discount: float = 1.0
    """Discount, from one turn to the next, of the return whose gradient it estimates."""
    trains_branches: bool = False
    """Branches are in the group, and are trained on. Each has the `sample` of its explored episode in `origin`, and the
    number of turns that it shares with it in `taken_over`; weights of shared turns are ignored in the branch."""
    takes_prover: bool = False
    """Branches may come from another policy than the explored episodes."""
    takes_unfinished: bool = False
    """It also weighs UNFINISHED episodes, which go on in the next iteration and whose outcome is not known."""
    sets_clip: bool = False
    """With `needs_group`: it has a method `clips`, which returns a factor on the clip range of each turn."""


class Credit(Protocol):
    """A frozen dataclass of settings that weighs the turns of a group once called.

    It is given the quantities that it `needs` as keyword arguments: `tool-matches` as `tool_matches`. A quantity with
    settings is requested by a type of `perturn.needs`, such as `Answer(last_gain=False)`, which says what is given.

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
        """Quantities that must be computed first; a property where they depend on the settings."""

    @property
    def traits(self) -> CreditTraits:
        """Its properties, and the episodes that it takes; a property where they depend on the settings."""

    def __init__(self, **settings: Any) -> None:
        """Take the settings by name."""

    def __call__(self, group: Sequence[Trajectory], **needed: Any) -> list[Tensor]:
        """Return one tensor per trajectory, without unit [turns]."""


class ClipCredit(Credit, Protocol):
    """A credit that also sets the clip range of each turn: one with the trait `sets_clip`."""

    def clips(self, group: Sequence[Trajectory], **needed: Any) -> list[Tensor] | None:
        """Return a factor > 0 on the clip range of each turn, one tensor per trajectory [turns].

        None: as the loss is.
        """


@runtime_checkable
class TurnCredit(Credit, Protocol):
    """A credit whose number depends on the turn alone, so that a loss can ask it without a group."""

    def weigh(self, position: Tensor, turns: Tensor, confidence: Tensor | None) -> Tensor:
        """Return the weight of each turn, without unit [turns].

        Args:
            position: Position t of each turn in its trajectory, from 0 [turns]; floating point.
            turns: Number of turns T of the trajectory each turn belongs to [turns]; floating point.
            confidence: p, the geometric mean of pi_ref over the tokens of each turn, in (0, 1] [turns]; None unless
                the credit needs `reference`.
        """
