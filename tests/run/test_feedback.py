"""A credit that reads what replies changed, again on stored episodes of an environment of one's own."""

from math import isnan

import pytest

from perturn.credit import CREDITS
from perturn.data.group_account import read_credits
from perturn.errors import ConfigError
from perturn.group import groups_of
from perturn.methods.infopo.feedback import feedback_of
from perturn.quantities.readers import open_reader
from perturn.run.stages.credit_stage import credit_run
from support.credited import EPISODES, KEPT
from support.weights import weights_of

WORDS = ["credit.name=infopo", "credit.temperature=1.0", "credit.placeholder=Nothing."]


def test_the_policy_that_acted_is_asked_again(explored, tiny_folder):
    """With the placeholder of the credit; a FAILED episode and a last turn are not known."""
    gains = feedback_of(EPISODES, "Nothing.", open_reader(str(tiny_folder)))

    (one,) = credit_run(explored, WORDS, reference="base")["iterations"]

    rows = {row.key: row for row in read_credits(explored / one["file"])}
    credit = CREDITS["infopo"](temperature=1.0)
    for group in groups_of(KEPT):
        its = [gains[EPISODES.index(each)] for each in group]
        for each, weight in zip(group, credit(group, feedback=its), strict=True):
            assert rows[each.key].weight == pytest.approx(weight.tolist(), abs=1e-9)
    known = [[not isnan(gain) for gain in of_one] for of_one in gains]
    assert any(map(any, known))
    assert not any(of_one[-1] for of_one in known if of_one)
    assert len(set(rows["one", 1].weight)) == 3


def test_in_python_it_is_the_same(explored, tiny_folder):
    """Of trajectories in memory, by the model's name."""
    (one,) = credit_run(explored, WORDS, reference="base")["iterations"]
    rows = {row.key: row.weight for row in read_credits(explored / one["file"])}

    section = {"name": "infopo", "temperature": 1.0, "placeholder": "Nothing."}
    found = weights_of(EPISODES, section, model=str(tiny_folder))

    for each, weight in zip(EPISODES, found, strict=True):
        assert rows[each.key] == pytest.approx(weight.tolist(), abs=1e-9)
    with pytest.raises(
        ConfigError, match="model is missing, and credit InfoPO reads the policy that acted; give model="
    ):
        weights_of(EPISODES, "infopo")


OWN = """
from perturn.credit import CreditTraits


class Silent:
    needs, traits = ("feedback",), CreditTraits(needs_group=True)

    def __call__(self, group, *, feedback, **_):
        raise AssertionError
"""


def test_a_credit_of_ones_own_says_its_placeholder(explored, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "silent_credit.py").write_text(OWN)

    with pytest.raises(
        ConfigError, match="needs 'feedback' by its name alone, and Feedback has settings without a default"
    ):
        credit_run(explored, ["credit.name=silent_credit:Silent"], reference="base")
