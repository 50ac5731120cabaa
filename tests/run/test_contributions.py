"""A credit that reads what turns contributed: in the online loop, and again on stored episodes."""

import json
import random
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close
from typer.testing import CliRunner

from perturn.cli import app
from perturn.credit import CREDITS
from perturn.credit.returns import Return
from perturn.data.group_account import read_credits
from perturn.data.store import read_trajectories
from perturn.errors import ConfigError, RunError
from perturn.group import groups_of
from perturn.methods.spa.contributions import contributions_of, explained_scores, scores_of
from perturn.methods.spa.spa_credit import Shares
from perturn.quantities.readers import open_reader
from perturn.run.stages.credit_stage import credit_run
from support.credited import EPISODES, KEPT
from support.weights import weights_of

from .online import GROUPS

SPA = CREDITS["spa"]


@pytest.mark.slow
def test_the_loop_weighs_by_the_policy_that_acted(place, run_once):
    """SFT's hidden states; each group with a weight is trained, and the counts say what was explained."""
    run_once("shared", *GROUPS, "iterations=1", "credit.name=spa")
    run = place / "runs" / "shared"
    (file,) = run.glob("trajectories/explore*.jsonl")
    episodes = list(read_trajectories(file))
    shares = contributions_of(episodes, SPA().returns, open_reader(str(run / "checkpoints" / "sft")))
    expected = dict(zip([one.key for one in episodes], SPA()(episodes, contributions=shares), strict=True))

    (file,) = run.glob("credits/spa*.jsonl")
    for row in read_credits(file):
        found = torch.tensor(row.weight, dtype=torch.float64)
        assert_close(found, expected[row.key], atol=1e-9, rtol=0)
    stages = json.loads((run / "manifest.json").read_text())["stages"]
    counts = next(note["counts"] for name, note in stages.items() if name.startswith("credit"))
    share = explained_scores(shares, scores_of(episodes, SPA().returns))
    assert counts["explained_variance"] == pytest.approx(share, abs=1e-4)
    weighted = [
        group for group in groups_of(episodes) if any(expected[each.key].abs().max() for each in group)
    ]
    assert counts["trained"] == sum(map(len, weighted)) > 0


def test_stored_groups_are_credited_again(explored, tiny_folder):
    """By the command, with settings; nothing is fitted to the episode that FAILED, which has weights of 0."""
    shares = contributions_of(KEPT, SPA().returns, open_reader(str(tiny_folder)))
    words = [
        "credit",
        str(explored),
        "credit.name=spa",
        "credit.residual=false",
        "--reference",
        "base",
        "--json",
    ]

    found = CliRunner().invoke(app, [*words, "--against", "turn-gae"])

    assert found.exit_code == 0, found.output
    (one,) = json.loads(found.stdout)["iterations"]
    rows = {row.key: row.weight for row in read_credits(explored / one["file"])}
    for group in groups_of(KEPT):
        its = [shares[KEPT.index(each)] for each in group]
        for each, weight in zip(group, SPA(residual=False)(group, contributions=its), strict=True):
            assert rows[each.key] == pytest.approx(weight.tolist(), abs=1e-9)
    assert all(rows[each.key] == (0.0,) for each in EPISODES if each.error)
    assert one["explained_variance"] < 1
    assert one["against"]["turns"] > 0


def test_in_python_it_is_the_same(tiny_folder):
    """Of trajectories in memory, by the model's name."""
    shares = contributions_of(KEPT, SPA().returns, open_reader(str(tiny_folder)))

    found = weights_of(KEPT, "spa", model=str(tiny_folder))

    for one, expected in zip(found, SPA()(KEPT, contributions=shares), strict=True):
        assert_close(one, expected, atol=1e-12, rtol=0)
    with pytest.raises(
        ConfigError, match="model is missing, and credit SPA reads the policy that acted; give model="
    ):
        weights_of(EPISODES, "spa")


def test_the_policy_that_acted_may_be_gone(explored):
    with pytest.raises(RunError, match=r"reads policy 'sft', and .* is not there; .* --reference base"):
        credit_run(explored, ["credit.name=spa"])


def test_the_order_of_episodes_changes_no_contribution(tiny_model, tokenizer):
    """Not in any bit; an episode without turns has none, and changes none. Keys may be shared."""
    empty = replace(EPISODES[0], turns=(), sample=7)
    twice = [replace(one, policy=name) for one in EPISODES for name in ("one", "other")]
    before = contributions_of(twice, SPA().returns, open_reader(tiny_model, tokenizer))
    order = [empty, *twice]
    random.Random(0).shuffle(order)

    found = contributions_of(order, SPA().returns, open_reader(tiny_model, tokenizer))

    assert found[order.index(empty)].own == []
    assert all(found[order.index(one)] == own for one, own in zip(twice, before, strict=True))
    assert [len(one.own) for one in before] == [len(one.turns) for one in twice]


def test_rewards_that_count_are_the_credits(tiny_model, tokenizer):
    """Twice what is shared out is twice each share; successes are 1 or 0 whatever was earned."""
    grown = [
        replace(
            one,
            turns=tuple(replace(turn, reward=2 * turn.reward) for turn in one.turns),
            total_reward=2 * one.total_reward,
        )
        for one in EPISODES
    ]
    by_success = SPA(returns=Return(rewards="success"))

    reader = open_reader(tiny_model, tokenizer)
    once, twice = (contributions_of(these, SPA().returns, reader) for these in (EPISODES, grown))
    won, as_much = (contributions_of(these, by_success.returns, reader) for these in (EPISODES, grown))

    for one, other in zip(once, twice, strict=True):
        assert other.own == pytest.approx([2 * share for share in one.own], abs=1e-9)
    assert won == as_much


def test_explained_variance_worked_by_hand():
    """Sums 1, 1, 0 of scores 0, 1, 0: var(S - sum) = var(S), so nothing; an episode without turns does not count."""
    episodes = [one for one in EPISODES if one.task.id == "two"]
    lost, won = sorted(episodes, key=lambda one: one.total_reward)
    empty = replace(lost, turns=())

    shares = [Shares([own]) for own in ([0.5, 0.5], [0.25, 0.75], [0.0, 0.0], [])]
    found = explained_scores(shares, scores_of([lost, won, lost, empty], SPA().returns))

    assert found == pytest.approx(0.0, abs=1e-12)
    assert explained_scores(shares[1:2], [1.0]) is None
