"""Runs on episodes that were played elsewhere: explorer `file`."""

import json
import os
from dataclasses import replace

import pytest
import yaml
from typer.testing import CliRunner

from perturn.analysis.run_contents import read_run
from perturn.cli import app
from perturn.config.parsing import to_yaml
from perturn.config.recipe import read_recipe
from perturn.data.group_account import read_credits
from perturn.data.store import read_trajectories, write_records
from perturn.errors import ConfigError, DataError
from perturn.estimate import machine_speed
from perturn.run.execute import check
from perturn.run.served_policy import recipe_of_record
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


def test_episodes_of_evaluated_tasks_are_warned_of(recipe, tmp_path, caplog):
    """Scores of tasks in the user's own file are not of held-out tasks."""
    scored = [
        "environment={name: alfworld-like}",
        "protocol={name: alfworld-lab}",
        "evaluate={tasks: {split: valid_seen, n: 4}}",
    ]

    def held_out():
        return check(read_recipe(recipe, scored)).tasks["evaluate"]

    task = held_out()[1].id
    assert "also trained on" not in caplog.text

    write_records(tmp_path / "theirs.jsonl", [episode(0, 1.0, task), episode(0, 1.0, "b")])
    held_out()

    says = "1 of the 4 tasks of evaluate.tasks are also trained on or explored, such as"
    assert f"{says} {task!r:.80}" in caplog.text


def test_episodes_stay_as_they_are(recipe, tmp_path):
    done("collect", recipe)

    kept = read_trajectories(tmp_path / "theirs/trajectories/explore.jsonl")
    assert list(kept) == list(read_trajectories(tmp_path / "theirs.jsonl"))


def test_a_large_file_waits_for_the_disk_as_often_as_a_small_one(recipe, tmp_path, monkeypatch):
    """Rows are written in one pass, since a killed import begins again."""
    waits, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (waits.append(descriptor), fsync(descriptor)))
    counts = []
    for name, rows in (("small", 2), ("large", 40)):
        write_records(tmp_path / "theirs.jsonl", [episode(sample, 1.0) for sample in range(rows)])
        waits.clear()
        done("collect", recipe, f"name={name}")
        counts.append(len(waits))

    assert counts[0] == counts[1]


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


def test_conversations_without_a_reward_are_no_explored_episodes(recipe, tmp_path):
    """They are said before the run begins, with the command that reads rewards."""
    said = {"messages": [*ASKED, {"role": "assistant", "content": "go"}], "reward": 1.0}
    (tmp_path / "theirs.jsonl").write_text(json.dumps(said) + "\n")

    with pytest.raises(
        DataError,
        match=r"theirs\.jsonl:1: the row is a conversation, .* `perturn import-logs` makes episodes",
    ):
        done("collect", recipe)

    assert not (tmp_path / "theirs").exists()


@pytest.mark.parametrize("words", [[], ["--dry-run"]])
def test_episodes_of_texts_are_refused_before_a_loss_that_reads_sampled_tokens(words, recipe, tmp_path):
    """With what they can be trained on. Episodes that FAILED are not trained on, and may hold anything."""
    one = episode(0, 1.0)
    texts = replace(one, turns=tuple(replace(turn, action=Action("go")) for turn in one.turns))
    broken = replace(texts, sample=1, status=Status.FAILED, error="no box")
    write_records(tmp_path / "theirs.jsonl", [broken, texts])
    settings = ["rows={name: groups}", "credit={name: rloo}", "align={loss: {name: ppo-clip}}"]

    with pytest.raises(
        DataError, match=r"theirs.jsonl:2: task 'a': turns\[0\].action holds no token_ids .*group-pairs"
    ):
        done("run", recipe, *settings, *words)
    assert not (tmp_path / "theirs").exists()


def test_sharpened_episodes_are_refused_before_a_loss_that_reads_their_logprobs(recipe, tmp_path):
    """Episodes that FAILED may be sharpened."""
    failed = episode(1, 0.0, status=Status.FAILED, error="no box", sharpened=True)
    write_records(tmp_path / "theirs.jsonl", [failed, episode(0, 1.0, sharpened=True)])
    settings = ["rows={name: groups}", "credit={name: rloo}", "align={loss: {name: ppo-clip}}"]

    with pytest.raises(
        DataError, match=r"theirs.jsonl:2: task 'a': .* another temperature .* serve.temperature=1"
    ):
        done("run", recipe, *settings)
    assert not (tmp_path / "theirs").exists()


