"""Every credit of a group against an implementation that shares no code with it, on groups drawn at random."""

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from perturn.credit import CREDITS
from perturn.methods.archer.archer_credit import Critique
from perturn.methods.siop.siop_credit import OwnAnswer
from perturn.needs import keyword, names_of
from perturn.types import Remaining

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "credits.json").read_text())


def with_path(trajectory, path):
    """The trajectory with the way that is left around each turn."""
    turns = zip(trajectory.turns, pairwise(path), strict=True)
    return replace(trajectory, turns=tuple(replace(turn, remaining=Remaining(*both)) for turn, both in turns))


def unknown_as_nan(numbers):
    """Numbers of the turns of a trajectory, or one of itself, or what critics say, as JSON can hold them."""
    if isinstance(numbers, dict):
        return Critique(**numbers)
    if not isinstance(numbers, list):
        return numbers
    return [math.nan if number is None else number for number in numbers]


STORED = {"tool-matches": "matches", "branch-returns": "branches"}
"""Quantity -> its key in the stored cases, where that is another one."""


def given(name, row):
    """A quantity of a trajectory, as a credit is given it."""
    if name == "answer-clusters":
        return OwnAnswer(row["clusters"], unknown_as_nan(row["answers"]))
    if name == "distance":
        return [Remaining(*both) for both in pairwise(row["path"])]
    return unknown_as_nan(row[STORED.get(name, name)])


def test_no_credit_of_a_group_is_left_out():
    """No credit that reads values is left out either; other credits may be there too."""
    grouped = {
        name
        for name, each in CREDITS.items()
        if each().traits.needs_group or {"values", "critics"} & names_of(each().needs)
    }

    assert grouped <= {case["credit"] for case in GOLDEN["cases"]} <= CREDITS.keys()


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: f"{case['credit']} {case['settings']}")
def test_a_credit_is_its_formula(episode, case):
    """1e-9 is far above float64 rounding; division by a small spread asks for it."""
    credit = CREDITS[case["credit"]](**case["settings"])
    for rows, expected in zip(GOLDEN["groups"], case["expected"], strict=True):
        group = [
            with_path(
                episode(one["states"], one["rewards"], valid=one["valid"], success=one["success"], sample=i),
                one["path"],
            )
            for i, one in enumerate(rows)
        ]

        needed = {keyword(name): [given(name, one) for one in rows] for name in names_of(credit.needs)}
        found = credit(group, **needed)

        for one, other in zip(found, expected, strict=True):
            assert_close(one, torch.tensor(other, dtype=one.dtype), rtol=1e-9, atol=1e-9)
