"""Quantities of a user that fail, or that a credit cannot tell apart."""

import re

import pytest

from perturn.errors import ConfigError
from perturn.quantities import Computed, Quantity, QuantityTraits, Source, compute, wanted
from perturn.types import Action, Task, Trajectory, Turn

EPISODES = [Trajectory(Task("a"), (Turn((), Action("go")),))]


class Raises(Quantity):
    """It raises."""

    traits = QuantityTraits("none")

    def compute(self, request, episodes, source):
        """Fail."""
        return [][2]


class Lazy(Raises):
    """It returns a generator."""

    def compute(self, request, episodes, source):
        """Return no list."""
        return Computed(one for one in episodes)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Raises", "Raises' cannot be computed: IndexError: list index out of range"),
        ("Lazy", "Lazy' computes must be a list, got <generator"),
    ],
)
def test_a_quantity_that_fails_is_named(name, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        compute((f"{__name__}:{name}",), EPISODES, Source())


def test_two_quantities_have_two_keywords(tmp_path):
    """Otherwise a credit gets the values of one of them for both."""
    (tmp_path / "second_quantity.py").write_text(
        "from perturn.extend.quantity_tools import Quantity, QuantityTraits\n\n\n"
        "class Raises(Quantity):\n    traits = QuantityTraits('none')\n\n"
        "    def compute(self, request, episodes, source):\n        return None\n"
    )
    names = (f"{__name__}:Raises", f"{tmp_path}/second_quantity.py:Raises")

    with pytest.raises(
        ConfigError, match=r"the needs of the credit must differ in their keyword 'Raises', got .*Rename"
    ):
        wanted(names)
