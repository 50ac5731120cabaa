"""A number of each token that no other loss reads, and a loss that reads it."""

from dataclasses import dataclass, replace
from typing import ClassVar

from perturn.extend.tensors import AGGREGATES, PPOClip, TokenInputTraits


@dataclass(frozen=True)
class Certainty:
    """Largest log-probability of the tokens that may come."""

    name: ClassVar[str] = "guest-certainty"
    traits: ClassVar[TokenInputTraits] = TokenInputTraits()

    def __call__(self, chunk):
        """Return one number per token, with gradient."""
        return chunk.logprobs.amax(-1)


@dataclass(frozen=True)
class CertaintyPrice(PPOClip):
    """Clipped policy gradient, plus a price of certainty."""

    price: float = 0.01

    @property
    def traits(self):
        """Those of ppo-clip, and the certainty."""
        return replace(super().traits, reads=frozenset({"guest-certainty"}))

    def __call__(self, chosen, rejected=None, step=None):
        """Return the loss [trajectories]."""
        counts = (self.step_statistic(chosen) if step is None else step)[:, 0]
        certainty = AGGREGATES[self.aggregate](chosen, chosen.input("guest-certainty"), counts)
        return super().__call__(chosen, rejected, step) + self.price * certainty

    def diagnostics(self, chosen, rejected=None, step=None):
        """Return those of ppo-clip, and the certainty."""
        own = super().diagnostics(chosen, rejected, step)
        return own | {"certainty": chosen.input("guest-certainty").detach()}
