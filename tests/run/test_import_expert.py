"""Episodes of others in a run: trajectories of ours, conversations of TRL's, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from perturn.cli import main
from perturn.data.store import TrajectoryStore, read_trajectories
from perturn.errors import ConfigError, DataError, RunError
from perturn.run.execute import open_run, run_stages
from perturn.run.session import Session
from perturn.run.stages.collect_stage import import_expert
from perturn.run.stages.row_stage import expert_episodes
from perturn.types import Action, Status, Task, Trajectory, Turn

GAME = Path(__file__).parents[2] / "examples/text_game.py"


def said(text):
    """A conversation of TRL's."""
    return {"messages": [{"role": "user", "content": "Guess."}, {"role": "assistant", "content": text}]}


def pair():
    """A pair of TRL's."""
    asked, good, bad = ([{"role": role, "content": role}] for role in ("user", "assistant", "assistant"))
    return {"prompt": asked, "chosen": good, "rejected": [{**bad[0], "content": "no"}]}


def played(task, environment="guess-number-1.0", kind="guess"):
    """An episode that a person solved."""
    turns = (Turn(({"role": "user", "content": "Guess it."},), Action("3"), 1.0),)
    facts = {"total_reward": 1.0, "success": True, "terminated": True, "policy": "person"}
    return Trajectory(Task(task, kind), turns, environment=environment, **facts)


def lines(file, *rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def stored(file, *rows):
    """A file of trajectories, of any name."""
    with TrajectoryStore(file) as store:
        for row in rows:
            store.append(row)
    return file


@pytest.fixture
def run(recipe):
    with open_run(recipe, [], "collect") as opened:
        yield opened


def tasks(run):
    return [task["id"] for task in json.loads(run.paths.tasks.read_text())["panels"]["explore"]]


def test_trajectories_on_tasks_of_the_run_are_brought_once(run, tmp_path):
    """Three of four are; the name of the file says nothing. A second call adds none. Both count what is not used."""
    rows = [played(task) for task in [*tasks(run)[:3], "guess/other"]]
    rows[1] = replace(rows[1], status=Status.FAILED, error="the world broke")
    rows[2] = replace(rows[2], terminated=False, truncated=True)
    file = stored(tmp_path / "mine.txt", *rows)

    counts = [import_expert(run, file) for _ in range(2)]

    unused = {"left_out": 1, "no_success": 1, "cut": 1}
    assert counts == [{"imported": 3, "before": 0} | unused, {"imported": 0, "before": 3} | unused]
    assert list(read_trajectories(run.paths.trajectories("expert"))) == rows[:3]


def test_the_expert_plays_the_tasks_that_nobody_brought(run, tmp_path):
    """Eight tasks are taught or explored; one of them has an episode of a person."""
    import_expert(run, stored(tmp_path / "mine.jsonl", played(tasks(run)[0])))

    run_stages(run, names=["expert"])

    policies = [one.policy for one in read_trajectories(run.paths.trajectories("expert"))]
    assert sorted(policies) == ["expert"] * 7 + ["person"]


@pytest.mark.parametrize("shape", ["array", "ShareGPT", "text", "Alpaca"])
def test_conversations_of_every_shape_are_brought(run, tmp_path, shape):
    """The content of the file says which it is."""
    turns = [{"from": "human", "value": "Guess."}, {"from": "gpt", "value": "1"}]
    row = {
        "array": [said("1")],
        "ShareGPT": {"conversations": turns},
        "text": {"prompt": "Guess.", "completion": "1"},
        "Alpaca": {"instruction": "Guess.", "input": "", "output": "1"},
    }

    assert import_expert(run, lines(tmp_path / "rows", row[shape]))["imported"] == 1

    (stored,) = read_trajectories(run.paths.trajectories("expert"))
    assert (stored.turns[0].action.text, stored.success) == ("1", True)


def test_conversations_are_taught_beside_the_episodes(run, tmp_path):
    """Three conversations as successes, after the four episodes of SFT's task list."""
    assert import_expert(run, lines(tmp_path / "rows", *map(said, "123")))["imported"] == 3

    run_stages(run, names=["expert", "sft"])

    assert run.manifest["stages"]["sft"]["counts"]["examples"] == 7


@pytest.mark.parametrize("name", ["rft", "nat"])
def test_conversations_are_taught_without_sft_too(recipe, tmp_path, name):
    """By the ways that begin with what SFT would be taught; they stand after the episodes of the tasks."""
    words = ["sft=null", f"rows.name={name}", "align.loss={name: sft}"]
    file = lines(tmp_path / "rows", *map(said, "123"))
    with open_run(recipe, words, "collect") as run:
        assert import_expert(run, stored(tmp_path / "mine", played(tasks(run)[0])))["imported"] == 1
        assert import_expert(run, file)["imported"] == 3
        found = expert_episodes(Session(run))

    assert [one.environment for one in found] == ["guess-number-1.0", "", "", ""]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [["sft=null"], ["sft=null", "rows.name=kto", "align.loss={name: kto}"]],
    ids=["pairs", "kto"],
)
def test_conversations_that_nothing_teaches_are_refused(recipe, tmp_path, words):
    """Pairs and KTO compare episodes of explored tasks."""
    says = "conversations are trained on by sft and by rows that start over, such as rows.name=rft, alone"
    with open_run(recipe, words, "collect") as run, pytest.raises(ConfigError, match=says):
        import_expert(run, lines(tmp_path / "rows", said("1")))


