"""The loop as data: which stages a recipe has."""

import pytest

from perturn.config.parsing import parse
from perturn.config.recipe import Recipe
from perturn.config.stages import stages
from perturn.errors import ConfigError

MODEL = {"name": "one", "model": {"name": "m"}}
PLAYS = {**MODEL, "environment": {"name": "e"}, "protocol": {"name": "p"}}
SFT, ALIGN = {"loss": {"name": "sft"}}, {"loss": {"name": "tlm-dre"}}


def names(data):
    return [stage.name for stage in stages(parse(Recipe, data))]


def test_the_whole_loop_is_in_the_order_in_which_it_is_done():
    found = stages(parse(Recipe, {**PLAYS, "sft": SFT, "align": ALIGN}))

    assert [(stage.name, stage.command, stage.needs) for stage in found] == [
        ("expert", "collect", ()),
        ("evaluate-base", "evaluate", ()),
        ("sft", "train", ("expert",)),
        ("evaluate-sft", "evaluate", ("sft",)),
        ("explore", "collect", ("sft",)),
        ("pair", "pair", ("explore", "expert")),
        ("align", "train", ("pair", "sft")),
        ("evaluate-tlm-dre", "evaluate", ("align",)),
    ]
    assert [(stage.policy, stage.start) for stage in found if stage.command == "train"] == [
        ("sft", "base"),
        ("tlm-dre", "sft"),
    ]


def test_corrections_are_gathered_by_policies_that_begin_where_sft_did():
    data = {**PLAYS, "sft": SFT, "align": SFT, "rows": {"name": "oec"}, "iterations": 2, "evaluate": None}
    found = stages(parse(Recipe, data))

    assert [(stage.name, stage.policy, stage.start) for stage in found[2:]] == [
        ("explore-001", "sft", ""),
        ("outcomes-001", "", ""),
        ("align-001", "oec-001", "base"),
        ("explore-002", "oec-001", ""),
        ("outcomes-002", "", ""),
        ("align-002", "oec-002", "base"),
    ]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (PLAYS, ["evaluate-base"]),
        ({**PLAYS, "evaluate": None, "explore": {}}, ["explore"]),
        ({**PLAYS, "evaluate": None, "expert": {}}, ["expert"]),
        ({**PLAYS, "evaluate": None, "sft": SFT}, ["expert", "sft"]),
        ({**PLAYS, "evaluate": None, "align": ALIGN}, ["expert", "explore", "pair", "align"]),
        ({**MODEL, "align": ALIGN, "rows": {"name": "file", "path": "pairs.jsonl"}}, ["pair", "align"]),
        ({**MODEL, "sft": SFT, "expert": {"file": "rows.jsonl"}}, ["expert", "sft"]),
        (
            {**PLAYS, "align": ALIGN, "rows": {"name": "file", "path": "pairs.jsonl"}},
            ["evaluate-base", "pair", "align", "evaluate-tlm-dre"],
        ),
    ],
)
def test_a_recipe_without_a_section_is_a_list_without_its_stages(data, expected):
    assert names(data) == expected


def test_iterations_are_numbered_and_each_starts_from_the_policy_before():
    """Policies, stages and files carry the iteration; each explores with what the one before has made."""
    recipe = parse(Recipe, {**PLAYS, "sft": SFT, "align": ALIGN, "iterations": 2, "evaluate": None})
    found = {stage.name: stage for stage in stages(recipe)}

    assert list(found) == [
        *("expert", "sft"),
        *("explore-001", "pair-001", "align-001"),
        *("explore-002", "pair-002", "align-002"),
    ]
    assert [found[f"align-00{i}"].start for i in (1, 2)] == ["sft", "tlm-dre-001"]
    assert found["explore-002"].policy == "tlm-dre-001"
    assert found["explore-002"].needs == ("align-001",)
    assert found["pair-002"].needs == ("explore-002", "expert")
    assert (found["align-002"].policy, found["align-002"].mark) == ("tlm-dre-002", "-002")


