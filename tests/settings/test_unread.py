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
    assert f"outcomes {name} tells nothing in its prompts" in refusal(rows={"name": name, text: "Well."})


def test_texts_of_a_way_that_tells_are_taken():
    found = parse(Recipe, RECIPE | {"rows": {"name": "nat", "success": "Well."}})

    assert found.outcomes.suffixes[0] == "\nWell."


def test_corrections_beside_a_file_of_pairs():
    pair = {"within": "correction", "remaining": "shortest", "file": "pairs.jsonl"}

    assert "pair.file holds pairs" in refusal(pair=pair, align={"loss": {"name": "dpo"}})


def test_branches_by_a_policy_that_is_never_there():
    """Without SFT there is the model alone, and a policy that is still to be trained is no choice."""
    sections = {"align": {"loss": {"name": "ppo-clip"}}, "rows": {"name": "groups"}}
    by_sft = {"name": "branches", "samples": 2, "policy": "sft"}

    said = refusal(**sections, sft=None, explore=by_sft)
    assert "explore.policy is sft, and the recipe has no section sft" in said
    assert "explore.policy" in refusal(**sections, explore=by_sft | {"policy": "ppo-clip-001"})
    assert parse(Recipe, RECIPE | sections | {"explore": by_sft}).explore.policy == "sft"


@pytest.mark.parametrize(
    ("pair", "explore", "said"),
    [
        ({"length": "turn"}, {}, "rows.length=turn is read with rows.name=branch-pairs or correction alone"),
        (
            {"within": "correction", "remaining": "shortest", "length": "turn", "max_extra_turns": 5},
            {},
            "rows.max_extra_turns cuts nothing with rows.length=turn",
        ),
        ({"by": "drop"}, {}, "pair.by is read with rows.name=branch-pairs alone, not with expert"),
        ({"within": "branch", "by": "progress"}, {}, "rows.distance must be shortest or searching"),
        (
            {"within": "branch", "by": "progress", "remaining": "shortest", "threshold": 0.5},
            {},
            "rows.threshold is a gap between scores, and pair.by=progress reads none",
        ),
        (
            {"within": "branch", "by": "drop", "per_group": 2},
            {},
            "rows.per_group is not read with pair.by=drop",
        ),
        (
            {"within": "branch", "by": "drop"},
            {"name": "expert-branches"},
            "rows.name=branch-pairs needs branches at regular turns, and explore.name=expert-branches provides "
            "expert-branches; explorers that do: branches.",
        ),
        (
            {"within": "branch", "by": "drop"},
            {"name": "wrong-branches"},
            "provides wrong-branches; explorers that",
        ),
        (
            {"within": "branch", "by": "drop", "length": "turn"},
            {"name": "branches", "every": 2},
            "rows.name=branch-pairs needs branches at every turn (explore.every=1), and explore.name=branches provides",
        ),
        (
            {"within": "branch", "remaining": "shortest"},
            {"name": "wrong-branches"},
            "explore.distance is searching, and the rows read shortest",
        ),
        (
            {"within": "branch"},
            {"name": "wrong-branches", "every": 2},
            "unknown key 'explore.every'. every is a setting of explore.name=branches or expert-branches.",
        ),
        ({"within": "step"}, {"name": "branches"}, "rows.name=step-pairs needs expert-branches, and"),
        (
            {"within": "tree"},
            {"name": "expert-branches"},
            "needs a tree, and explore.name=expert-branches provides",
        ),
    ],
)
def test_turns_that_are_not_compared(pair, explore, said):
    """Neither pairs of turns nor turns to play on from where nothing is made of them."""
    assert said in refusal(pair=pair, explore=explore, align={"loss": {"name": "dpo"}})


@pytest.mark.parametrize("pair", [{"within": "step"}, {"within": "branch"}, {"file": "pairs.jsonl"}])
def test_signals_where_no_explored_episode_is_chosen(pair):
    said = refusal(
        rows={"name": "expert-pairs", **pair, "signals": {"without": ["loop"]}},
        align={"loss": {"name": "dpo"}},
    )

    assert "rows.signals are read with rows.name=expert-pairs or group or correction alone" in said


def test_signals_that_leave_nothing():
    said = refusal(
        rows={"name": "expert-pairs", "signals": {"without": ["loop"], "only": ["cut", "loop"]}},
        align={"loss": {"name": "dpo"}},
    )

    assert "only and without both name loop, so that no episode is left" in said


@pytest.mark.parametrize("pair", [{"per_group": None}, {"per_group": 2, "within": "expert"}])
def test_pairs_of_a_group_that_is_not_paired(pair):
    assert "rows.per_group is read with rows.name=group-pairs or branch alone, not with expert" in refusal(
        pair=pair, align={"loss": {"name": "dpo"}}
    )
