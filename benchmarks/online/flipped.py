"""RLOO with its sign flipped, as a control that must make a policy worse."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from perturn.credit.protocol import CreditTraits
from perturn.credit.returns import Return
from perturn.credit.rloo import RLOO
from perturn.needs import Needs
from perturn.types import Trajectory


@dataclass(frozen=True)
class Flipped:
    """The negative advantage of RLOO."""

    needs: ClassVar[Needs] = ()
    traits: ClassVar[CreditTraits] = CreditTraits(needs_group=True)

    returns: Return = Return()  # noqa: RUF009  frozen
    """Rewards that are summed to the return."""

    def __call__(self, group: Sequence[Trajectory], **_: Any) -> list[Tensor]:
        """Return the advantage of every turn, one tensor for each trajectory, in units of reward [turns]."""
        return [-weight for weight in RLOO(returns=self.returns)(group)]
