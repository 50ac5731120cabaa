"""A credit that reads the gold answer, again on stored episodes of an environment of one's own."""

from dataclasses import replace

import pytest

from perturn.credit import CREDITS
from perturn.data.group_account import read_credits
from perturn.errors import DataError
from perturn.group import counted, groups_of
from perturn.quantities.answer import answers_of
from perturn.quantities.readers import open_reader
from perturn.run.stages.credit_stage import credit_run
from perturn.traits import EnvironmentTraits
from support.credited import EPISODES, explored_by


def test_the_gold_answer_is_asked_of_the_policy(recipe, own_environment, tiny_folder, monkeypatch):
    """In the words of the environment and the format, and of stored episodes; what FAILED is left out and not asked."""
    monkeypatch.setattr(
        own_environment.GuessNumber,
        "traits",
        EnvironmentTraits(answer_action="number {answer}"),
        raising=False,
    )
    asked = [replace(one, task=replace(one.task, data={"answer": "seven"})) for one in EPISODES]
    answers = answers_of(asked, "Action: number {answer}", open_reader(str(tiny_folder)))
    folder = explored_by(recipe, asked)

    (one,) = credit_run(folder, ["credit.name=igpo", "credit.gamma=0.5"], reference="base")["iterations"]

    rows = {row.key: row for row in read_credits(folder / one["file"])}
    for group in groups_of(asked):
        group = counted(group)
        its = [answers[asked.index(each)] for each in group]
        for each, weight in zip(group, CREDITS["igpo"](gamma=0.5)(group, answer=its), strict=True):
            assert rows[each.key].weight == pytest.approx(weight.tolist(), abs=1e-9)
    assert rows["one", 2].bin == "failed"
    assert rows["two", 0].bin == "trained"
    assert len(set(rows["one", 1].weight)) == 3


def test_episodes_of_tasks_without_a_gold_answer_are_refused(explored, own_environment, monkeypatch):
    monkeypatch.setattr(
        own_environment.GuessNumber, "traits", EnvironmentTraits(answer_action="{answer}"), raising=False
    )

    with pytest.raises(DataError, match="has no gold answer: expected a text in data"):
        credit_run(explored, ["credit.name=igpo"], reference="base")
    assert not list((explored / "credits").iterdir())
