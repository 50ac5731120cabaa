"""`deterministic: true`: whole blocks are kept, a broken one is played again, and the file is the same to the byte."""

from dataclasses import replace

import pytest

from perturn.config.stages import stages
from perturn.data.store import write_records
from perturn.engines.local.engine import LocalEngine
from perturn.episodes.seeds import make_jobs
from perturn.errors import ConfigError
from perturn.run.execute import open_run, run_stages
from perturn.run.session import Session
from perturn.run.stages.row_stage import make_rows
from perturn.types import Action, Sampling, Trajectory, Turn

SAMPLING = Sampling(temperature=1.0, max_new_tokens=4)


@pytest.fixture
def session(recipe):
    """A session whose episodes are played in blocks."""
    with open_run(recipe, ["deterministic=true"]) as run, Session(run) as opened:
        yield opened


@pytest.fixture
def asked(monkeypatch):
    """The conversations of each batch that the engine is asked."""
    batches, generate = [], LocalEngine.generate

    def noted(self, prompts, sampling):
        batches.append([prompt.conversation for prompt in prompts])
        return generate(self, prompts, sampling)

    monkeypatch.setattr(LocalEngine, "generate", noted)
    return batches


def play(session, file, size=3):
    """Two samples of four tasks in blocks; the lines of the file."""
    jobs = make_jobs(session.task_lists.tasks["explore"][:4], 0, samples=2)
    session.play(file, jobs, "base", SAMPLING, size, "episodes")
    return file.read_bytes().splitlines(keepends=True)


@pytest.mark.parametrize(("left", "again"), [(2, 8), (3, 5), (7, 2), (8, 0)])
def test_whatever_a_kill_left_the_file_is_the_same_to_the_byte(session, asked, tmp_path, left, again):
    """Blocks of 3, 3 and 2: those that are whole are never played again, others from their beginning."""
    file = tmp_path / "played.jsonl"
    whole = play(session, file)
    conversations = [
        job.conversation for job in make_jobs(session.task_lists.tasks["explore"][:4], 0, samples=2)
    ]
    file.write_bytes(b"".join(whole[:left]) + whole[-1][:20])
    session.release()
    asked.clear()

    assert play(session, file) == whole
    assert len(whole) == 8
    assert {name for batch in asked for name in batch} == set(conversations[8 - again :])


def test_a_block_for_whose_worlds_there_is_no_room_is_refused(recipe, tmp_path):
    """Its size is the recipe's; fewer would share other batches."""
    words = ["deterministic=true", "worlds.processes=2"]
    with pytest.raises(
        ConfigError, match=r"explore: room for worlds must be >= \d+, which deterministic plays"
    ):
        open_run(recipe, words)
    words += ["explore.concurrency=2", "evaluate.concurrency=2"]
    with open_run(recipe, words) as run, Session(run) as session:
        with pytest.raises(
            ConfigError,
            match=r"room for worlds must be >= 3, which deterministic plays at the same time, got 2\. Lower",
        ):
            play(session, tmp_path / "played.jsonl")
        assert len(play(session, tmp_path / "played.jsonl", size=2)) == 8


@pytest.mark.parametrize("stage", ["explore", "evaluate-base"])
def test_both_exploration_and_evaluation_are_played_in_blocks(recipe, asked, stage):
    """The first batch is the whole of the first block, which timing would seldom bring about."""
    words = ["deterministic=true", "sft=null", "evaluate.tasks.per_kind=2"]
    for section in ("explore", "evaluate"):
        words += [f"{section}.concurrency=5", f"{section}.sampling.max_new_tokens=4"]
    with open_run(recipe, words) as run:
        run_stages(run, names=[stage])

        assert len(asked[0]) == min(5, run.manifest["stages"][stage]["counts"]["episodes"])


def test_rows_do_not_depend_on_the_order_in_which_the_experts_episodes_ended(recipe):
    """KTO's rows begin with the expert's episodes; they are equal to the byte when his file is reversed."""
    made = []
    for name, step in (("forward", 1), ("reversed", -1)):
        words = [f"name={name}", "deterministic=true", "sft=null", "rows.name=kto", "align.loss={name: kto}"]
        with open_run(recipe, words) as run, Session(run) as session:
            turn = Turn(({"role": "user", "content": "Guess it."},), Action("3"), 1.0)
            facts = {"environment": "guess-number-1.0", "terminated": True}
            tasks = session.task_lists.tasks["explore"][:3]
            lost = [
                Trajectory(task, (replace(turn, action=Action("4"), reward=0.0),), **facts) for task in tasks
            ]
            shown = [Trajectory(task, (turn,), total_reward=1.0, success=True, **facts) for task in tasks]
            write_records(run.paths.trajectories("expert"), shown[::step])
            write_records(run.paths.trajectories("explore"), lost)
            make_rows(session, next(each for each in stages(run.recipe) if each.name == "outcomes"))
            made.append(run.paths.outcomes("").read_bytes())

    assert made[0] == made[1]
    assert made[0].count(b"\n") == 6
