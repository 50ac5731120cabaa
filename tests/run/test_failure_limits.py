"""An environment that fails is heard of at once, stops the stage, and is played again once it is mended."""

import json
import sys
from contextlib import suppress
from dataclasses import replace

import pytest

from perturn.cli import main
from perturn.data.store import read_trajectories
from perturn.errors import EnvironmentFailure
from perturn.run.execute import open_run
from perturn.run.failure_limits import Failures
from perturn.types import Status, Task, Trajectory
from perturn.watch import Watcher

WORLD = '''
from pathlib import Path

from perturn.types import Observation, Task

BROKEN = Path(__file__).with_name("broken")


class Flaky:
    """Fails to pose the tasks that a file lists."""

    name = "flaky-1.0"

    def tasks(self, split):
        return [Task(f"{split}/{n}", "k", split) for n in range(12)]

    def reset(self, task, seed):
        if BROKEN.is_file() and ("all" in BROKEN.read_text() or task.id in BROKEN.read_text().split()):
            raise ValueError("the simulator is gone")
        return Observation("Say up.")

    def step(self, action):
        return Observation("Well done.", reward=1.0, terminated=True, success=True)

    def close(self):
        pass


class Shown(Flaky):
    def expert(self, task):
        return ["up"]
'''
RECIPE = """
name: one
output: {place}/runs
model: {{name: "{model}", dtype: float32}}
environment: {{name: "{module}:Shown"}}
protocol: {{name: tiny, format: action, system: Say., max_turns: 2}}
sft: {{loss: {{name: sft}}, tasks: {{split: train}}}}
explore: {{tasks: {{split: train}}, sampling: {{max_new_tokens: 2}}}}
align: {{loss: {{name: tlm-dre}}}}
evaluate: {{tasks: {{split: test}}, sampling: {{max_new_tokens: 2}}, concurrency: 4}}
worlds: {{processes: 0}}
"""


def trajectory(error=None):
    one = Trajectory(Task("t"), (), "w", "r", ())
    return replace(one, status=Status.FAILED, error=error) if error else one


FINE, BAD = trajectory(), trajectory("ValueError: x")


@pytest.mark.parametrize(
    ("ended", "total", "concurrency", "too_many"),
    [
        ([BAD] * 7, 36, 1, False),
        ([BAD] * 8, 36, 1, True),
        ([BAD] * 2, 2, 1, True),
        ([BAD, FINE], 2, 1, False),
        ([BAD] * 15, 36, 16, False),
        ([BAD] * 16, 36, 16, True),
        ([FINE] * 4 + [BAD] * 4, 36, 1, False),
        ([FINE] * 100 + [BAD] * 9, 200, 1, True),
        ([BAD] * 100 + [FINE] * 9, 200, 1, False),
    ],
)
def test_a_world_is_broken_when_most_of_the_last_episodes_failed(ended, total, concurrency, too_many):
    """Half of the last 16 may fail; 8 are waited for, all if there are fewer, and as many as are played at a time."""
    assert Failures(0.5, total, concurrency).add(ended).too_many is too_many
    assert not Failures(1.0, total, concurrency).add(ended).too_many


def test_the_commonest_error_is_quoted():
    """Six of one kind and three of another."""
    failures = Failures(0.5, 9).add([BAD] * 6 + [trajectory("KeyError: 'y'")] * 3)

    with pytest.raises(
        EnvironmentFailure, match=r"^expert: 9 of the last 9 episodes failed, 6 of them with: ValueError: x"
    ):
        failures.refuse("expert")


@pytest.fixture
def place(tmp_path, tiny_folder, monkeypatch):
    """A folder with a world that fails as the file `broken` says, and a recipe."""
    module = f"flaky_{tmp_path.name}"
    (tmp_path / f"{module}.py").write_text(WORLD)
    recipe = RECIPE.format(place=tmp_path, model=tiny_folder, module=module)
    (tmp_path / "recipe.yaml").write_text(recipe)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.fixture
def perturn(place, monkeypatch, capsys):
    """The command on the recipe; its exit code, what it printed, and its errors."""

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["perturn", words[0], str(place / "recipe.yaml"), *words[1:]])
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        printed = capsys.readouterr()
        return code, printed.out, " ".join(printed.err.split())

    return call


