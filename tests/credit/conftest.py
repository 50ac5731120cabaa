"""Groups of trajectories, written down shortly."""

import math

import pytest
import torch

from perturn.credit_check.stand_ins import stand_ins
from perturn.methods.siop.siop_credit import OwnAnswer
from perturn.needs import keyword, name_of
from perturn.types import Remaining
from support.states import episode as _episode


@pytest.fixture(scope="session")
def episode():
    """Return the builder of a trajectory."""
    return _episode


def _answers(group):
    """Log-probabilities of a gold answer that follow from the states alone, before each turn and after the last."""
    known = {"a": -2.0, "b": -0.5, "c": -1.0, None: -1.5}
    return [[*(known[turn.state_key] for turn in one.turns), -0.25] for one in group]


def _clusters(group):
    """Clusters of final answers that follow from the last state alone; some end without an answer."""
    known = {"a": 0, "b": 1, "c": 0, None: -1}
    return [known[one.turns[-1].state_key] if one.turns else -1 for one in group]


def _own_answers(group):
    """Log-probabilities of as many answers as the cluster has, which follow from the states alone."""
    known = {"a": (-2.0, -1.0), "b": (-0.5, -0.75), "c": (-1.0, -3.0), None: (-1.5, -0.25)}
    return [
        [[*known[turn.state_key]][: cluster + 1] for turn in one.turns] + [[-0.25, -0.5][: cluster + 1]]
        for one, cluster in zip(group, _clusters(group), strict=True)
    ]


def _matches(group):
    """How well the calls of a turn match, which follows from its state alone: none, one or two calls."""
    known = {"a": (), "b": (1.0, 0.0), "c": (0.75,), None: (0.5,)}
    return [[known[turn.state_key] for turn in one.turns] for one in group]


def _branches(group):
    """What episodes that were played on earned, which follows from the state alone; from some states none was."""
    known = {"a": 0.25, "b": math.nan, "c": -1.0, None: 0.5}
    return [[known[turn.state_key] for turn in one.turns] for one in group]


def _feedback(group):
    """How much likelier the reply to a turn made the next one, which follows from the state alone; last, nothing."""
    known = {"a": 0.25, "b": -0.5, "c": math.nan, None: 1.0}
    return [
        [*(known[turn.state_key] for turn in one.turns[:-1]), math.nan][: len(one.turns)] for one in group
    ]


def _contributions(group):
    """What each turn contributed, which follows from the state alone."""
    known = {"a": 0.25, "b": -0.5, "c": 0.125, None: 0.0}
    return [[known[turn.state_key] for turn in one.turns] for one in group]


def _reference(group):
    """Log-probabilities of the tokens of a turn under a reference, which follow from the state alone."""
    known = {"a": [-0.5, -1.0], "b": [-2.0], "c": [-0.25, -0.25], None: [-1.0]}
    return [[torch.tensor(known[turn.state_key], dtype=torch.float64) for turn in one.turns] for one in group]


def _progress(group):
    """Those under a policy that was trained: some turns are likelier, some less, and some are as likely."""
    more = {"a": 0.25, "b": -0.5, "c": 0.0, None: 1.0}
    return [
        [its + more[turn.state_key] for turn, its in zip(one.turns, theirs, strict=True)]
        for one, theirs in zip(group, _reference(group), strict=True)
    ]


def _values(group):
    """What is to be expected before a turn, which follows from its state alone."""
    known = {"a": 0.25, "b": 0.5, "c": 0.75, None: 0.5}
    return [[[known[turn.state_key]] for turn in one.turns] for one in group]


_RICHER = {
    "values": _values,
    "reference": _reference,
    "progress": _progress,
    "answer": _answers,
    "answer-clusters": lambda group: list(map(OwnAnswer, _clusters(group), _own_answers(group))),
    "tool-matches": _matches,
    "branch-returns": _branches,
    "feedback": _feedback,
    "contributions": _contributions,
    "distance": lambda group: [[turn.remaining or Remaining(2, 1) for turn in one.turns] for one in group],
}
"""Entries with more cases than those that a quantity has on a small process, such as NaN or several calls a turn."""


@pytest.fixture(scope="session")
def weigh():
    """Return what asks a credit, and gives it what it needs beside the group."""

    def entries(need, group):
        richer = _RICHER.get(name_of(need))
        return stand_ins(need, group) if richer is None else richer(group)

    def ask(credit, group):
        return credit(group, **{keyword(name_of(need)): entries(need, group) for need in credit.needs})

    return ask


@pytest.fixture(scope="session")
def scored():
    """Return the builder of a group of one-turn trajectories by their scores."""
    return lambda *scores: [_episode([None], [score], sample=i) for i, score in enumerate(scores)]


@pytest.fixture(scope="session")
def walk():
    """Two trajectories that part at b, and one that comes by a twice."""
    return [
        _episode(["a", "b"], [0.0, 1.0], sample=0),
        _episode(["a", "b"], [0.0, 0.0], sample=1),
        _episode(["a", "a", "c"], [0.0, 0.0, 1.0], sample=2),
    ]
