"""RLOO with its sign flipped: a control that has to make a policy worse."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from perturn.credit.returns import Return
from perturn.credit.rloo import RLOO
from perturn.types import Trajectory


@dataclass(frozen=True)
class Flipped:
    """The negative advantage of RLOO."""

    needs: ClassVar[frozenset[str]] = frozenset()
    needs_group: ClassVar[bool] = True

    returns: Return = Return()  # noqa: RUF009  frozen
    """Rewards that count."""

    def __call__(self, group: Sequence[Trajectory], **_: Any) -> list[Tensor]:
        """Return the advantage of every turn, one tensor a trajectory, in units of reward [turns]."""
        return [-weight for weight in RLOO(returns=self.returns)(group)]
