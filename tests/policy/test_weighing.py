"""What a credit of others returns is checked where it is written, so that no turn gets the weight of another."""

import re
from itertools import pairwise
from typing import Any, ClassVar

import pytest
import torch

from perturn.credit import CREDITS
from perturn.credit.protocol import CreditTraits
from perturn.credit.returns import Return
from perturn.credit.rloo import RLOO
from perturn.errors import ConfigError
from perturn.losses import LOSSES
from perturn.needs import Needs
from perturn.policy.credit_weights import asked, weigh
from perturn.policy.examples import Example, encode_example
from perturn.training.credit_choice import choose_credit, credit_of
from perturn.types import Action, PreferencePair, Remaining, Task, Trajectory, Turn


class Foreign:
    """A credit that returns what it was given, whatever the trajectories."""

    needs: ClassVar[Needs] = ()
    traits: ClassVar[CreditTraits] = CreditTraits()

    def __init__(self, returned: Any = None) -> None:
        self.returned = returned

    def __call__(self, group, **_):
        """The weights, whether they fit or not."""
        return self.returned


@pytest.fixture
def example(renderer) -> Example:
    """A pair of trajectories of two turns each."""
    chosen, rejected = (
        Trajectory(
            Task("t/0"),
            tuple(Turn(({"role": "user", "content": "room"},), Action(word)) for word in words),
        )
        for words in (("north", "take"), ("south", "drop"))
    )
    return encode_example(PreferencePair(chosen, rejected), renderer, None)


WRONG = [
    [torch.ones(1)],
    [torch.ones(3)],
    [torch.ones(2, 1)],
    [torch.ones(2, dtype=torch.long)],
    [torch.tensor([1.0, float("nan")])],
    [torch.tensor([1.0, float("inf")])],
    [torch.ones(2), torch.ones(2)],
    [],
    [[1.0, 1.0]],
    None,
]


@pytest.mark.parametrize("returned", WRONG, ids=str)
def test_a_credit_returns_one_finite_number_a_turn(example, returned):
    """One too few here and one too many there add up to a batch of the right size and the wrong turns."""
    with pytest.raises(
        ConfigError,
        match=r"credit Foreign must return .* (for the 2 turns of task 't/0'|for 1 trajectories it returned [02])",
    ):
        weigh(example, Foreign(returned))


def test_weights_carry_no_gradient(example):
    """A credit may compute them with one; a loader that copies them to processes could not."""
    weighed = weigh(example, Foreign([torch.full((2,), 0.5, requires_grad=True)]))

    assert [weight.tolist() for weight in weighed.weight] == [[0.5, 0.5]] * 2
    assert not any(weight.requires_grad for weight in weighed.weight)


def test_a_credit_that_needs_what_training_does_not_compute_is_refused(monkeypatch):
    """When the trainer is made, not as a missing argument inside the credit."""

    class Needy(Foreign):
        needs = ("behavior", "reference")

    monkeypatch.setitem(CREDITS._own, "needy", Needy)

    with pytest.raises(
        ConfigError, match=r"needs behavior, which training does not compute; .* with rows\.name=groups"
    ):
        choose_credit(LOSSES["dpo"](), {}, {"name": "needy"})


def test_a_credit_of_ones_own_is_named_by_where_it_is():
    """In a recipe as in `perturn check-credit`; its settings are checked alike."""
    own = {"name": "perturn.credit.rloo:RLOO", "returns": {"invalid_penalty": 0.1}}

    assert choose_credit(LOSSES["ppo-clip"](), {}, own) == RLOO(returns=Return(invalid_penalty=0.1))
    with pytest.raises(ConfigError, match=r"unknown key 'credit\.returned'\. Did you mean 'credit\.returns'"):
        choose_credit(LOSSES["ppo-clip"](), {}, {"name": own["name"], "returned": {}})


@pytest.mark.parametrize("name", [name for name, each in CREDITS.items() if each().traits.needs_group])
def test_a_credit_of_a_group_is_refused_for_a_loss_on_pairs(name):
    """The sides of a pair are no group, and each by itself would get 0 for every turn."""
    said = re.escape(f"credit '{name}' compares the trajectories of a group, and loss 'dpo'")
    with pytest.raises(ConfigError, match=said):
        choose_credit(LOSSES["dpo"](), {"name": "dpo"}, {"name": name})


@pytest.mark.parametrize("section", [None, {"name": "gigpo"}])
def test_a_credit_of_a_group_is_refused_where_rows_are_weighed_one_by_one(section):
    """Which is what showing rows does; a group's weights would all be 0."""
    with pytest.raises(
        ConfigError, match=r"compares the trajectories of a group, and a row stands alone; name a credit"
    ):
        credit_of({"name": "ppo-clip"}, section)


def test_a_credit_of_a_group_takes_nothing_that_is_computed_for_turns_that_are_kept(monkeypatch):
    """It sees whole episodes, and training computes the reference of what fits; of groups it is computed before."""

    class Needy(Foreign):
        needs = ("reference",)
        traits = CreditTraits(needs_group=True)

    monkeypatch.setitem(CREDITS._own, "needy", Needy)

    with pytest.raises(
        ConfigError, match="credit 'needy' needs reference, which training does not compute of a"
    ):
        choose_credit(LOSSES["sft"](), {"name": "sft"}, {"name": "needy"})
    chosen = choose_credit(LOSSES["ppo-clip"](), {"name": "ppo-clip"}, {"name": "needy"})
    with pytest.raises(ConfigError, match="credit Needy needs reference, which training does not provide"):
        asked(chosen, [])


def test_an_error_among_masked_turns_is_the_first_one_all_the_same(renderer):
    """Both sides err in their second turn, which is masked: all that is left comes after it, and weighs 1.

    The masked episode alone would err in its fourth turn first, and weigh 0.2, 1, and 1, 1.
    """

    def played(path, *said):
        turns = [
            Turn(({"role": "user", "content": f"room {i}"},), Action(text), remaining=Remaining(*both))
            for i, (text, both) in enumerate(zip(said, pairwise(path), strict=True))
        ]
        return Trajectory(Task("t/0"), tuple(turns))

    row = PreferencePair(
        played([3, 2, 2, 1, 0], "go", "wait", "take it", "put it"),
        played([3, 2, 2, 1, 1], "go", "wait", "look up", "sleep"),
    )
    credit = CREDITS["first-error"]()
    masked, kept = (
        weigh(encode_example(row, renderer, None, shared_prefix=how), credit) for how in ("mask", "keep")
    )

    assert [len(set(side.loss_turns)) for side in masked.sides] == [2, 2]
    assert [each.tolist() for each in masked.weight] == [[1, 1], [1, 1]]
    assert [each.tolist() for each in kept.weight] == [pytest.approx([0.2, 1, 1, 1])] * 2
