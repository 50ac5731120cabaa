"""Which stages two recipes share: those all whose settings, and those of the stages before, are equal."""

import copy
import json
from dataclasses import dataclass

import pytest

from perturn.config.overrides import set_key
from perturn.config.parsing import parse
from perturn.config.recipe import Recipe, read_recipe
from perturn.config.recipe_difference import counted_settings
from perturn.config.shipped_recipes import shipped
from perturn.config.stages import stages
from perturn.data.run_folder import Run
from perturn.explore import Explorer
from perturn.study.stage_sharing import identities
from support.guests import added

DATA = {
    "name": "one",
    "model": {"name": "m"},
    "environment": {"name": "alfworld-like", "games": 1},
    "protocol": {"name": "alfworld-eto"},
    "expert": {},
    "sft": {"loss": {"name": "sft"}, "tasks": {}},
    "explore": {"samples": 2},
    "align": {"loss": {"name": "dpo"}},
}
EXPERT, BASE, SFT, SCORED = "expert", "evaluate-base", "sft", "evaluate-sft"
EXPLORE, PAIR, ALIGN, LAST = "explore", "pair", "align", "evaluate-dpo"
ALIGNED = {ALIGN, LAST}
AFTER = {EXPLORE, PAIR, *ALIGNED}
TAUGHT = {SFT, SCORED, *AFTER}
ALL = {EXPERT, BASE, *TAUGHT}
PLAYED = {BASE, SCORED, *AFTER}
SCORES = {BASE, SCORED, LAST}


def changed(key, value):
    """The stages that are not shared once a setting is another."""
    data = copy.deepcopy(DATA)
    set_key(data, key, value)
    one, other = (identities(parse(Recipe, each)) for each in (DATA, data))
    return {name for name in one if one[name] != other.get(name)}


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("seed", 1, ALL),
        ("environment.games", 2, ALL),
        ("protocol.max_turns", 3, ALL),
        ("model.dtype", "float32", ALL - {EXPERT}),
        ("engine", {"name": "local", "context": 9}, PLAYED),
        ("deterministic", True, PLAYED),
        ("expert.file", "e.jsonl", ALL - {BASE}),
        ("sft.tasks.n", 3, ALL - {BASE}),
        ("sft.learning_rate", 1e-3, TAUGHT),
        ("explore.tasks.n", 3, {EXPERT, *AFTER}),
        ("explore.samples", 3, AFTER),
        ("rows.threshold", 0.1, {PAIR, *ALIGNED}),
        ("align.learning_rate", 1e-3, ALIGNED),
        ("align.loss", {"name": "dpo", "beta": 0.2}, ALIGNED),
        ("evaluate.tasks.n", 3, SCORES),
        ("evaluate.sampling.max_new_tokens", 3, SCORES),
        ("evaluate.concurrency", 3, SCORES),
        ("worlds.processes", 3, set()),
        ("output", "elsewhere", set()),
        ("name", "two", set()),
    ],
)
def test_a_setting_parts_the_stages_that_read_it_and_those_after_them(key, value, expected):
    """Tasks of exploration are the expert's too; but what SFT learns is the expert's on its own task list."""
    assert changed(key, value) == expected


def test_no_setting_is_read_by_nobody():
    """But for those that say which stages there are: nobody shares what comes after a first iteration."""
    recipe = parse(Recipe, {**DATA, "rows": {"name": "groups"}, "align": {"loss": {"name": "ppo-clip"}}})
    read = {key for each in (recipe, parse(Recipe, DATA)) for stage in stages(each) for key in stage.reads}
    unread = [
        key
        for key in counted_settings(recipe)
        if not any(key == each or key.startswith(f"{each}.") for each in read)
    ]

    assert sorted(unread) == ["evaluate.every", "iterations", "staleness"]


def test_weights_of_groups_are_shared_by_alignments_with_the_same_loss():
    """The loss may name the credit; a learning rate changes no weight."""
    data = {
        **DATA,
        "rows": {"name": "groups"},
        "credit": {"name": "rloo"},
        "align": {"loss": {"name": "ppo-clip"}},
    }
    faster = {**data, "align": {**data["align"], "learning_rate": 1e-3}}
    other = {**data, "align": {"loss": {"name": "ppo-clip", "kl": 0.1}}}
    one, two, three = (identities(parse(Recipe, each)) for each in (data, faster, other))

    assert one["credit"] == two["credit"] != three["credit"]
    assert one["explore"] == three["explore"]


