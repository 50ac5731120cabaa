"""The recipe of IPR from end to end, shrunk: the expert's episodes are played on, and his steps are paired."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from perturn.data.iteration_numbers import ledger_of
from perturn.data.origins import actions_of, branches_of
from perturn.data.store import read_pairs, read_trajectories
from perturn.report import write_report
from perturn.run.execute import open_run, run_stages
from perturn.run.stages.group_stage import LengthLimit
from support.shrunk import SHRUNK

RECIPE = Path(__file__).parents[2] / "recipes" / "alfworld-like_ipr.yaml"


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A run of two iterations."""
    with open_run(RECIPE, [*SHRUNK, f"output={tmp_path_factory.mktemp('steps')}"]) as run:
        run_stages(run)
    return run


def of(run, name):
    return list(read_trajectories(run.paths.trajectories(name)))


@pytest.mark.parametrize("mark", ["-001", "-002"])
def test_the_experts_episodes_of_explored_tasks_are_played_on_by_the_policy(done, mark):
    """From every second turn, twice, each beginning with his turns; who explored plays on."""
    explored, branches = of(done, f"explore{mark}"), of(done, f"branch{mark}")
    tasks = {one.task.id for one in explored}
    experts = [one for one in of(done, "expert") if one.task.id in tasks]

    assert len(experts) == len(tasks) == 2
    assert {one.policy for one in branches} == {explored[0].policy}
    for expert, by_turn in zip(experts, branches_of(experts, branches), strict=True):
        assert list(by_turn) == [*range(2, len(expert.turns), 2)]
        for turn, found in by_turn.items():
            assert len(found) == 2
            assert all(actions_of(one)[:turn] == actions_of(expert)[:turn] for one in found)
            assert all(one.turns[turn].observation == expert.turns[turn].observation for one in found)


@pytest.mark.parametrize("mark", ["-001", "-002"])
def test_whole_episodes_and_steps_are_paired_in_one_file(done, mark):
    """A policy that can do nothing fails from each of his turns, where he himself succeeds: his last step is a pair."""
    pairs = list(read_pairs(done.paths.pairs(mark)))
    counts = done.manifest["stages"][f"pair{mark}"]["counts"]
    of_steps = [pair for pair in pairs if pair.rejected.origin is not None]

    assert len(of_steps) == counts["steps_kept"] > 0
    assert len(pairs) - len(of_steps) == counts["kept"] > 0
    for pair in of_steps:
        kept = pair.rejected.taken_over
        assert kept >= 2
        assert actions_of(pair.chosen)[:kept] == actions_of(pair.rejected)[:kept]
    assert sum(ledger_of(counts, 4)["bins"].values()) == 4


def test_branches_that_part_beyond_the_length_limit_are_known(done):
    """Their shared turns count; of as many tokens as the first turns have, none is longer but for these."""
    branches = of(done, "branch-001")

    def cut(limit, episodes):
        model = replace(done.recipe.model, max_length=limit)
        return LengthLimit(replace(done.recipe, model=model)).too_long(episodes)

    limit = next(limit for limit in range(1, 1024) if not cut(limit, of(done, "explore-001")))
    assert cut(limit, branches) == {one.key for one in branches}
    assert cut(1024, branches) == set()


def test_it_is_trained_and_shown(done):
    """By DPO with the likelihood of the chosen side, from SFT's policy as reference; the report lacks nothing."""
    rows = [json.loads(line) for line in done.paths.metrics("align-002").read_text().splitlines()]

    assert all(row["loss"] > 1 for row in rows)  # DPO alone begins with log 2
    assert done.is_done("evaluate-dpo-002")
    assert "This run has no" not in write_report(done.folder).read_text(encoding="utf-8")
