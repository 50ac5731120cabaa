"""Losses and a credit with a mistake, as a user may write them."""

from perturn.credit.single_turn import Discount
from perturn.losses import LossTraits
from perturn.losses.sft import SFT


class Detached(SFT):
    """A loss without gradient."""

    def __call__(self, chosen, rejected=None):
        """Return `sft` without its gradient."""
        return super().__call__(chosen, rejected).detach()


class Undefined(SFT):
    """A loss that is no number."""

    def __call__(self, chosen, rejected=None):
        """Return NaN with a gradient."""
        return super().__call__(chosen, rejected) * float("nan")


class Noted(SFT):
    """A loss with a diagnostic that is no tensor."""

    traits = LossTraits(diagnostics=True)

    def diagnostics(self, chosen, rejected):
        """Return a number of Python."""
        return {"rows": 2.0}


class Broken(Discount):
    """A credit that fails."""

    def __call__(self, group):
        """Fail."""
        raise KeyError("state")
