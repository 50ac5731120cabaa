"""Pairs that end with one turn, as stages of a run: by the expert or by oneself, and by what a step cost."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from perturn.data.iteration_numbers import ledger_of
from perturn.data.origins import actions_of
from perturn.data.store import read_pairs, read_trajectories
from perturn.errors import RunError
from perturn.estimate.dry_run import make_plan
from perturn.methods.step_dpo.wrong_branches import WrongBranches
from perturn.report import write_report
from perturn.run.execute import open_run, run_stages
from perturn.run.stages.measure_distance import measured
from perturn.types import Status
from support.branches import jobs_of
from support.corrections import RIGHT, STRAYED, TASK, commands, explore, make_recipe, record
from support.shrunk import SHRUNK

LAB = Path(__file__).parents[2] / "recipes" / "alfworld-like_lab.yaml"
EXPERT = [
    *(word for word in SHRUNK if not word.startswith(("branch", "explore.", "evaluate"))),
    "explore.tasks={split: train, n: 3, skip: 32}",
    "evaluate=null",
    "explore.name=expert-branches",
    "explore.every=1",
    "explore.branches=2",
    "rows={name: branch-pairs, length: turn}",
    "align.shared_prefix=mask",
    "align.loss={name: tlm-dre}",
]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A run on turns of the expert, stopped before its pairs and taken up again."""
    words = [*EXPERT, f"output={tmp_path_factory.mktemp('turns')}"]
    with open_run(LAB, words) as run:
        run_stages(run, names=("lessons", "base", "expert", "sft", "explore", "branch"))
    with open_run(run.folder) as run:
        run_stages(run)
    return run


def test_each_turn_of_the_expert_is_preferred_to_what_failed_in_its_place(done):
    """A policy that can do nothing fails from each of his turns after the first, and mostly with another one."""
    counts = done.manifest["stages"]["pair"]["counts"]
    explored, branches = (
        list(read_trajectories(done.paths.trajectories(name))) for name in ("explore", "branch")
    )
    pairs, experts = read_pairs(done.paths.pairs()), read_trajectories(done.paths.trajectories("expert"))
    ways = {one.task.id: actions_of(one) for one in experts}
    turns = sum(len(ways[task]) - 1 for task in {one.task.id for one in explored})

    assert len(branches) == 2 * turns
    assert counts["memberships"] == 3 * turns
    assert sum(ledger_of(counts, 3)["bins"].values()) == 3 * turns
    assert 0 < len(pairs) == counts["kept"] / 2 <= turns
    for pair in pairs:
        turn = pair.rejected.taken_over
        assert len(pair.rejected.turns) == len(pair.chosen.turns) == turn + 1
        assert actions_of(pair.chosen) == ways[pair.chosen.task.id][: turn + 1]
        assert actions_of(pair.chosen)[:turn] == actions_of(pair.rejected)[:turn]
        assert (pair.chosen.total_reward, pair.rejected.total_reward) == (1.0, 0.0)


def test_training_masks_the_turns_in_common(done):
    """One turn of each side has a weight; the report is written."""
    rows = [json.loads(line) for line in done.paths.confidence("").read_text().splitlines()]

    assert len(rows) == len(list(read_pairs(done.paths.pairs())))
    assert all(len(row[side]["weight"]) == 1 for row in rows for side in ("chosen", "rejected"))
    assert done.is_done("align")
    assert write_report(done.folder).is_file()


def run_of(folder, explorer, rows):
    """A run of three explored episodes: a success, one that strayed at its fourth turn, one that never moved."""
    recipe = make_recipe(
        output=str(folder),
        base=None,
        model={"name": "smollm2-135m"},
        explore={"tasks": {"n": 3}, **explorer},
        evaluate=None,
        rows=rows,
    )
    return open_run(recipe), [record(RIGHT), record(STRAYED, sample=1), record(["look"] * 3, sample=2)]


def branch_of(texts, kept, number, **changes):
    """An episode that was played on from the one that strayed; what is its own is text."""
    whole = record(texts, sample=number)
    own = [replace(turn, action=replace(turn.action, token_ids=None)) for turn in whole.turns[kept:]]
    return replace(whole, turns=(*whole.turns[:kept], *own), origin=1, taken_over=kept, **changes)


