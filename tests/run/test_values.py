"""Credits that read values: in the online loop, and again on stored episodes."""

import json
import random
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from perturn.chat.model_names import load_tokenizer
from perturn.credit import CREDITS
from perturn.data.group_account import read_credits
from perturn.data.store import read_trajectories
from perturn.errors import ConfigError, RunError
from perturn.group import groups_of
from perturn.policy.models import load_model
from perturn.policy.value_heads import explained_variance
from perturn.quantities.readers import open_reader
from perturn.quantities.turn_values import values_of
from perturn.run.execute import check
from perturn.run.stages.credit_stage import credit_run
from support.credited import EPISODES

from .online import GROUPS, recipe_of

WORDS = [*GROUPS, "iterations=2", "evaluate.every=1", "credit.name=turn-gae"]


@pytest.fixture(scope="module")
def online(run_once):
    """Two iterations of policy gradient on advantages over a learned value."""
    return run_once("valued", *WORDS)


def test_the_loop_weighs_by_the_policy_that_acted(online):
    """SFT's hidden states first, those of the first policy then; every group is trained, equal outcomes or not."""
    stages = json.loads((online / "manifest.json").read_text())["stages"]
    for mark, policy in (("-001", "sft"), ("-002", "ppo-clip-001")):
        episodes = list(read_trajectories(online / f"trajectories/explore{mark}.jsonl"))
        credit, folder = CREDITS["turn-gae"](), str(online / "checkpoints" / policy)
        values = values_of(episodes, credit.value_targets, open_reader(folder))
        expected = {
            one.key: weight for one, weight in zip(episodes, credit(episodes, values=values), strict=True)
        }

        rows = read_credits(online / f"credits/turn-gae{mark}.jsonl")
        for row in rows:
            found = torch.tensor(row.weight, dtype=torch.float64)
            assert_close(found, expected[row.key], atol=1e-9, rtol=0)
        counts = stages[f"credit{mark}"]["counts"]
        returns = credit.value_targets(episodes, [[1] * len(one.turns) for one in episodes])
        share = explained_variance(values, returns)
        assert counts["explained_variance"] == pytest.approx(share, abs=1e-4)
        assert counts["trained"] == counts["asked"] == 12


def test_stored_episodes_are_valued_again_alike(online, monkeypatch):
    """In another process, to the last digit, or the run's own weights would be refused; and by the other credit."""
    monkeypatch.chdir(online.parents[1])
    again = credit_run(online, ["credit.name=turn-gae"])
    other = credit_run(online, ["credit.name=bi-level-gae", "credit.lam=0.9"], against="turn-gae")
    cut = credit_run(online, ["credit.name=hiper", "credit.switch=^Task"], against="turn-gae")

    assert [one["iteration"] for one in again["iterations"]] == [1, 2]
    assert all(
        one["explained_variance"] == cut_one["explained_variance"]
        for one, cut_one in zip(again["iterations"], cut["iterations"], strict=True)
    )
    assert all(one["against"]["turns"] > 0 for one in cut["iterations"])
    for one in (*again["iterations"], *other["iterations"]):
        assert one["explained_variance"] < 1
    assert other["iterations"][0]["against"]["turns"] > 0


def test_the_policy_that_acted_may_be_gone(explored):
    """It was never trained here; another that is there may stand in, for any state of before the action will do."""
    with pytest.raises(RunError, match=r"reads policy 'sft', and .* is not there; .* --reference base"):
        credit_run(explored, ["credit.name=turn-gae"])
    assert not list((explored / "credits").iterdir())

    (one,) = credit_run(explored, ["credit.name=rloo"], against="turn-gae", reference="base")["iterations"]
    assert one["against"]["turns"] > 0


def test_the_order_of_episodes_changes_no_value(tiny_model, tokenizer):
    """Not in any bit; an episode without turns has none, and changes none."""
    credit = CREDITS["bi-level-gae"]()
    empty = replace(EPISODES[0], turns=(), sample=7)
    before = values_of(EPISODES, credit.value_targets, open_reader(tiny_model, tokenizer))
    order = [empty, *EPISODES]
    random.Random(0).shuffle(order)

    found = values_of(order, credit.value_targets, open_reader(tiny_model, tokenizer))

    assert found[order.index(empty)] == []
    assert all(found[order.index(one)] == values for one, values in zip(EPISODES, before, strict=True))
    assert [[len(turn) > 1 for turn in of_one] for of_one in before] == [
        [True] * len(one.turns) for one in EPISODES
    ]


def test_a_single_task_has_a_baseline(tiny_model, tokenizer):
    """Its other samples; both credits leave what returns are without it, less V, at their defaults."""
    group = next(group for group in groups_of(EPISODES) if group[0].task.id == "one")
    for name in ("turn-gae", "bi-level-gae"):
        credit = CREDITS[name]()
        values = values_of(group, credit.value_targets, open_reader(tiny_model, tokenizer))
        returns = credit.value_targets(group, [[1] * len(one.turns) for one in group])

        weights = credit(group, values=values)

        for weight, value, target in zip(weights, values, returns, strict=True):
            expected = [g[0] - v[0] for g, v in zip(target, value, strict=True)]
            assert_close(weight, torch.tensor(expected, dtype=torch.float64))
        assert any(v[0] for of_one in values for v in of_one)


def test_a_policy_that_is_named_is_loaded(tiny_folder):
    """With its own tokenizer, by its folder."""
    credit = CREDITS["turn-gae"]()
    model, tokenizer = load_model(str(tiny_folder)), load_tokenizer(str(tiny_folder))

    assert values_of(EPISODES, credit.value_targets, open_reader(str(tiny_folder))) == values_of(
        EPISODES, credit.value_targets, open_reader(model, tokenizer)
    )


@pytest.mark.slow
def test_one_episode_of_a_task_is_enough_where_none_are_compared(place, monkeypatch):
    """By V alone, over all tasks, or with branches of its own; RLOO has nothing then, unless it keeps the score."""
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(place)
    for words in (
        ["credit.name=v0"],
        ["credit.name=turn-gae"],
        ["credit={name: rloo, singleton: raw}"],
        ["credit.name=reinforce++"],
        ["credit.name=portool", "explore.name=branches", "explore.every=1"],
        [
            "credit.name=portool",
            "explore.name=branches",
            "explore.every=1",
            "rows.drop_equal_outcomes=true",
        ],
    ):
        check(recipe_of(place, *WORDS, "explore.samples=1", *words))

    for credit in ("{name: rloo}", "{name: reinforce++, baseline: true}"):
        with pytest.raises(ConfigError, match=r"samples must be > 1 with credit r.*, which compares samples"):
            check(recipe_of(place, *WORDS, "explore.samples=1", f"credit={credit}"))
    with pytest.raises(
        ConfigError, match=r"samples must be > 1 with rows\.drop_equal_outcomes, since no other"
    ):
        check(recipe_of(place, *WORDS, "explore.samples=1", "rows.drop_equal_outcomes=true"))


@pytest.mark.slow
def test_an_episode_alone_in_its_task_is_trained(place, run_once):
    """Every one of them, by what it earned beyond V."""
    words = ["explore.samples=1", "explore.per_iteration=8", "iterations=1", "evaluate=null"]
    run_once("alone", *WORDS, *words)
    rows = read_credits(place / "runs/alone/credits/turn-gae.jsonl")

    assert [row.bin for row in rows] == ["trained"] * 8
    assert len({row.task for row in rows}) == 8