@pytest.mark.parametrize(
    ("command", "file", "judged"),
    [("collect", "trajectories/expert", 12), ("evaluate", "evaluation/base", 8)],
)
def test_a_broken_world_stops_the_stage_and_is_played_again_once_mended(
    place, perturn, command, file, judged
):
    """All 12 fail: as many as play at once are judged, code 2; mended, all are played, and none failed is left."""
    (place / "broken").write_text("all")
    first, _, said = perturn(command)
    recorded = list(read_trajectories(place / f"runs/one/{file}.jsonl"))
    alarms = [alarm.rule for alarm in Watcher(place / "runs/one").look().alarms]
    (place / "broken").unlink()

    second, _, again = perturn(command)

    assert first == 2
    assert alarms == ["episodes fail"]
    assert (
        f"{judged} of the last {judged} episodes failed, {judged} of them with: ValueError: the simul" in said
    )
    assert [one.status for one in recorded] == [Status.FAILED] * len(recorded)
    assert second == 0
    assert f"{len(recorded)} failed episodes are played again" in again
    after = list(read_trajectories(place / f"runs/one/{file}.jsonl"))
    assert [one.status for one in after] == [Status.COMPLETED] * 12


def test_an_expert_that_failed_is_played_again_until_something_was_made_from_it(place, perturn):
    """One of 12 is data, and the stage is done; mended, the next call plays that one."""
    (place / "broken").write_text("train/3")
    first = perturn("collect")[0]
    file = place / "runs/one/trajectories/expert.jsonl"
    failed = [one.task.id for one in read_trajectories(file) if one.status is Status.FAILED]
    (place / "broken").unlink()

    second, _, said = perturn("collect")
    third = perturn("collect")[2]

    assert (first, second, failed) == (0, 0, ["train/3"])
    assert "1 failed episodes are played again" in said
    assert sum(one.success for one in read_trajectories(file)) == 12
    assert "expert: done before" in third


@pytest.mark.parametrize(
    ("checkpoint", "says"), [(True, "expert: done before"), (False, "1 failed episodes are played again")]
)
def test_an_expert_is_not_played_again_once_a_training_has_unfinished_files(place, perturn, checkpoint, says):
    """A killed training would otherwise start anew. A training that raised before its first file has used nothing."""
    (place / "broken").write_text("train/3")
    perturn("collect")
    with suppress(KeyboardInterrupt), open_run(place / "runs/one") as run, run.stage("sft"):
        if checkpoint:
            run.paths.partial("sft").mkdir()
        raise KeyboardInterrupt
    (place / "broken").unlink()

    said = perturn("collect")[2]

    assert says in said


def test_few_failed_episodes_of_an_evaluation_stay_in_its_denominator(place, perturn):
    """Two of 12: the stage is done, the two count, and they are not played until they succeed."""
    (place / "broken").write_text("test/3 test/4")
    codes = [perturn("evaluate")[0]]
    (place / "broken").unlink()
    codes.append(perturn("evaluate")[0])

    found = list(read_trajectories(place / "runs/one/evaluation/base.jsonl"))
    assert codes == [0, 0]
    assert sorted(one.task.id for one in found if one.status is Status.FAILED) == ["test/3", "test/4"]
    assert len(found) == 12


@pytest.mark.slow
def test_a_run_does_not_go_on_in_another_version_of_its_world(place, perturn):
    """Two of 12 fail and are stored; in the new version nothing is, and back in the first one the rest is played."""
    (place / "broken").write_text("all")
    perturn("evaluate")
    (place / "broken").unlink()
    file, source = place / "runs/one/evaluation/base.jsonl", place / f"flaky_{place.name}.py"
    world = sys.modules[source.stem].Flaky

    world.name = "flaky-2.0"
    code, _, said = perturn("evaluate")
    held = list(read_trajectories(file))
    world.name = "flaky-1.0"

    assert code == 2
    assert "this run's tasks are of flaky-1.0, and the world that plays is flaky-2.0 now" in said
    assert {one.environment for one in held} <= {"flaky-1.0"}
    assert perturn("evaluate")[0] == 0
    assert [one.environment for one in read_trajectories(file)] == ["flaky-1.0"] * 12


def test_whoever_wants_failures_as_data_may_have_them(place, perturn):
    """worlds.max_failed=1 is as it was."""
    (place / "broken").write_text("all")

    assert perturn("evaluate", "worlds.max_failed=1")[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Shown", "Flaky"])
def test_a_dry_run_plays_an_episode_and_tells(place, perturn, kind):
    """With an expert and without one; code 1, as a check that found a problem, and 0 once mended."""
    words = [f"environment.name=flaky_{place.name}:{kind}", "--dry-run", "--json"]
    (place / "broken").write_text("all")
    broken, told, _ = perturn("collect", *words)
    (place / "broken").unlink()
    mended, well, _ = perturn("collect", *words)

    assert (broken, mended) == (1, 0)
    assert "episodes played now failed: ValueError: the simulator is gone" in json.loads(told)["problems"][0]
    assert json.loads(well)["problems"] == []
    assert "no expert to play" not in told or kind == "Flaky"