def pairs_of(folder, explorer, rows, branches):
    """(what both sides did) of each pair, and the counts that are not 0."""
    opened, explored = run_of(folder, explorer, rows)
    with opened as run:
        explore(run, "explore", explored)
        explore(run, "branch", branches)
        run_stages(run)
    counts = json.loads(run.paths.manifest.read_text())["stages"]["pair"]["counts"]
    pairs = read_pairs(run.paths.pairs())
    return [(commands(pair.chosen), commands(pair.rejected)) for pair in pairs], {
        name: count for name, count in counts.items() if count
    }


OWN = {"name": "progress-pairs", "length": "turn", "distance": "searching"}


def test_an_own_turn_that_comes_nearer_is_preferred_to_the_first_wrong_one(tmp_path):
    """Of three branches one goes right and fails later, one goes wrong, and one never came back to where it began."""
    lost = {"status": Status.FAILED, "error": "NotComeBack: elsewhere"}
    branches = [
        branch_of([*RIGHT[:4], "look"], 3, 4),
        branch_of([*RIGHT[:3], "look", "look"], 3, 7),
        branch_of(["look"], 3, 10, **lost),
    ]
    pairs, counts = pairs_of(tmp_path, {"name": "wrong-branches", "of": "failures"}, OWN, branches)

    assert pairs == [(RIGHT[:4], STRAYED[:4])]
    assert counts == {"failed": 1, "kept": 2, "alone": 1, "memberships": 4}


def test_where_no_pair_is_left_nothing_is_named_that_goes_unread(tmp_path):
    """By progress no threshold is read, so more branches are what helps."""
    branches = [branch_of([*RIGHT[:3], "look", "look"], 3, 7)]

    with pytest.raises(
        RunError,
        match=r"of 3 explored trajectories, no pair is left .*; explore more tasks, or take a higher",
    ):
        pairs_of(tmp_path, {"name": "wrong-branches", "of": "failures"}, OWN, branches)


def test_a_turn_that_cost_the_episode_is_rejected(tmp_path, capsys):
    """From turns 1, 2 and 3 all goes well, from 4 and 5 nothing: the fourth turn cost it, and the others did not."""
    branches = [branch_of(RIGHT, kept, 3 * kept + 1) for kept in (1, 2, 3)]
    branches += [branch_of([*STRAYED[:kept], "look"], kept, 3 * kept + 1) for kept in (4, 5)]
    pair = {"name": "drop-pairs", "length": "turn"}
    pairs, counts = pairs_of(tmp_path, {"name": "branches", "of": "failures", "every": 1}, pair, branches)

    assert pairs == [(RIGHT[:4], STRAYED[:4])]
    assert counts == {"no_drop": 4, "kept": 1, "steps": 5}
    assert "explored episodes (no drop 4, kept 1" in " ".join(capsys.readouterr().err.split())


def test_failures_are_played_on_from_before_their_first_wrong_turn():
    """The one that strayed from before its fourth turn, the one that never moved from its start; twice each."""
    episodes = [record(RIGHT), record(STRAYED, sample=1), record(["look"] * 3, sample=2)]
    jobs = jobs_of(WrongBranches(of="failures", samples=3), measured(make_recipe(), episodes))

    assert [(job.begun.sample, job.kept) for job in jobs] == [(1, 3), (1, 3), (2, 0), (2, 0)]
    assert all(job.task == TASK for job in jobs)
    assert len({job.sample for job in jobs}) == 4


def test_a_plan_counts_one_turn_of_each_episode(tmp_path):
    """Of 4 explored episodes, 5 times."""
    words = ["explore.tasks={split: train, n: 4, skip: 32}", f"output={tmp_path}"]
    words += [
        "explore.name=wrong-branches",
        "explore.branches=5",
        "rows={name: progress-pairs, distance: searching}",
    ]
    plan = make_plan(LAB, [*SHRUNK[:6], *words], None)
    work = {step.name: step.work for step in plan.steps}

    assert work["branch"] == "20 continuations from turns of 4 episodes (assumed)"