def test_an_alignment_on_the_users_rows_needs_the_policy_it_starts_from():
    """If the SFT is trained again, the alignment is out of date."""
    recipe = parse(
        Recipe, {**PLAYS, "sft": SFT, "align": ALIGN, "rows": {"name": "file", "path": "pairs.jsonl"}}
    )

    assert {one.name: one.needs for one in stages(recipe)}["align"] == ("pair", "sft")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (
            {**MODEL, "align": ALIGN},
            "environment is missing, which rows plays in; set it or take rows.name=file",
        ),
        ({**MODEL, "explore": {}}, "environment is missing, which explore plays in"),
        (MODEL, "environment is missing; set it"),
    ],
)
def test_a_stage_that_plays_needs_an_environment(data, says):
    with pytest.raises(ConfigError, match=says):
        parse(Recipe, data)


def test_groups_are_credited_where_pairs_would_be_made():
    """Every second policy is scored, and the last; the reference is the start, the one before, or an average."""
    online = {
        **PLAYS,
        "iterations": 3,
        "explore": {"samples": 4},
        "rows": {"name": "groups"},
        "evaluate": {"every": 2},
        "align": {"loss": {"name": "ppo-clip"}, "reference": "average"},
    }
    found = stages(parse(Recipe, online))

    assert [stage.name for stage in found if stage.iteration == 2] == [
        "explore-002",
        "credit-002",
        "align-002",
        "evaluate-ppo-clip-002",
    ]
    assert [stage.name for stage in found if stage.command == "evaluate"] == [
        "evaluate-base",
        "evaluate-ppo-clip-002",
        "evaluate-ppo-clip-003",
    ]
    for reference, expected in (
        ("average", ["base", "average-001", "average-002"]),
        ("previous", ["base", "ppo-clip-001", "ppo-clip-002"]),
        ("start", ["base", "base", "base"]),
    ):
        recipe = parse(Recipe, {**online, "align": {"loss": {"name": "ppo-clip"}, "reference": reference}})
        assert [stage.reference for stage in stages(recipe) if stage.command == "train"] == expected


@pytest.mark.parametrize("name", ["group-pairs", "corrections"])
def test_pairs_without_an_experts_episodes_need_no_expert(name):
    """The policy's best is chosen, or what it began; so nobody shows anything before."""
    align = {"loss": {"name": "tlm-dre"}}
    found = stages(
        parse(Recipe, {**PLAYS, "explore": {"samples": 4}, "rows": {"name": name}, "align": align})
    )

    assert [one.name for one in found] == ["evaluate-base", "explore", "pair", "align", "evaluate-tlm-dre"]
    assert {one.name: one.needs for one in found}["pair"] == ("explore",)


def test_pairs_of_steps_play_the_experts_episodes_on():
    """As IPR does where nothing is said: from each turn, five times; pairs need his episodes and the branches."""
    explore = {"name": "expert-branches"}
    recipe = parse(Recipe, {**PLAYS, "explore": explore, "rows": {"name": "step-pairs"}, "align": ALIGN})
    needs = {one.name: one.needs for one in stages(recipe)}

    assert (recipe.explore.every, recipe.explore.branches) == (1, 5)
    assert needs["branch"] == ("explore", "expert")
    assert needs["pair"] == ("explore", "expert", "branch")


def test_an_experts_episodes_that_are_played_on_are_shown_first():
    """Pairs within their branches need them too."""
    recipe = parse(
        Recipe,
        {**PLAYS, "explore": {"name": "expert-branches"}, "rows": {"name": "branch-pairs"}, "align": ALIGN},
    )
    needs = {one.name: one.needs for one in stages(recipe)}

    assert needs["branch"] == ("explore", "expert")
    assert needs["pair"] == ("explore", "expert", "branch")


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"rows": {"name": "groups"}}, "rows.name=groups makes rows for an alignment"),
        ({"rows": {"name": "group-pairs"}, "align": ALIGN}, "explore.samples must be > 1"),
    ],
)
def test_groups_that_cannot_be_are_refused(part, words):
    """Before anything is opened, in one line."""
    with pytest.raises(ConfigError, match=words):
        parse(Recipe, {**PLAYS, **part})
