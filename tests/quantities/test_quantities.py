"""The table of quantities: what each entry says of itself, and its exact value on small processes."""

import math
import re
from typing import ClassVar

import pytest
import torch

from perturn.credit import CREDITS
from perturn.credit_check.processes import PROCESSES
from perturn.errors import ConfigError
from perturn.methods.siop.siop_credit import AnswerClusters
from perturn.methods.trace.mixed_branches import SuccessChance
from perturn.methods.trace.success_chance import PredictedSuccess
from perturn.needs import BranchReturns, Need, Progress, Values, keyword, name_of, names_of
from perturn.quantities import (
    QUANTITIES,
    Computed,
    Ground,
    Quantity,
    QuantityTraits,
    Source,
    compute,
    find,
    policies_of,
)
from perturn.quantities.entropy import TurnEntropy, entropies_of
from perturn.quantities.protocol import DeclaredSource
from perturn.quantities.readers import Models, open_reader
from perturn.types import Action, Task, Trajectory, Turn

REQUESTS = {name_of(need): need for entry in CREDITS.values() for need in entry().needs}
"""Requests of quantities by credits at their defaults; a quantity that is not here is requested by its name alone."""
GROUPED = {
    name for entry in CREDITS.values() if entry().traits.needs_group for name in names_of(entry().needs)
}
"""Quantities that credits of groups read, of which the bias meter must know exact values."""
EXACT = sorted(name for name, kind in QUANTITIES.items() if kind.exact is not Quantity.exact)


def said(*texts, total=0.0, sample=0):
    """An episode with these actions."""
    turns = tuple(Turn(({"role": "user", "content": "go on"},), Action(text)) for text in texts)
    return Trajectory(Task("t"), turns, total_reward=total, success=total > 0, sample=sample)


@pytest.mark.parametrize("name", QUANTITIES)
def test_an_entry_says_what_it_computes_and_what_that_costs(name):
    """And is requested by its own name; a pass is one of a policy that it names, of which it may read less."""
    quantity, request = find(REQUESTS.get(name, name))

    assert quantity.traits.cost
    assert quantity.__doc__
    assert (request.name if type(request) is not Need else name) == name
    assert quantity.policies(request) or not quantity.traits.passes


@pytest.mark.parametrize("process", PROCESSES, ids=lambda process: process.name)
@pytest.mark.parametrize("name", EXACT)
def test_an_exact_value_is_one_entry_an_episode(name, process):
    quantity, request = find(REQUESTS.get(name, name))
    episodes = process.episodes

    found = quantity.exact(request, Ground(episodes, 0.9, process.prover.episodes))

    assert len(found) == len(episodes.steps)


def test_what_credits_of_groups_read_has_exact_values():
    """So that each of these credits can be measured."""
    assert set(EXACT) >= GROUPED


def test_a_quantity_without_an_exact_value_says_so():
    with pytest.raises(ValueError, match="quantity Mood has no exact value on a small process"):
        Mood().exact(None, None)


def test_exact_values_by_hand():
    """The loop's policy over three actions, and who plays branches takes them alike: half of a third, and so on."""
    process = PROCESSES[0]
    ground = Ground(process.episodes, 1.0, process.prover.episodes)
    chances = process.policy(0)
    entropy = -sum(each * math.log(each) for each in chances) / math.log(3)

    found = TurnEntropy().exact(None, ground)
    branches = find("branch-returns")[0].exact(BranchReturns(), ground)
    success = PredictedSuccess().exact(SuccessChance(), ground)

    assert found[0][0] == pytest.approx(entropy)
    third = 1 / 3
    assert float(branches[0][0]) == pytest.approx(0.5 * (third + third**2 + third**3))
    assert success[0].own[0] == pytest.approx(0.5 * chances[0] * (1 + chances[1] + chances[1] ** 2))


def test_entropies_are_of_the_policy_that_acted_and_none_of_no_turn(tiny_model, tokenizer):
    """Through the table as by the function; an even policy has 1."""
    reader = open_reader(tiny_model, tokenizer)
    episodes = [said("left", "right"), said(), said("left", sample=1)]

    found = TurnEntropy().compute(None, episodes, Models({"acted": reader})).entries

    assert found == entropies_of(episodes, reader)
    assert [len(each) for each in found] == [2, 0, 1]
    assert all(0 < value <= 1 for each in found for value in each)


def test_chances_are_of_other_folds(tiny_model, tokenizer):
    """Six tasks, three of them solved: each has the chance by the others, and by the others less each other fold."""
    episodes = [
        Trajectory(Task(f"{n}"), said(f"say {n}", "on").turns, total_reward=n % 2, success=n % 2 == 1)
        for n in range(6)
    ]
    computed = PredictedSuccess().compute(
        SuccessChance(), episodes, Models({"acted": open_reader(tiny_model, tokenizer)})
    )

    assert {one.fold for one in computed.entries} == set(range(5))
    for one in computed.entries:
        assert len(one.own) == 2
        assert one.without.keys() == set(range(5)) - {one.fold}
    assert computed.counts.keys() == {"explained_variance"}


def test_policies_are_those_of_the_request():
    """A named one, the reward model or the policy that explored; beside each its reference."""
    assert policies_of((Progress("some/model"),)) == {"some/model", "reference"}
    assert policies_of((Progress(reward_model=True),)) == {"reward", "reference"}
    assert policies_of((Progress(),)) == {"explorer", "reference"}
    assert policies_of((AnswerClusters(), "reference")) == {"acted", "reference"}


