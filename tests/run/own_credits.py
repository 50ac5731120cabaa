"""Credits of somebody's, most of them wrong in some way."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from perturn.credit import CreditTraits


class Own:
    """A credit of somebody's: what it is called with."""

    needs: ClassVar[Any] = ()
    traits = CreditTraits()
    calls: list = []  # noqa: RUF012

    def __init__(self, value: float = 1.0):
        self.value = value

    def __call__(self, group, **needed):
        """Note who is weighed."""
        self.calls.append([one.key for one in group])
        return [torch.full((len(one.turns),), self.value + one.sample) for one in group]


class Needy(Own):
    """One that reads what is not there."""

    needs = ("behavior",)


class Vague(Own):
    """One that reads values of nobody knows what."""

    needs = ("values",)


class Mute(Own):
    """One that does not say that it reads nothing."""

    needs = None


class Listed(Own):
    """One that says what it reads as a list."""

    needs: ClassVar[Any] = ["reference"]


class Deaf(Own):
    """One that does not take what it needs."""

    needs = ("entropy",)

    def __call__(self, group, *, entropies):
        """Ask for another keyword."""


class Clever(Own):
    """One whose traits raise."""

    @property
    def traits(self):
        """Name a trait that is not there."""
        return CreditTraits(need_group=True)


@dataclass(frozen=True)
class Called:
    """One with a setting that has the key of its own name."""

    needs: ClassVar[Any] = ()
    traits: ClassVar[Any] = CreditTraits()
    name: str = "x"


class Across(Own):
    """One whose statistics run over all tasks."""

    traits = CreditTraits(across_tasks=True)


class Wrong(Own):
    """One that raises."""

    def __call__(self, group, **needed):
        """Raise."""
        raise KeyError("state")


class Short(Own):
    """One that forgets a trajectory."""

    def __call__(self, group, **needed):
        """Leave the first out."""
        return super().__call__(group)[1:]


class Flat(Own):
    """One that weighs the first turn alone."""

    def __call__(self, group, **needed):
        """Give one number each."""
        return [torch.ones(1) for _ in group]


class Raising(Own):
    """One that cannot be made."""

    def __init__(self, value: float = 1.0):
        raise KeyError("no luck")


def evenly(group):
    """A function, where a class is asked for."""
    return [torch.ones(len(one.turns)) for one in group]