def test_who_plays_branches_on_changes_them_and_the_weights_alone():
    """What was explored is shared; to name the explorer itself is another setting too."""
    groups = {"rows": {"name": "groups"}, "credit": {"name": "pav"}, "align": {"loss": {"name": "ppo-clip"}}}
    data = [
        {**DATA, **groups, "explore": {"name": "branches", "samples": 2, "every": 1, **policy}}
        for policy in ({}, {"policy": "base"}, {"policy": "sft"})
    ]
    found = [identities(parse(Recipe, each)) for each in data]

    assert {tuple(each) for each in found} == {tuple(found[0])}
    same = {name for name in found[0] if len({each[name] for each in found}) == 1}
    assert same == {EXPERT, BASE, SFT, SCORED, EXPLORE}


@pytest.mark.parametrize("other", [{"every": 2}, {"branches": 3}, {"policy": "sft"}])
def test_a_setting_of_branches_parts_them_and_those_after_them(other):
    """SFT's policy explores here, so that its name does not part the branches that it plays."""
    groups = {"rows": {"name": "groups"}, "credit": {"name": "pav"}, "align": {"loss": {"name": "ppo-clip"}}}
    plain = {"name": "branches", "samples": 2, "every": 1}
    one, two = (
        identities(parse(Recipe, {**DATA, **groups, "explore": each})) for each in (plain, plain | other)
    )

    assert {name for name in one if one[name] != two[name]} == {
        "branch",
        "credit",
        ALIGN,
        "evaluate-ppo-clip",
    }


def test_branches_wait_for_who_plays_them():
    """SFT's policy, also where another one explored."""
    data = {**DATA, "iterations": 2, "rows": {"name": "groups"}, "align": {"loss": {"name": "ppo-clip"}}}
    explore = {"name": "branches", "samples": 2, "policy": "sft"}
    recipe = parse(Recipe, {**data, "credit": {"name": "pav"}, "explore": explore})
    found = {stage.name: stage for stage in stages(recipe)}

    assert found["branch-001"].policy == found["branch-002"].policy == "sft"
    assert found["explore-002"].policy == "ppo-clip-001"
    assert found["branch-001"].needs == ("explore-001",)
    assert found["branch-002"].needs == ("explore-002", "sft")


def test_of_many_iterations_all_before_the_first_alignment_is_shared():
    """Later policies and optimizers are let go on the way, so nobody could go on from them."""
    found = identities(parse(Recipe, {**DATA, "iterations": 3}))

    assert list(found) == [EXPERT, BASE, SFT, SCORED, "explore-001", "pair-001"]


@pytest.mark.parametrize("name", shipped())
def test_every_stage_up_to_the_first_alignment_says_what_it_reads(name):
    recipe = read_recipe(shipped()[name])
    first = next((i for i, stage in enumerate(stages(recipe)) if stage.name.startswith("align")), None)

    assert all(stage.reads for stage in stages(recipe)[:first])


def take(tmp_path, name, path):
    """Of two runs, each with texts of tokens and a stamp, the second one takes a stage over from the first."""
    one, two = (parse(Recipe, {**DATA, "name": each, "output": str(tmp_path)}) for each in ("one", "two"))
    with Run(one) as theirs, Run(two) as ours:
        for run, text in ((theirs, "mug"), (ours, "desk")):
            run.paths.tokens.write_text(json.dumps({"7": text, text: text}))
            run.paths.stamp.write_text(text)
        file = theirs.folder / path
        with theirs.stage(name, file):
            file.write_text("x\n")
        assert ours.take_over(name, theirs.folder)
        return json.loads(ours.paths.tokens.read_text()), ours.paths.stamp.read_text()


def test_what_no_model_has_read_brings_no_texts_of_tokens_and_no_stamp(tmp_path):
    """The expert's episodes are shared by runs of different vocabularies and evaluations."""
    assert take(tmp_path, EXPERT, "trajectories/expert.jsonl") == ({"7": "desk", "desk": "desk"}, "desk")


def test_a_score_brings_its_stamp_and_texts_of_tokens_that_are_missing(tmp_path):
    """A token that has a text already keeps it."""
    texts, stamp = take(tmp_path, BASE, "evaluation/base.jsonl")

    assert texts == {"7": "desk", "mug": "mug", "desk": "desk"}
    assert stamp == "mug"


@dataclass(frozen=True)
class Choosy(Explorer):
    """An explorer of another package, whose rollouts may depend on its own settings."""

    taste: int = 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"name": "file", "path": "a.jsonl"}, {"name": "file", "path": "b.jsonl"}),
        ({"name": "choosy"}, {"name": "choosy", "taste": 2}),
        ({"name": "choosy"}, {"name": "rollouts"}),
    ],
)
def test_explorers_whose_episodes_may_differ_share_none(one, other):
    """Episodes of a file, and an explorer that is not Perturn's."""
    with added("perturn.explorers", choosy=Choosy):
        first, second = (identities(parse(Recipe, {**DATA, "explore": each})) for each in (one, other))

    assert first["sft"] == second["sft"]
    assert first[EXPLORE] != second[EXPLORE]
