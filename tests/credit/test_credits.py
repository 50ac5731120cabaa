"""The table of credits, and those that need no group: uniform, confidence, discount."""

import dataclasses
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch.testing import assert_close

from perturn.credit import CREDITS
from perturn.table import at_defaults
from perturn.training.credit_choice import check_credit
from perturn.types import Action, Remaining, Task, Trajectory, Turn

DEFAULTS = {
    "uniform": {},
    "confidence": {"pivot": 0.9, "low": 0.2, "high": 1.0},
    "discount": {"gamma": 0.7, "discount": "derived"},
    "first-error": {"turns": "from", "low": 0.2, "high": 1.0, "distance": "shortest"},
    "process-score": {"by": "progress", "distance": "shortest"},
    "grpo": {"normalize": "std", "statistics": "trajectories", "std": "sample", "singleton": "zero"},
    "dr-grpo": {"statistics": "trajectories", "singleton": "zero"},
    "maxrl": {},
    "rloo": {"statistics": "trajectories", "singleton": "zero"},
    "reinforce++": {"gamma": 1.0, "baseline": False, "statistics": "trajectories"}
    | {"std": "sample", "singleton": "zero"},
    "trloo": {"gamma": 1.0, "lam": 1.0},
    "anchor-rloo": {"gamma": 1.0},
    "gigpo": {"gamma": 0.95, "omega": 1.0, "normalize": "mean", "statistics": "trajectories"}
    | {"similarity": None, "invalid_penalty": 0.0},
    "hgpo": {"gamma": 0.95, "history": 2, "alpha": 1.0, "normalize": "mean", "base_group": False},
    "graphgpo": {"omega": 0.1, "success_reward": 10.0, "beta_episode": 1.0, "beta_graph": 1.0},
    "g2po": {"gamma": 0.95, "omega": 1.0, "normalize": "mean", "statistics": "trajectories"}
    | {"invalid_penalty": 0.1},
    "pgpo": {"gamma": 1.0, "alpha": 2.0, "beta": 1.0, "normalize": "std"},
    "matchtir": {"assignment": "hard", "regularization": 0.1, "unmatched_penalty": 0.0, "lam": 0.9}
    | {"baseline": "group", "singleton": "zero"},
    "igpo": {"gamma": 1.0, "gain": "probability", "normalize": "std", "pools": "joint", "std": "population"}
    | {"last_gain": False},
    "a2tgpo": {
        "alpha": 0.3,
        "gamma": 1.0,
        "gain": "probability",
        "normalize": "std",
        "std": "population",
        "clip_scale": 0.3,
    },
    "siop": {"lam": 0.5, "gamma": 1.0, "reference": "own", "members": 3, "same": "exact", "normalize": "std"}
    | {"std": "sample", "last_gain": True},
    "infopo": {"beta": 0.5, "temperature": 0.05, "normalize": "std", "std": "sample"}
    | {"placeholder": "No information found."},
    "progress-advantage": {"alpha": 0.1, "outcome": True, "reduction": "sum", "normalize": "std"}
    | {"std": "sample", "checkpoint": None},
    "oprl": {"alpha": 1.0, "step_gamma": 0.0, "reduction": "sum", "normalize": "std", "std": "sample"}
    | {"checkpoint": None},
    "spa": {"grounding": 0.0, "residual": True},
    "spo": {},
    "pav": {"alpha": 1.0},
    "portool": {"blend": 0.5, "value": "tree", "baseline": "others", "normalize": "mean", "count": "even"},
    "potential": {"distance": "shortest"},
    "arpo": {"normalize": "std", "std": "sample", "shared": "sum"},
    "slate": {"by": "reward", "normalize": "mean", "distance": "shortest"},
    "v0": {"prior": None},
    "turn-gae": {"gamma": 1.0, "lam": 1.0, "truncated": "end"},
    "bi-level-gae": {"gamma": 1.0, "lam": 1.0, "high_level_gamma": 1.0},
    "archer": {"gamma": 0.9, "tau": 0.1, "rounds": 1000, "penalty": 1e-4},
    "hiper": {"switch": "", "by": "reply", "gamma": 1.0, "lam": 1.0, "high_level_lam": 1.0},
}
"""Of the credits that read rewards, beside the return that they start from. The test of a new credit holds its own."""
WITHOUT_RETURNS = {"uniform", "confidence", "discount", "first-error", "process-score", "siop", "potential"}
RETURN = {"rewards": "turns", "invalid_penalty": 0.0}