def test_a_keyword_is_a_name_of_python():
    assert [keyword(name) for name in ("tool-matches", "mine:Mood", "values")] == [
        "tool_matches",
        "Mood",
        "values",
    ]


class Mood(Quantity):
    """Nothing but a number."""

    traits: ClassVar[QuantityTraits] = QuantityTraits("nothing")

    def compute(self, request, episodes, source):
        """One an episode."""
        return Computed([source.seed("mood") for _ in episodes])


class Costly(Mood):
    """One with a trait beside its traits."""

    passes = 3


class Failing(Mood):
    """One that cannot be made."""

    def __init__(self):
        raise KeyError("no luck")


class Unchecked(Mood):
    """One whose check is never called."""

    def chek(self, request, planned):
        """Reject everything."""


class Inexact(Mood):
    """One whose exact value is never read."""

    exat = Quantity.exact


class Unwritten(Quantity):
    """One that computes nothing."""


def test_a_quantity_is_named_by_where_it_is():
    quantity, request = find(f"{__name__}:Mood")

    assert quantity.compute(request, [said("on")], Source()).entries == [0]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Costly", r"Did you mean `QuantityTraits\(passes=...\)`"),
        ("Unchecked", "quantity Unchecked has 'chek', which is never read. Did you mean `check`?"),
        ("Inexact", "quantity Inexact has 'exat', which is never read. Did you mean `exact`?"),
        ("Failing", r"needs '.*:Failing': .*Failing cannot be made: KeyError: 'no luck'"),
        ("Unwritten", "must have traits, a QuantityTraits, and a method compute"),
    ],
)
def test_a_quantity_that_keeps_no_contract_is_rejected(name, says):
    with pytest.raises(ConfigError, match=says):
        find(f"{__name__}:{name}")


class Bare(Mood):
    """One that returns its entries alone."""

    def compute(self, request, episodes, source):
        """Return nothing around them."""
        return [0 for _ in episodes]


class Short(Mood):
    """One that leaves the last episode out."""

    def compute(self, request, episodes, source):
        """Return one entry too few."""
        return Computed([0 for _ in episodes[1:]])


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Bare", r"what quantity '.*:Bare' computes must be a Computed, with its entries, got \[0, 0\]"),
        (
            "Short",
            "the entries that quantity '.*:Short' computes must be one for each of the 2 episodes, got 1",
        ),
    ],
)
def test_a_quantity_has_one_entry_for_each_episode(name, says):
    with pytest.raises(ConfigError, match=says):
        compute((f"{__name__}:{name}",), [said("on"), said("off")], Source())


class Compared(Mood):
    """One that reads the policy `reads`, and declares the policy that acted."""

    traits: ClassVar[QuantityTraits] = QuantityTraits("a pass", passes=1, policies=frozenset({"acted"}))
    reads = "reference"

    def compute(self, request, episodes, source):
        """Return the policy that was read."""
        return Computed([(source.policy(self.reads), source.seed("mood")) for _ in episodes])


class Acted(Compared):
    """One that reads what it declares."""

    reads = "acted"


class Passing(Mood):
    """One that declares a pass, and no policy."""

    traits: ClassVar[QuantityTraits] = QuantityTraits("a pass", passes=1)


def test_a_policy_is_read_only_if_it_is_declared():
    """Without the error, the policy that acted would stand for the reference in `weigh`."""
    source = Models({"acted": "the policy"})
    remedy = re.escape('write policies=frozenset({"acted", "reference"}) in its QuantityTraits.')

    with pytest.raises(
        ConfigError, match=f"quantity '.*:Compared' reads policy 'reference', and does not .*; {remedy}"
    ):
        compute((f"{__name__}:Compared",), [said("on")], source)
    assert compute((f"{__name__}:Acted",), [said("on")], source)[f"{__name__}:Acted"].entries == [
        ("the policy", 0)
    ]


def test_a_declared_policy_is_read_by_the_role_that_is_declared():
    """Not by the name of the policy that has the role: it is another policy in the next iteration."""

    class Named(Source):
        def policy_name(self, role):
            return {"acted": "sft", "reference": "base"}[role]

        def policy(self, role):
            return f"model of {role}"

    source = DeclaredSource(Named(), "own", frozenset({"acted"}))

    assert source.policy("acted") == "model of acted"
    for name in ("sft", "base"):
        with pytest.raises(ConfigError, match=f"quantity 'own' reads policy '{name}'"):
            source.policy(name)


def test_a_pass_of_no_policy_is_rejected():
    with pytest.raises(
        ConfigError, match=r"quantity '.*:Passing' must declare policies, since it declares passes"
    ):
        find(f"{__name__}:Passing")


def test_what_a_source_does_not_have_is_of_a_run():
    """Of models in memory, no branches and no world."""
    with pytest.raises(ConfigError, match="reads branches, which only a run has"):
        find("branch-returns")[0].compute(BranchReturns(), [said("on")], Models({}))


def test_values_need_no_order(tiny_model, tokenizer):
    """The quantity as a whole: what V explains is counted."""
    request = Values(lambda group, tokens: [[[one.total_reward] for _ in one.turns] for one in group])
    episodes = [said("a", total=1.0), said("b", sample=1), said("c", "d", total=1.0, sample=2)]
    source = Models({"acted": open_reader(tiny_model, tokenizer)})

    first = find(request)[0].compute(request, episodes, source)
    other = find(request)[0].compute(request, episodes[::-1], source)

    assert torch.tensor([each for one in first.entries for (each,) in one]).isfinite().all()
    assert first.entries == other.entries[::-1]
    assert first.counts.keys() == {"explained_variance"}
