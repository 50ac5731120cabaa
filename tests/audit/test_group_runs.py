"""Inspection of a run of groups: episodes that the run leaves out are no rejected rows."""

import pytest

from perturn.audit import audit, inspect_json
from perturn.audit.dataset_audit import _run_facts
from perturn.config.parsing import parse
from perturn.config.recipe import Recipe
from perturn.data.group_account import CreditRow, write_credits
from perturn.data.run_folder import Run
from perturn.data.run_paths import RunPaths
from perturn.data.store import TrajectoryStore
from perturn.types import Action, Status, Task, Trajectory, Turn
from support.audited import say, shown


@pytest.fixture
def run(tmp_path, tiny_folder, request):
    """Episodes in the bins trained, trained, no_spread, cut and failed; the first turn of `cut` does not fit.

    A parameter is the weight of the KL term, with which the episode without spread has a turn.
    """
    kl = getattr(request, "param", 0.0)
    data = {
        "name": "one",
        "output": str(tmp_path),
        "model": {"name": str(tiny_folder), "max_length": 100},
        "environment": {"name": "none"},
        "protocol": {"name": "none"},
        "explore": {"samples": 5},
        "rows": {"name": "groups"},
        "credit": {"name": "rloo"},
        "align": {"loss": {"name": "ppo-clip", "kl": kl}},
    }
    run = Run(parse(Recipe, data))
    turn, long = (Turn(tuple(say(text)), Action("go")) for text in ("seen", "far " * 200))
    bins = {"trained": [turn], "no_spread": [turn] if kl else [], "cut": [long], "failed": [turn]}
    rows = []
    with TrajectoryStore(run.paths.trajectories("explore")) as store:
        for sample, where in enumerate(("trained", "trained", "no_spread", "cut", "failed")):
            status = Status.FAILED if where == "failed" else Status.COMPLETED
            one = Trajectory(Task("t/0"), tuple(bins[where]), sample=sample, status=status)
            store.append(one)
            rows.append(CreditRow(*one.key, where, (1.0 - 2 * sample,) * len(one.turns)))
    write_credits(run.paths.credit("rloo"), rows)
    return run.folder


def test_episodes_that_a_run_leaves_out_are_counted_and_not_rejected(run, tiny_folder):
    found = audit(run, str(tiny_folder))
    part = found["parts"]["explored"]

    assert found["refused"] == []
    assert (part["rows"], part["usable"], part["failed"]) == (5, 2, 1)
    assert part["left_out"] == {"no_spread": 1, "cut": 1}
    assert len(list(inspect_json(run, str(tiny_folder)))) == 2
    assert "rows left out: no_spread 1, cut 1, failed 1" in shown(run, tiny_folder, None)


@pytest.mark.parametrize("run", [0.1], indirect=True)
def test_episodes_that_count_in_a_kl_term_are_not_left_out(run, tiny_folder):
    part = audit(run, str(tiny_folder))["parts"]["explored"]

    assert (part["usable"], part["left_out"]) == (3, {"cut": 1})


def test_a_loss_does_not_reject_episodes_that_failed(run, tiny_folder):
    """A loss of pairs rejects the other episodes, and its credit has no bins."""
    found = audit(run, str(tiny_folder), loss_name="dpo")

    assert (len(found["refused"]), found["parts"]["explored"]["failed"]) == (4, 1)


def test_rows_that_are_all_left_out_are_no_empty_file(tmp_path, tiny_folder):
    failed = Trajectory(Task("t"), (Turn((), Action("go")),), status=Status.FAILED)
    with TrajectoryStore(tmp_path / "rows.jsonl") as store:
        store.append(failed)

    assert "rows left out: failed 1" in shown(tmp_path / "rows.jsonl", tiny_folder, None)
    assert list(inspect_json(tmp_path / "rows.jsonl", str(tiny_folder))) == []


def test_tasks_of_all_iterations_and_lessons_count_as_trained_on(tmp_path):
    """Tasks 0 to 3 are explored in two iterations and task 4 is a lesson; tasks 3 to 5 are evaluated.

    The turns of an earlier iteration are not parsed.
    """
    paths = RunPaths(tmp_path)
    played = {
        paths.trajectories("explore-001"): (2, 3),
        paths.trajectories("explore-002"): (0, 1),
        paths.trajectories("lessons"): (4,),
        paths.evaluation("ppo-clip-002"): (3, 4, 5),
    }
    for file, tasks in played.items():
        with TrajectoryStore(file) as store:
            for task in tasks:
                store.append(Trajectory(Task(f"t/{task}"), (Turn((), Action("go")),)))
    earlier = paths.trajectories("explore-001")
    earlier.write_text(earlier.read_text().replace('"turns":[', '"turns":[0,'))

    assert _run_facts(paths, None)["tasks"]["evaluated_and_trained"] == 2
