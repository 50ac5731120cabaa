"""Settings that nothing would read are refused before work starts."""

import pytest

from perturn.config.parsing import parse
from perturn.config.recipe import Recipe
from perturn.errors import ConfigError

RECIPE = {
    "name": "one",
    "model": {"name": "some/model"},
    "environment": {"name": "alfworld"},
    "protocol": {"name": "alfworld-eto"},
    "sft": {"loss": {"name": "sft"}},
    "align": {"loss": {"name": "sft"}},
}


def refusal(**sections):
    with pytest.raises(ConfigError) as caught:
        parse(Recipe, RECIPE | sections)
    return str(caught.value)


def test_branches_by_a_policy_that_is_never_there():
    """Without SFT there is the model alone, and a policy that is still to be trained is no choice."""
    sections = {"align": {"loss": {"name": "ppo-clip"}}, "rows": {"name": "groups"}}
    by_sft = {"name": "branches", "samples": 2, "policy": "sft"}

    said = refusal(**sections, sft=None, explore=by_sft)
    assert "explore.policy is sft, and the recipe has no section sft" in said
    assert "explore.policy" in refusal(**sections, explore=by_sft | {"policy": "ppo-clip-001"})
    assert parse(Recipe, RECIPE | sections | {"explore": by_sft}).explore.policy == "sft"


@pytest.mark.parametrize(
    ("rows", "explore", "said"),
    [
        (
            {"name": "drop-pairs"},
            {"name": "expert-branches"},
            "rows.name=drop-pairs needs branches at regular turns, and explore.name=expert-branches provides "
            "expert-branches; explorers that do: branches.",
        ),
        ({"name": "drop-pairs"}, {"name": "wrong-branches"}, "provides wrong-branches; explorers that"),
        (
            {"name": "drop-pairs", "length": "turn"},
            {"name": "branches", "every": 2},
            "rows.name=drop-pairs needs branches at every turn (explore.every=1), and explore.name=branches provides",
        ),
        (
            {"name": "progress-pairs"},
            {"name": "wrong-branches"},
            "explore.distance and rows.distance must be equal: a run measures one sense alone.",
        ),
        (
            {"name": "branch-pairs"},
            {"name": "wrong-branches", "every": 2},
            "unknown key 'explore.every'. every is a setting of explore.name=branches or expert-branches.",
        ),
        ({"name": "step-pairs"}, {"name": "branches"}, "rows.name=step-pairs needs expert-branches, and"),
        (
            {"name": "tree-pairs"},
            {"name": "expert-branches"},
            "needs a tree, and explore.name=expert-branches provides",
        ),
        (
            {"name": "branch-pairs"},
            {"name": "branches", "turns": 2},
            "rows.name=branch-pairs does not take branches that are not over",
        ),
    ],
)
def test_episodes_that_rows_do_not_read(rows, explore, said):
    """Neither branches that are missing nor branches that nothing is made of."""
    assert said in refusal(rows=rows, explore=explore, align={"loss": {"name": "dpo"}})


def test_signals_that_leave_nothing():
    said = refusal(
        rows={"name": "expert-pairs", "signals": {"without": ["loop"], "only": ["cut", "loop"]}},
        align={"loss": {"name": "dpo"}},
    )

    assert "only and without both have loop, so no episode is left" in said
