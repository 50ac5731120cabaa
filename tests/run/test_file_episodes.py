"""Runs on episodes that were played elsewhere: explorer `file`."""

import json
from dataclasses import replace

import pytest
import yaml
from typer.testing import CliRunner

from perturn.analysis.run_contents import read_run
from perturn.cli import app
from perturn.config.recipe import read_recipe
from perturn.data.group_account import read_credits
from perturn.data.store import read_trajectories, write_records
from perturn.errors import ConfigError, DataError
from perturn.types import Action, Status, Task, Trajectory, Turn

ASKED = ({"role": "user", "content": "find it"},)


def done(*words):
    """Run a command that succeeds."""
    CliRunner().invoke(app, list(map(str, words)), catch_exceptions=False)


def episode(sample, reward, task="a", **more):
    action = Action("go", token_ids=(1, 2), logprobs=(-0.5, -0.5))
    turns = (Turn(ASKED, action), Turn(ASKED, action, reward=reward))
    one = Trajectory(Task(task), turns, "log-verl", total_reward=reward, success=reward > 0, sample=sample)
    return replace(one, **more)


@pytest.fixture
def recipe(tmp_path):
    """A recipe that takes two groups of episodes from a file."""
    broken = episode(2, 0.0, status=Status.FAILED, error="no box")
    rows = [episode(0, 1.0), episode(1, 0.0), broken, episode(0, 1.0, "b"), episode(1, 1.0, "b")]
    write_records(tmp_path / "theirs.jsonl", rows)
    file = tmp_path / "theirs.yaml"
    settings = {"name": "theirs", "model": {"name": "tiny-agent"}, "output": str(tmp_path)}
    file.write_text(
        yaml.safe_dump(settings | {"explore": {"name": "file", "path": str(tmp_path / "theirs.jsonl")}})
    )
    return file


def test_credits_and_the_report_read_the_episodes_of_a_file(recipe, tmp_path):
    run = tmp_path / "theirs"

    done("collect", recipe)
    done("credit", run, "credit.name=rloo")
    done("report", run)

    rows = {row.key: row for row in read_credits(run / "credits/rloo.jsonl")}
    assert rows["a", 0].weight == (1.0, 1.0)
    assert rows["a", 1].weight == (-1.0, -1.0)
    assert len(rows) == 5
    assert len(read_run(run).explored) == 5
    assert json.loads((run / "summary.json").read_text())["policies"] == []


def test_episodes_stay_as_they_are(recipe, tmp_path):
    done("collect", recipe)

    kept = read_trajectories(tmp_path / "theirs/trajectories/explore.jsonl")
    assert list(kept) == list(read_trajectories(tmp_path / "theirs.jsonl"))


def test_two_episodes_with_one_number_are_refused(recipe, tmp_path):
    write_records(tmp_path / "theirs.jsonl", [episode(0, 1.0), episode(0, 0.0)])

    with pytest.raises(DataError, match=r"theirs.jsonl:2: has the task and sample of line 1"):
        done("collect", recipe)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["explore={name: file}"], "explore.path is missing"),
        (["iterations=2", "align.loss.name=ppo-clip", "rows.name=groups"], "set iterations to 1, got 2"),
    ],
)
def test_what_a_file_cannot_give_is_refused(words, said, recipe):
    with pytest.raises(ConfigError, match=said):
        read_recipe(recipe, words)
