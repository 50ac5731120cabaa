"""Row makers and explorers of a user whose settings or counts a run cannot write to its files."""

import enum
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from perturn.config.parsing import parse
from perturn.config.recipe import Recipe
from perturn.config.row_maker_settings import Made, RowInputs, RowTraits, rows_made
from perturn.errors import ConfigError
from perturn.explore import Explorer
from perturn.types import Action, Task, Trajectory, Turn, WeightedTrajectory
from small import small
from support.guests import added


class Bare:
    """A row maker without a decorator."""

    traits: ClassVar[RowTraits] = RowTraits("single")
    needs: ClassVar[tuple] = ()

    def __call__(self, inputs):
        """Return no rows."""
        return Made([])


@dataclass(frozen=True)
class WithFile(Bare):
    """A setting that is a path."""

    file: Path = Path("words.txt")


class Mode(enum.StrEnum):
    """Values of a setting."""

    A = "a"


@dataclass(frozen=True)
class WithMode(Bare):
    """A setting that is a member of an enumeration."""

    modes: tuple[Mode, ...] = (Mode.A,)


@dataclass(frozen=True)
class WithSet(Explorer):
    """A setting that is a set."""

    kinds: frozenset[str] = frozenset({"a"})


@pytest.mark.parametrize(
    ("section", "kind", "says"),
    [
        (
            "rows",
            Bare,
            "rows.name must be a dataclass; write @dataclass(frozen=True) above the class, got 'mine'.",
        ),
        (
            "rows",
            WithFile,
            "rows.file must be a text, a number, true, false or null, or a list or mapping of these",
        ),
        ("rows", WithMode, "rows.modes[0] must be a text, a number"),
        ("explore", WithSet, "explore.kinds must be a text, a number"),
    ],
)
def test_settings_are_values_of_a_recipe(section, kind, says):
    """Otherwise the run ends in a traceback when it writes its recipe."""
    table = {"rows": "perturn.rows", "explore": "perturn.explorers"}[section]
    with added(table, mine=kind), pytest.raises(ConfigError, match=f"^{re.escape(says)}"):
        parse(Recipe, small(**{section: {"name": "mine"}}))


EPISODE = Trajectory(Task("a"), (Turn((), Action("go")),) * 2)


@dataclass(frozen=True)
class Counting(Bare):
    """A row maker with given counts."""

    counts: ClassVar[dict] = {}

    def __call__(self, inputs):
        """Return a row."""
        return Made([WeightedTrajectory(EPISODE, np.ones(2))], self.counts)


def test_numbers_of_numpy_are_written_to_files():
    """As numbers of Python."""
    mine = type("Mine", (Counting,), {"counts": {"kept": np.int64(1), "others": np.sum([2])}})()

    made = rows_made(mine, RowInputs([EPISODE] * 3))

    assert json.dumps(made.counts) == '{"kept": 1, "others": 2}'
    assert json.dumps(made.rows[0].weight) == "[1.0, 1.0]"


def test_counts_are_whole():
    mine = type("Mine", (Counting,), {"counts": {"kept": 0.5}})()
    says = "kept in the counts of row maker Mine must be a whole number, got 0.5."

    with pytest.raises(ConfigError, match=re.escape(says)):
        rows_made(mine, RowInputs([EPISODE] * 3))
