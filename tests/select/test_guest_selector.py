"""A selector of another package: found through an entry point, checked, and asked in a real evaluation."""

import json
from collections import Counter

import pytest
from typer.testing import CliRunner

from perturn.cli import app
from perturn.config.recipe import read_recipe
from perturn.config.stages import stages
from perturn.data.store import read_trajectories
from perturn.errors import ConfigError
from perturn.run.execute import check, open_run, run_stages
from support.guests import describe, visible

CODE = '''
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

from perturn.extend import SelectorInputs, SelectorTraits


@dataclass(frozen=True)
class Familiar:
    """Take the candidate with the most frequent tokens of explored episodes."""

    traits: ClassVar[SelectorTraits] = SelectorTraits(needs=frozenset({"explored"}))

    sign: float = 1.0

    def _seen(self, inputs):
        seen = Counter(each for one in inputs.explored() for turn in one.turns for each in turn.action.token_ids)
        inputs.counts["tokens_seen"] = seen.total()
        return lambda action: self.sign * sum(seen[each] for each in action.token_ids)

    def among_episodes(self, inputs: SelectorInputs):
        number = self._seen(inputs)
        return lambda episodes: [sum(number(turn.action) for turn in one.turns) for one in episodes]

    def among_actions(self, inputs: SelectorInputs):
        number = self._seen(inputs)
        return lambda task, prompt, actions: [number(one) for one in actions]


def alike(candidates):
    return [0.0 for _ in candidates]


class Undeclared(Familiar):
    """Reads what its traits do not name."""

    traits: ClassVar[SelectorTraits] = SelectorTraits()
'''
WORDS = [
    *(
        "sft=null",
        "rows=null",
        "align=null",
        "evaluate.tasks.per_kind=4",
        "evaluate.sampling.temperature=1.0",
    ),
    *("evaluate.sampling.max_new_tokens=4", "explore.sampling={temperature: 1.0, max_new_tokens: 4}"),
    "evaluate.select={name: guest-familiar, samples: 3}",
]


@pytest.fixture(autouse=True)
def package(tmp_path):
    """The package is installed; a table that has read its entry points reads them again."""
    points = {"guest-familiar": "guest_familiar:Familiar", "guest-undeclared": "guest_familiar:Undeclared"}
    describe(tmp_path / "site", "perturn-familiar", "1", {"perturn.selectors": points})
    (tmp_path / "site" / "guest_familiar.py").write_text(CODE)
    with visible(tmp_path / "site"):
        yield


@pytest.mark.parametrize(
    ("words", "best"), [([], max), (["evaluate.select.sign=-1"], min)], ids=["own default", "own setting"]
)
def test_a_guest_chooses_among_episodes_by_what_was_explored(recipe, words, best):
    """The exploration comes first, as its traits ask; its counts and its version stand in the manifest."""
    with open_run(recipe, [*WORDS, *words]) as run:
        run_stages(run)
        paths, manifest = run.paths, run.manifest

    explored = read_trajectories(paths.trajectories("explore"))
    seen = Counter(each for one in explored for turn in one.turns for each in turn.action.token_ids)

    def number(one):
        return sum(seen[each] for turn in one.turns for each in turn.action.token_ids)

    drawn = list(read_trajectories(paths.drawn("base")))
    chosen = list(read_trajectories(paths.evaluation("base")))
    assert [stage.name for stage in stages(run.recipe)] == ["explore", "evaluate-base"]
    assert (len(drawn), len(chosen)) == (12, 4)
    for one in chosen:
        assert number(one) == best(number(each) for each in drawn if each.task.id == one.task.id)
    assert manifest["stages"]["evaluate-base"]["counts"]["tokens_seen"] == seen.total() > 0
    assert manifest["versions"]["perturn-familiar"] == "1"


def test_a_guest_chooses_among_actions(recipe):
    """And the score says by whom, and what it cost."""
    shown = CliRunner().invoke(app, ["run", str(recipe), *WORDS, "evaluate.select.among=actions"])

    assert shown.exit_code == 0, shown.output
    assert "the best of 3 actions at each turn by guest-familiar" in " ".join(shown.output.split())
    manifest = json.loads((recipe.parent / "runs/one/manifest.json").read_text())
    counts = manifest["stages"]["evaluate-base"]["counts"]
    assert counts["candidates"] == 3 * counts["turns"]
    assert counts["tokens_seen"] > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["explore=null"], "name=guest-familiar: it learns from explored episodes, and nothing is explored"),
        (["evaluate.tasks={split: train, per_kind: 6}"], "2 of 6 tasks of evaluate.tasks are explored too"),
        (["evaluate.select={name: guest_familiar:alike, sign: 2}"], r"unknown key 'evaluate\.select\.sign'"),
        (["evaluate.select.sing=1"], r"unknown key 'evaluate\.select\.sing'\. Did you mean .*\.sign'\?"),
    ],
)
def test_what_a_guest_cannot_have_is_refused_before_work(recipe, words, said):
    own = [word for word in WORDS if "explore=null" not in words or not word.startswith("explore.")]

    with pytest.raises(ConfigError, match=said):
        check(read_recipe(recipe, [*own, *words]))


def test_a_guest_reads_nothing_that_its_traits_do_not_name(recipe):
    with (
        pytest.raises(ConfigError, match="guest-undeclared reads 'explored', and its traits do not say so"),
        open_run(recipe, [*WORDS, "evaluate.select.name=guest-undeclared"]) as run,
    ):
        run_stages(run)


def test_a_class_of_a_file_is_a_selector_too(recipe, tmp_path, monkeypatch):
    """With its settings; its needs order the stages."""
    (tmp_path / "mine.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)

    read = read_recipe(recipe, [*WORDS, "evaluate.select={name: mine.py:Familiar, sign: 2}"])

    check(read)
    assert [stage.name for stage in stages(read)] == ["explore", "evaluate-base"]


def test_a_guest_is_listed():
    listed = CliRunner().invoke(app, ["list", "selectors", "--json"])

    assert json.loads(listed.stdout)["guest-familiar"].startswith("Take the candidate with the most frequent")
