"""Expert episodes: an expert that raises, or whose world dies, costs one trajectory."""

import asyncio
import json
from functools import partial
from types import SimpleNamespace

import pytest

from perturn.data.records import trajectory_to_dict
from perturn.data.store import write_records
from perturn.episodes.play_many import Job
from perturn.episodes.world_threads import play_again
from perturn.errors import WorldLost
from perturn.run.execute import _check_row, open_run, run_stages
from perturn.run.stages.collect_stage import demonstrate, own_episodes
from perturn.types import Action, EpisodeProtocol, Observation, Status, Task, Trajectory, Turn

PROTOCOL = EpisodeProtocol(name="plain", format="action", system="Play.", max_turns=4)


class World:
    """Solved by one 'up'; the expert raises what is in `coming`."""

    name = "world-1.0"

    def __init__(self, *coming):
        self.coming = list(coming)

    def reset(self, task, seed):
        """Pose the task."""
        return Observation("begin")

    def step(self, action):
        """End it."""
        return Observation("end", reward=1.0, terminated=True, success=True)

    def expert(self, task):
        """The one action."""
        if self.coming:
            raise self.coming.pop(0)
        return ["up"]


@pytest.mark.parametrize(
    ("coming", "retries", "error"),
    [
        ([], 1, None),
        ([ValueError("no plan")], 1, "ValueError: no plan"),
        ([asyncio.CancelledError("late")], 1, "CancelledError: late"),
        ([SystemExit(7)], 1, "SystemExit: 7"),
        ([WorldLost("gone")], 1, None),
        ([WorldLost("gone")] * 2, 1, "WorldLost: gone"),
        ([WorldLost("gone")], 0, "WorldLost: gone"),
    ],
)
def test_an_expert_that_raises_costs_one_trajectory(coming, retries, error):
    """It is stored as failed, without turns; where its world was lost it is asked again first."""
    record = play_again(partial(demonstrate, World(*coming), Job(Task("t"), 0), PROTOCOL), retries)

    assert record.error == error
    assert record.status is (Status.FAILED if error else Status.COMPLETED)
    assert [turn.action.text for turn in record.turns] == ([] if error else ["Action: up"])
    assert record.policy == "expert"


def test_only_conversations_become_successes(tmp_path):
    """A trajectory without an environment keeps its outcome and its sample number."""
    turns = (Turn(({"role": "user", "content": "u"},), Action("a")),)
    lost = Trajectory(Task("row-2"), turns, sample=1)
    said = {"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]}
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{json.dumps(said)}\n{json.dumps(trajectory_to_dict(lost))}\n")

    assert list(own_episodes(file)) == [Trajectory(Task("row-1"), turns, success=True), lost]


def test_episodes_of_a_file_that_are_no_successes_are_counted_in_a_warning(recipe, tmp_path, caplog):
    """Training ignores them, whether they name an environment or not."""
    turns = (Turn(({"role": "user", "content": "u"},), Action("a")),)
    file = tmp_path / "own.jsonl"
    write_records(file, [Trajectory(Task(f"guess/{n}"), turns, success=n == 1) for n in (1, 2, 3)])

    run_stages(
        open_run(recipe, [f"output={tmp_path}", f"expert.file={file}"], "collect"), "collect", ["expert"]
    )

    assert "own.jsonl: episodes that are no successes: 2 of 3; training ignores them" in caplog.text


@pytest.mark.parametrize(("key", "count"), [("expert.file", 2), ("rows.path", 3)])
def test_rows_that_training_ignores_are_not_checked(key, count):
    """Of an expert's file these are trajectories without success; other rows count without one."""
    turns, checked = (Turn((), Action("a")),), []
    rows = [
        Trajectory(Task("t"), turns),
        Trajectory(Task("t"), turns, success=True),
        Trajectory(Task("row-1"), turns),
    ]

    for row in rows:
        _check_row(SimpleNamespace(check=checked.append), None, key, False, row)

    assert len(checked) == count
