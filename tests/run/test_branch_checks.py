"""Branches with other sections of a recipe: what does not go together is rejected before work."""

from dataclasses import dataclass

import pytest

from perturn.config.explorer_settings import ExplorerTraits
from perturn.credit import CREDITS
from perturn.data.forks import Forks
from perturn.errors import ConfigError
from perturn.explore.branching import ExploredBrancher
from perturn.explore.protocol import ExploreInputs
from perturn.run.execute import check
from perturn.run.stages.credit_checks import check_prover

from .online import GROUPS, PAV, SPO, recipe_of

STEPS = ["rows.name=step-pairs"]
GREEDY = [
    "rows.name=branch-pairs",
    "explore.name=branches",
    "explore.every=1",
    "explore.sampling.temperature=0",
]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            [*GROUPS, "explore.name=branches"],
            "credit anchor-rloo does not read branches, .* take explore.name=rollouts",
        ),
        (
            [*GROUPS, "credit.name=spo"],
            "credit spo needs branches, and explore.name=rollouts provides none; explorers",
        ),
        (
            [*SPO, "explore.of=failures"],
            "credit spo does not take branches of some episodes .* set explore.of=all",
        ),
        (
            [*SPO, "explore.policy=sft"],
            "credit spo does not take branches of another policy than the exploring one",
        ),
        ([*PAV, "sft=null"], "explore.policy is sft, and the recipe has no section sft"),
        (
            ["explore.name=branches"],
            "explore.name=branches provides branches, regular-branches, which rows.name=group-pairs reads not",
        ),
        ([*STEPS, "rows.path=own.jsonl"], "unknown key 'rows.path'. path is a setting of rows.name=file"),
        (
            [*STEPS, "explore.name=branches"],
            "rows.name=step-pairs needs expert-branches, and explore.name=branches provides .*do: expert-branches",
        ),
        (
            ["rows.name=group-pairs", "explore.name=expert-branches"],
            "explore.name=expert-branches provides expert-branches, which rows.name=group-pairs reads not",
        ),
        ([*SPO, "explore.name=expert-branches"], "credit spo needs branches, .* provides expert-branches"),
        (
            ["rows.name=step-pairs", "rows.per_group=2"],
            "per_group is a setting of rows.name=group-pairs or branch",
        ),
        (
            [*STEPS, "explore.name=expert-branches", "explore.sampling.temperature=0"],
            "explore.branches must be 1 at temperature 0, where all branches from a turn are equal",
        ),
        (["rows.name=branch-pairs", "rows.path=own.jsonl"], "path is a setting of rows.name=file"),
        (["rows.name=branch-pairs", "explore.name=branches", "explore.every=0"], "every"),
        (
            ["rows.name=branch-pairs", "explore.name=branches", "explore.every=3"],
            r"explore\.every must be < 3, the most turns of an episode, so that some are resumed, got 3",
        ),
        (
            [*SPO, "protocol.max_turns=1"],
            r"explore\.every must be < 1, .*\. Let episodes take two turns or more",
        ),
        (
            [*SPO, "explore.every=4"],
            r"explore\.every must be < 3, the most turns of an episode, .* got 4",
        ),
        (
            GREEDY,
            "the same episode again",
        ),
        ([*GREEDY, "explore.policy=sft", "explore.branches=1", "iterations=1"], "the same episode again"),
        (
            [*GREEDY, "explore.policy=base"],
            r"explore\.branches must be 1 at temperature 0, .* got 2",
        ),
        (
            [*GREEDY, "explore.policy=sft", "iterations=2"],
            r"branches must be 1 .* got \d\. Or set explore\.sampling\.temp",
        ),
        (
            ["rows.name=branch-pairs", "rows.max_extra_turns=2"],
            "max_extra_turns is a setting of rows.name=expert-pairs",
        ),
        (
            [*SPO, "credit.name=portool", "explore.policy=sft"],
            "credit portool does not take branches of another policy than the exploring one",
        ),
        (
            [*GROUPS, "credit.name=arpo"],
            "credit arpo needs branches, and explore.name=rollouts provides none",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_before_work(place, monkeypatch, words, said):
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(place)
    with pytest.raises(ConfigError, match=said):
        check(recipe_of(place, *words))


@pytest.mark.parametrize("name", ["spo", "pav", "portool", "arpo"])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rows.name=tree-pairs", "explore.name=mcts"], "needs branches"),
        (["rows.name=step-pairs", "explore.name=expert-branches"], "needs branches"),
        (
            ["rows.name=branch-pairs", "explore.name=branches", "explore.of=failures"],
            "does not take branches of some",
        ),
    ],
)
def test_branches_that_were_chosen_are_not_weighed_by(place, words, said, name):
    """A search continues branches too, so a branch may not belong to the first episode of its tree."""
    recipe = recipe_of(place, "rows={name: expert-pairs, threshold: 0.0}", *words)

    with pytest.raises(ConfigError, match=f"credit {name} {said}"):
        check_prover(recipe, name, CREDITS[name]())


@pytest.mark.parametrize("words", [["explore.policy=base"], ["explore.policy=sft", "iterations=2"]])
def test_another_policy_may_play_on_greedily_once(place, monkeypatch, words):
    """SFT's policy explores, in the first iteration alone, so that what another one does then is another episode."""
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(place)

    assert check(recipe_of(place, *GREEDY, "explore.branches=1", *words)) is not None


@dataclass(frozen=True)
class AfterFirst(ExploredBrancher):
    """Resume each explored episode after its first turn."""

    def turns_of(self, one):
        """Return turn 1, if the episode has it."""
        return range(1, min(2, len(one.turns)))


def test_turns_of_an_unknown_episode_are_rejected():
    inputs = ExploreInputs(0, chosen=[Forks("typo", 0, (1,), ())])
    with pytest.raises(ConfigError, match=r"^choose of explorer AfterFirst must return turns of .*'typo'"):
        AfterFirst().jobs(inputs, 1)


def test_an_own_explorer_imposes_what_its_settings_say():
    """Credits must accept branches of some episodes, and branches that are cut."""
    assert AfterFirst().traits == ExplorerTraits(frozenset({"branches"}))
    assert AfterFirst(of="failures", turns=1).traits.imposes == {"some-episodes", "cut-branches"}
