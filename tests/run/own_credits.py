"""Credits of somebody's, most of them wrong in some way."""

import torch


class Own:
    """A credit of somebody's: what it is called with."""

    needs = frozenset()
    calls: list = []  # noqa: RUF012

    def __init__(self, value: float = 1.0):
        self.value = value

    def __call__(self, group, **needed):
        """Note who is weighed."""
        self.calls.append([one.key for one in group])
        return [torch.full((len(one.turns),), self.value + one.sample) for one in group]


class Needy(Own):
    """One that reads what is not there."""

    needs = frozenset({"behavior"})


class Vague(Own):
    """One that reads values of nobody knows what."""

    needs = frozenset({"values"})


class Mute(Own):
    """One that does not say that it reads nothing."""

    needs = None


class Listed(Own):
    """One that says what it reads as a list."""

    needs = ["reference"]  # noqa: RUF012


class Across(Own):
    """One whose statistics run over all tasks."""

    across_tasks = True


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