@pytest.mark.parametrize(("served", "warned"), [("phi3", True), ("null", False)])
def test_episodes_of_another_chat_template_are_warned_of(served, warned, recipe, tmp_path, caplog):
    """The recorded folder names the model that was served. Its template sampled from other prompts."""
    file = tmp_path / "episodes/trajectories/explore.jsonl"
    file.parent.mkdir(parents=True)
    write_records(file, [episode(0, 1.0), episode(1, 0.0)])
    played = recipe_of_record(tmp_path / "episodes", "tiny-agent", [f"model.chat_template={served}"])
    (tmp_path / "episodes/recipe.yaml").write_text(to_yaml(played))
    settings = ["rows={name: groups}", "credit={name: rloo}", "align={loss: {name: ppo-clip}}"]

    check(read_recipe(recipe, [f"explore.path={file}", *settings]))

    assert ("sampled with another chat template" in caplog.text) == warned
    assert ("recipe.yaml: phi3" in caplog.text) == warned


def test_failures_without_environment_and_policy_are_episodes(recipe, tmp_path):
    """They have a task, and a reward of 0 is one."""
    rows = [replace(episode(sample, 0.0), environment="") for sample in range(2)]
    write_records(tmp_path / "theirs.jsonl", rows)

    done("collect", recipe)

    assert len(list(read_trajectories(tmp_path / "theirs/trajectories/explore.jsonl"))) == 2


def test_a_dry_run_counts_the_episodes_of_a_file(recipe, monkeypatch):
    """And measures their lengths. The model's passes are not timed here, which takes a second."""
    monkeypatch.setattr(machine_speed, "measure_passes", lambda machine, *_: machine)
    settings = ["rows={name: groups}", "credit={name: rloo}", "align={loss: {name: ppo-clip}}"]

    found = CliRunner().invoke(app, ["run", str(recipe), *settings, "--dry-run"], catch_exceptions=False)

    said = " ".join(found.output.split())
    assert "5 episodes, 1 epochs" in said
    assert "the first 5 rows of" in said
    assert "on average 2.0 turns" in said


def test_conversations_with_rewards_become_pairs_and_train(tmp_path, monkeypatch):
    """From JSON lines of texts to a trained policy, in two commands."""
    monkeypatch.chdir(tmp_path)
    rows = [
        {
            "task": task,
            "messages": [
                {"role": "user", "content": f"go to {task}"},
                {"role": "assistant", "content": "look"},
                {"role": "user", "content": "You are in the middle of a room."},
                {"role": "assistant", "content": "take mug 1" if reward else "inventory"},
            ],
            "reward": reward,
        }
        for task in ("shelf 1", "desk 1")
        for reward in (1.0, 0.0)
    ]
    (tmp_path / "episodes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "name": "scored",
        "model": {"name": "tiny-agent"},
        "explore": {"name": "file", "path": "imported.jsonl"},
        "rows": {"name": "group-pairs"},
        "align": {"loss": {"name": "tlm-dre"}},
    }
    (tmp_path / "scored.yaml").write_text(yaml.safe_dump(settings))

    done("import-logs", "episodes.jsonl", "--output", "imported.jsonl")
    done("run", "scored.yaml")

    pairs = [json.loads(line) for line in (tmp_path / "runs/scored/pairs.jsonl").read_text().splitlines()]
    assert [(pair["chosen"]["total_reward"], pair["rejected"]["total_reward"]) for pair in pairs] == [
        (1.0, 0.0)
    ] * 2
    assert (tmp_path / "runs/scored/checkpoints/tlm-dre/model.safetensors").is_file()


@pytest.mark.parametrize("successes", [0, 1])
def test_a_file_without_a_success_is_warned_of(successes, recipe, tmp_path, caplog):
    """As if each row lacked the key `success`. A FAILED episode has none anyway."""
    rows = [replace(episode(sample, 1.0), success=sample < successes) for sample in range(2)]
    write_records(tmp_path / "theirs.jsonl", [*rows, replace(episode(2, 0.0), status=Status.FAILED)])

    done("collect", recipe)

    said = "theirs.jsonl: episodes that are no successes: 2 of 3; reports, and rows that read successes, count them as"
    assert (said in caplog.text) == (not successes)
