"""Branches of so many turns: left where they are, and read by what these turns were worth."""

import json

import pytest

from perturn.data.group_account import read_credits
from perturn.data.store import read_trajectories
from perturn.episodes.episode import Job
from perturn.errors import ConfigError
from perturn.explore.branches import Branches
from perturn.run.execute import check
from perturn.run.stages.credit_stage import credit_run
from perturn.types import Status, Task
from support.branches import explored, jobs_of
from support.windows import played

from .online import GROUPS, recipe_of

SLATE = [
    *GROUPS,
    "iterations=1",
    "evaluate=null",
    "credit.name=slate",
    "explore.name=branches",
    "explore.every=1",
    "explore.branches=2",
    "explore.turns=1",
]


def test_branches_of_one_turn_are_weighed_by_it(place, run_once):
    """Each second turn against those of two branches, by its reward; what is not over is taken as it is."""
    run_once("slate", *SLATE)
    folder = place / "runs" / "slate"
    begun, branches = (
        list(read_trajectories(folder / f"trajectories/{name}.jsonl")) for name in ("explore", "branch")
    )
    rows = {row.key: row for row in read_credits(folder / "credits/slate.jsonl")}

    assert all(len(one.turns) == one.taken_over + 1 for one in branches)
    for one in begun:
        for at in range(1, len(one.turns)):
            fork = [
                one,
                *(
                    b
                    for b in branches
                    if (b.task.id, b.origin, b.taken_over) == (one.task.id, one.sample, at)
                ),
            ]
            q = [each.turns[at].reward for each in fork]
            assert len(fork) == 3
            expected = [(each - (sum(q) - each) / 2) / 3 for each in q]
            assert [rows[each.key].weight[at] for each in fork] == pytest.approx(expected)
    counts = json.loads((folder / "manifest.json").read_text())["stages"]["branch"]["counts"]
    assert counts.get("unfinished", 0) == sum(one.status is Status.UNFINISHED for one in branches)
    with pytest.raises(
        ConfigError,
        match=r"credit portool does not take branches that are not over, .* set explore\.turns=null",
    ):
        credit_run(folder, ["credit.name=portool"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["rows.name=branch-pairs", "credit=null", "align.loss={name: dpo}"],
            "rows.name=branch-pairs does not take branches that are not over, .* set explore.turns=null",
        ),
    ],
)
def test_windows_of_branches_that_are_read_to_their_end_are_refused(place, words, says):
    with pytest.raises(ConfigError, match=says):
        recipe_of(place, *SLATE, *words)


def test_a_window_that_cuts_no_branch_is_refused(place, monkeypatch):
    """Episodes have three turns, and branches begin with the second."""
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(place)

    with pytest.raises(
        ConfigError,
        match=r"explore\.turns must be < 2, the most turns of a branch, so that some are cut, got 2",
    ):
        check(recipe_of(place, *SLATE, "explore.turns=2"))


def test_pairs_of_one_turn_by_progress_take_windows_of_branches(place):
    pair = "rows={name: progress-pairs, length: turn, distance: searching}"
    recipe = recipe_of(place, *SLATE, "rows=null", "credit=null", "align.loss={name: dpo}", pair)

    assert recipe.explore.turns == 1


def test_a_branch_in_a_window_is_left_where_it_is():
    """Played on from turn 2 of six, one turn: it is neither over nor cut."""
    jobs = jobs_of(Branches(every=2, branches=1, turns=1), [played(Job(Task("t"), 3))])
    found = [played(job) for job in jobs]

    assert [(len(one.turns), one.status, one.truncated) for one in found] == [
        (3, Status.UNFINISHED, False),
        (5, Status.UNFINISHED, False),
    ]


def test_an_explorer_may_leave_out_an_episode():
    """Its `choose` names turns of some episodes; the other episodes get no branches."""

    class First(Branches):
        def choose(self, inputs):
            return super().choose(inputs)[:1]

    jobs = jobs_of(First(every=1, branches=1), [explored(2, sample) for sample in range(3)])

    assert [(job.begun.sample, job.kept) for job in jobs] == [(0, 1)]
