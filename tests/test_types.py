"""One definition of what an episode counts as."""

import math

import pytest

from perturn.analysis.run_contents import read_run
from perturn.analysis.run_summary import set_rows
from perturn.audit.dataset_audit import _run_facts
from perturn.data.episode_outcomes import outcomes, parse_outcome
from perturn.data.run_paths import RunPaths
from perturn.data.store import TrajectoryStore
from perturn.errors import DataError
from perturn.types import (
    Action,
    Status,
    Task,
    Trajectory,
    Turn,
    WeightedTrajectory,
    failed,
    score,
    succeeded,
)

TURN = Turn(({"role": "user", "content": "a room"},), Action("take lamp"), reward=1.0)
SOLVED = Trajectory(Task("t/1"), (TURN,), total_reward=1.0, success=True)
BROKEN = Trajectory(
    Task("t/2"), (TURN,), total_reward=1.0, success=True, status=Status.FAILED, error="the engine died"
)
"""Its record says success, but it is FAILED."""


def test_a_failed_episode_scores_nothing_and_stays_counted():
    """One of two is solved, and their mean score is one half."""
    both = [SOLVED, BROKEN]

    assert [failed(one) for one in both] == [False, True]
    assert [score(one) for one in both] == [1.0, 0.0]
    assert [succeeded(one) for one in both] == [True, False]


def test_everybody_who_counts_counts_alike(tmp_path):
    """The stage that plays, the report, the watch and the audit."""
    (tmp_path / "trajectories").mkdir()
    (tmp_path / "evaluation").mkdir()
    with TrajectoryStore(tmp_path / "trajectories" / "expert.jsonl") as store:
        store.append(SOLVED)
        store.append(BROKEN)

    played = outcomes([SOLVED, BROKEN])
    (shown,) = set_rows(read_run(tmp_path))
    watched = parse_outcome(
        b'{"version": 1, "task": {"id": "t/2"}, "turns": [], "status": "failed", "success": true}', "one"
    )

    assert (played["episodes"], played["success"], played["failed"]) == (2, 1, 1)
    assert (shown["n"], shown["success"], shown["score"], shown["failed"]) == (2, 0.5, 0.5, 1)
    assert (watched.success, watched.score, watched.failed) == (False, 0.0, True)
    assert _run_facts(RunPaths(tmp_path), None)["tasks"]["unsuccessful_expert"] == 1


@pytest.mark.parametrize("weight", [(), (1.0, 2.0), (math.nan,), (math.inf,)])
def test_weights_are_one_finite_number_a_turn(weight):
    """Too few, too many, and numbers that no mean can hold; the message names the task."""
    with pytest.raises(DataError, match="task 'a': expected a finite weight for each of its 1 turns"):
        WeightedTrajectory(Trajectory(Task("a"), (Turn((), Action("look")),)), weight)


def test_a_row_without_spread_has_no_weight():
    """Its loss would be in a mean that does not count it."""
    row = Trajectory(Task("a"), (Turn((), Action("look")),) * 2)

    with pytest.raises(DataError, match="task 'a': expected weights of 0 where has_spread is False, got"):
        WeightedTrajectory(row, (0.0, 0.5), has_spread=False)
    assert WeightedTrajectory(row, (0.0, -0.0), has_spread=False).weight == (0.0, 0.0)


@pytest.mark.parametrize("clip", [(), (1.0, 2.0), (0.0,), (-1.0,), (math.nan,), (math.inf,)])
def test_factors_on_clip_ranges_are_one_number_above_0_a_turn(clip):
    row = Trajectory(Task("a"), (Turn((), Action("look")),))

    with pytest.raises(
        DataError, match="task 'a': expected a factor on the clip range, finite and > 0, for each of"
    ):
        WeightedTrajectory(row, (1.0,), clip)
