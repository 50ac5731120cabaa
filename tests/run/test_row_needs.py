"""A row maker of another package is given the quantities that it needs."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

from perturn.config.row_maker_settings import Made, RowTraits
from perturn.config.stages import stages
from perturn.credit import CreditTraits
from perturn.data.store import read_pairs
from perturn.errors import ConfigError
from perturn.explore import Explorer
from perturn.quantities import Quantity, QuantityTraits
from perturn.run.execute import check, open_run
from perturn.run.session import Session
from perturn.run.stages.row_stage import make_rows
from perturn.types import PreferencePair
from support.corrections import explore
from support.credited import episode
from support.guests import added

from .online import GROUPS, recipe_of


@dataclass(frozen=True)
class SurePairs:
    """The episode whose turns began surest over the one whose turns began least sure."""

    traits: ClassVar[RowTraits] = RowTraits("pairs")
    needs: ClassVar[tuple[str, ...]] = ("entropy",)

    def __call__(self, inputs):
        """Pair the first and the last by mean entropy."""
        entropy = {key: sum(found) / len(found) for key, found in inputs.quantities["entropy"].items()}
        ranked = sorted(inputs.explored, key=lambda one: entropy[one.key])
        return Made([PreferencePair(ranked[0], ranked[-1])], {"kept": 2, "read": len(entropy)})


@pytest.fixture
def guest():
    """A package that adds the row maker `sure`."""
    with added("perturn.rows", sure=SurePairs):
        yield


def test_a_quantity_is_computed_for_rows_that_need_it(place, monkeypatch, guest):
    """Of each explored episode, by the policy that explored."""
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(place)
    words = ["sft=null", "rows={name: sure}", "iterations=1", "evaluate=null"]
    played = [episode("train/0", 0, [1.0]), episode("train/0", 1, [0.0] * 3, "aaa")]
    with open_run(recipe_of(place, *words)) as run:
        explore(run, "explore", played)
        with Session(run) as session:
            stage = next(one for one in stages(run.recipe) if one.name == "pair")
            make_rows(session, stage)
    (pair,) = read_pairs(run.paths.pairs())

    assert run.manifest["stages"]["pair"]["counts"] == {"kept": 2, "read": 2}
    assert {pair.chosen.sample, pair.rejected.sample} == {0, 1}


def test_a_quantity_that_there_is_not_is_refused_before_work(place, monkeypatch, guest):
    """With the name that was meant."""
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(place)
    monkeypatch.setattr(SurePairs, "needs", ("entropi",))

    with pytest.raises(ConfigError, match=r"rows\.name=sure needs .*entropi.* Did you mean 'entropy'"):
        check(recipe_of(place, "sft=null", "rows={name: sure}", "iterations=1", "evaluate=null"))


class Doubtful(Quantity):
    """One that declares a policy which may not exist."""

    traits: ClassVar[QuantityTraits] = QuantityTraits("a pass", passes=1, policies=frozenset({"refrence"}))

    def compute(self, request, episodes, source):
        """Return nothing, which no test does."""


@dataclass(frozen=True)
class DoubtfulExplorer(Explorer):
    """An explorer that reads this quantity."""

    needs: ClassVar[tuple[str, ...]] = (f"{__name__}:Doubtful",)


@dataclass(frozen=True)
class DoubtfulCredit:
    """A credit that reads this quantity."""

    traits: ClassVar[CreditTraits] = CreditTraits(needs_group=True)
    needs: ClassVar[tuple[str, ...]] = (f"{__name__}:Doubtful",)

    def __call__(self, group, **_):
        """Return nothing, which no test does."""


@pytest.mark.parametrize(
    ("table", "kind", "words", "reader"),
    [
        ("rows", SurePairs, ["rows={name: doubtful}"], "rows.name=doubtful"),
        ("explorers", DoubtfulExplorer, ["explore.name=doubtful"], "explore.name=doubtful"),
        ("credits", DoubtfulCredit, [*GROUPS, "credit={name: doubtful}"], "credit doubtful"),
    ],
)
@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ("refrence", "the unknown policy 'refrence'. Did you mean 'reference'? Known: acted, explorer, "),
        ("reward", "it; add it, such as reward: {model: {}}."),
        (
            "./nowhere",
            "policy './nowhere', which is no policy of the run and none of acted, explorer, reference, start, reward: "
            "model folder './nowhere' does not exist.",
        ),
    ],
)
def test_an_unknown_policy_is_rejected_before_work(
    place, monkeypatch, table, kind, words, reader, policy, says
):
    """With the role that was meant; of a reward model, the recipe must have one."""
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(place)
    monkeypatch.setattr(SurePairs, "needs", (f"{__name__}:Doubtful",))
    monkeypatch.setattr(Doubtful, "traits", replace(Doubtful.traits, policies=frozenset({policy})))

    with added(f"perturn.{table}", doubtful=kind), pytest.raises(ConfigError) as caught:
        check(recipe_of(place, "sft=null", "iterations=1", "evaluate=null", *words))

    assert f"{reader} needs '{__name__}:Doubtful', which reads {says}" in str(caught.value)


@pytest.mark.parametrize("policy", ["reference", "base", "dpo", "tiny"])
def test_a_role_a_policy_of_the_run_and_a_model_are_policies(place, monkeypatch, guest, policy):
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(place)
    monkeypatch.setattr(SurePairs, "needs", (f"{__name__}:Doubtful",))
    monkeypatch.setattr(Doubtful, "traits", replace(Doubtful.traits, policies=frozenset({policy})))

    assert check(recipe_of(place, "sft=null", "rows={name: sure}", "iterations=1", "evaluate=null"))