REFUSED = {
    "a pair": ([said("1"), pair()], DataError, r"rows\.jsonl:2: expected one conversation, got a pair"),
    "no row": ([], DataError, r"rows\.jsonl holds no row; give rows with"),
    "rows of nobody": ([{"said": "a"}], DataError, r"rows\.jsonl:1: expected one of the forms messages"),
    "a broken row": ([said("1"), {"messages": []}], DataError, r"rows\.jsonl:2: "),
    "lists": ([said("1")["messages"]] * 2, DataError, r"rows\.jsonl:1: expected a JSON object, got a list"),
}


@pytest.mark.parametrize(("rows", "error", "says"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_brought_is_refused_and_nothing_stored(run, tmp_path, rows, error, says):
    with pytest.raises(error, match=says):
        import_expert(run, lines(tmp_path / "rows.jsonl", *rows))

    assert not run.paths.trajectories("expert").exists()


def test_episodes_of_another_world_or_of_other_tasks_are_refused(run, tmp_path):
    """Rewards of two worlds do not compare."""
    with pytest.raises(
        DataError, match=r"row 1: expected an episode of guess-number-1\.0, got one of maze-2"
    ):
        import_expert(run, stored(tmp_path / "a.jsonl", played(tasks(run)[0], environment="maze-2")))
    with pytest.raises(ConfigError, match=r"no episode is on one of the 8 tasks of sft\.tasks and explore"):
        import_expert(run, stored(tmp_path / "b.jsonl", played("guess/other")))


def test_a_second_file_of_conversations_is_not_taken_for_the_first(run, tmp_path):
    """Both have a row 1."""
    import_expert(run, lines(tmp_path / "a.jsonl", said("1")))

    with pytest.raises(DataError, match="row-1: the run holds another conversation under this number"):
        import_expert(run, lines(tmp_path / "b.jsonl", said("2")))


def test_nothing_is_added_to_what_is_finished(run, tmp_path):
    """Since SFT may have been made from it."""
    run_stages(run, names=["expert"])

    with pytest.raises(RunError, match=r"expert\.jsonl is finished, so nothing can be added"):
        import_expert(run, lines(tmp_path / "a.jsonl", said("1")))


def test_a_recipe_with_a_file_of_its_own_takes_no_other(recipe, tmp_path, monkeypatch, capsys):
    """On the command line: code 2 and a line."""
    file = lines(tmp_path / "a.jsonl", said("1"))
    words = ["perturn", "import-expert", str(file), str(recipe), f"expert.file={file}"]
    monkeypatch.setattr("sys.argv", words)

    with pytest.raises(SystemExit, match="2"):
        main()

    assert (
        "expert.file must be null where the expert's episodes are imported from another file"
        in capsys.readouterr().err
    )


def test_the_command_counts_the_rows_that_training_does_not_use(perturn, recipe, run, tmp_path):
    rows = [replace(played(tasks(run)[0]), success=False), played("guess/other")]
    run.close()

    _, printed, _ = perturn("import-expert", stored(tmp_path / "mine.jsonl", *rows), recipe)

    unused = "1 left out (on no task of the run), 1 without success (ignored by training)"
    assert f"1 imported, 0 there before, {unused}\n" in printed


@pytest.mark.parametrize("words", [[], ["--dry-run"]], ids=["run", "dry run"])
def test_a_run_that_lacks_an_expert_is_rejected_before_its_folder_is_made(perturn, recipe, tmp_path, words):
    """`import-expert` opens such a run, since it brings the episodes."""
    game = [f"environment.name={GAME}:Guess", "sft.tasks={split: train}", "align=null"]
    game += ["explore=null", "rows=null", "evaluate=null"]

    code, _, said_why = perturn("run", recipe, *game, *words)

    assert code == 2
    assert "text_game.py:Guess' has no expert, whose episodes the recipe needs. Name a file" in said_why
    assert not (tmp_path / "runs").exists()
    row = lines(tmp_path / "rows", said("1"))
    assert perturn("import-expert", row, recipe, *game)[0] == 0


def test_a_missing_file_makes_no_run_folder(perturn, recipe, tmp_path):
    """The folder would keep a recipe that its user may still correct."""
    code, _, said_why = perturn("import-expert", tmp_path / "nope.jsonl", recipe)

    assert (code, "there is no such file or folder" in said_why) == (2, True)
    assert not (tmp_path / "runs").exists()
