"""A row maker of another package is given the quantities that it needs."""

from dataclasses import dataclass
from typing import ClassVar

import pytest

from perturn.config.row_maker_settings import Made, RowTraits
from perturn.config.stages import stages
from perturn.data.store import read_pairs
from perturn.errors import ConfigError
from perturn.run.execute import check, open_run
from perturn.run.session import Session
from perturn.run.stages.row_stage import make_rows
from perturn.types import PreferencePair
from support.corrections import explore
from support.credited import episode
from support.guests import added

from .online import recipe_of


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