def group_of(*turns):
    """Trajectories of so many turns each."""
    return [
        Trajectory(Task("t"), (Turn((), Action("go")),) * count, sample=i) for i, count in enumerate(turns)
    ]


@pytest.mark.parametrize("name", CREDITS)
def test_a_credit_at_its_defaults_gives_one_number_a_turn(episode, weigh, name):
    """And says what it is, what it reads and what it is like; it cannot be changed, and knows no other setting."""
    played = [
        episode(["a", "b"], [0.0, 1.0]),
        episode(["c"], [0.5], sample=1),
        episode([None], [0.0], sample=2),
    ]
    group = [
        replace(one, turns=tuple(replace(turn, remaining=Remaining(2, 1)) for turn in one.turns))
        for one in played
    ]
    credit = at_defaults(CREDITS[name])

    check_credit(credit, name)
    found = weigh(credit, group)

    assert credit.__doc__
    assert [one.shape for one in found] == [(2,), (1,), (1,)]
    assert all(one.isfinite().all() for one in found)
    with pytest.raises(TypeError):
        CREDITS[name](no_setting=1)


def test_defaults_are_the_documented_ones():
    found = {name: dataclasses.asdict(CREDITS[name]()) for name in DEFAULTS}
    returns = {name: settings.pop("returns", None) for name, settings in found.items()}

    assert found == DEFAULTS
    assert returns.pop("graphgpo") == RETURN | {"invalid_penalty": 0.1}
    assert {name for name, each in returns.items() if each is None} == WITHOUT_RETURNS
    assert all(each in (None, RETURN) for each in returns.values())


def test_hand_worked_confidence():
    """Means of log p -0.05 and -1: p = 0.951 > 0.9 takes 0.2, p = 0.368 takes 1; e^0 = 1 is not above pivot 1."""
    reference = [[torch.tensor([-0.1, 0.0]), torch.tensor([-1.0])]]

    (weights,) = CREDITS["confidence"]()(group_of(2), reference=reference)
    (at_pivot,) = CREDITS["confidence"](pivot=1.0)(group_of(1), reference=[[torch.zeros(1)]])

    assert_close(weights, torch.tensor([0.2, 1.0]))
    assert at_pivot.tolist() == [1.0]


def test_hand_worked_discount():
    """Gamma = 1/2, T = 2: phi(0) = 1, phi(1) = 1/2 (1 - 1/2) / (1 - 1/4) = 1/3; T = 1: 1. Printed: 2/3."""
    derived = CREDITS["discount"](gamma=0.5)(group_of(2, 1))
    printed = CREDITS["discount"](gamma=0.5, discount="printed")(group_of(2))

    assert_close(derived[0], torch.tensor([1.0, float(Fraction(1, 3))]))
    assert derived[1].tolist() == [1.0]
    assert_close(printed[0], torch.tensor([1.0, float(Fraction(2, 3))]))


@pytest.mark.parametrize(
    ("reference", "message"), [(None, "needs reference="), ([[torch.zeros(1)]], "one entry for each turn")]
)
def test_a_missing_or_short_reference_is_refused(reference, message):
    with pytest.raises(ValueError, match=message):
        CREDITS["confidence"]()(group_of(2), reference=reference)


@pytest.mark.parametrize(
    ("name", "setting", "message"),
    [
        ("confidence", {"pivot": 1.1}, "pivot must be <= 1, got 1.1"),
        ("confidence", {"low": 0.0}, "low must be > 0, got 0.0"),
        ("confidence", {"low": 2.0}, "high must be >= low"),
        ("discount", {"gamma": -0.1}, "gamma must be >= 0, got -0.1"),
        ("discount", {"discount": "own"}, "discount must be one of derived, printed"),
    ],
)
def test_settings_outside_their_range_are_refused(name, setting, message):
    with pytest.raises(ValueError, match=message):
        CREDITS[name](**setting)
