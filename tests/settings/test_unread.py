"""Settings that nothing would read are refused before work starts."""

import pytest

from perturn.errors import ConfigError
from perturn.settings.parsing import parse
from perturn.settings.recipe import Recipe

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


@pytest.mark.parametrize("name", ["rft", "kto"])
@pytest.mark.parametrize("text", ["success", "failure"])
def test_texts_of_a_way_that_tells_nothing(name, text):
    assert f"outcomes {name} tells nothing in its prompts" in refusal(outcomes={"name": name, text: "Well."})


def test_texts_of_a_way_that_tells_are_taken():
    found = parse(Recipe, RECIPE | {"outcomes": {"name": "nat", "success": "Well."}})

    assert found.outcomes.suffixes[0] == "\nWell."


def test_corrections_beside_a_file_of_pairs():
    pair = {"within": "correction", "remaining": "shortest", "file": "pairs.jsonl"}

    assert "pair.file holds pairs" in refusal(pair=pair, align={"loss": {"name": "dpo"}})


def test_branches_by_a_policy_that_is_never_there():
    """Without SFT there is the model alone, and a policy that is still to be trained is no choice."""
    sections = {"align": {"loss": {"name": "ppo-clip"}}, "groups": {}, "explore": {"samples": 2}}

    said = refusal(**sections, sft=None, branch={"policy": "sft"})
    assert "branch.policy is sft, and the recipe has no section sft" in said
    assert "branch.policy" in refusal(**sections, branch={"policy": "ppo-clip-001"})
    assert parse(Recipe, RECIPE | sections | {"branch": {"policy": "sft"}}).branch.policy == "sft"


@pytest.mark.parametrize("pair", [{"per_group": None}, {"per_group": 2, "within": "expert"}])
def test_pairs_of_a_group_that_is_not_paired(pair):
    assert "pair.per_group is read with pair.within=group or branch alone, not with expert" in refusal(
        pair=pair, align={"loss": {"name": "dpo"}}
    )
