"""A base that is made from nothing: its lessons, its training, and what follows from it."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from perturn.chat.model_names import load_tokenizer
from perturn.config.parsing import parse
from perturn.config.recipe import Recipe
from perturn.config.sections import Base
from perturn.data.run_paths import RunPaths
from perturn.data.store import TrajectoryStore, read_trajectories
from perturn.errors import ConfigError
from perturn.estimate.episode_lengths import look_at_episodes, renderer_of
from perturn.policy.models import load_model, weights_digest
from perturn.report import write_report
from perturn.run.execute import check, open_run, run_stages
from perturn.run.stages.pretraining_stage import base_episodes, heard, lessons
from perturn.types import Task
from perturn.watch import Watcher

RECIPE = {
    "name": "made",
    "model": {"name": "base"},
    "environment": {"name": "alfworld-like"},
    "protocol": {"name": "alfworld-lab"},
    "base": {
        "tasks": {"split": "train", "n": 16, "skip": 40},
        "shape": {"hidden": 16, "layers": 1, "heads": 2, "mlp": 32, "context": 1024},
        "epochs": 1,
        "batch_size": 8,
    },
    "evaluate": {"tasks": {"split": "valid_seen", "n": 2}},
}


def recipe_in(folder, **changes):
    return parse(Recipe, {**RECIPE, "output": str(folder), **changes})


def make(folder, names=None, **changes):
    """Do the stages, or some; the run."""
    with open_run(recipe_in(folder, **changes)) as run:
        run_stages(run, names=names)
    return run


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run with a base and SFT, done."""
    sft = {"loss": {"name": "sft"}, "tasks": {"n": 8, "skip": 40}}
    return make(tmp_path_factory.mktemp("made"), sft=sft)


def test_the_lessons_are_the_experts_the_clumsy_and_a_few_aimless_ones():
    """Three tasks: one episode of the expert each, two clumsy ones with other seeds, and one aimless of the first."""
    jobs = lessons(Base(clumsy=2, aimless=4), [Task(str(index)) for index in range(3)])

    assert [(job.task.id, job.sample) for job in jobs] == [
        *((str(index), sample) for sample in range(3) for index in range(3)),
        ("0", 3),
    ]
    assert len({job.seed for job in jobs}) == 10


def test_the_stages_come_in_order_and_the_base_is_scored(made):
    stages = made.manifest["stages"]

    assert list(stages) == ["lessons", "base", "expert", "evaluate-base", "sft", "evaluate-sft"]
    assert stages["base"]["counts"]["examples"] == len(base_episodes(made))
    assert stages["base"]["counts"]["loss_tokens"] == stages["base"]["counts"]["tokens"] - len(
        base_episodes(made)
    )


def test_a_base_is_made_where_a_later_alignment_keeps_an_average(tmp_path):
    """It is of no iteration, so it moves no average."""
    online = {
        "sft": {"loss": {"name": "sft"}, "tasks": {"n": 8, "skip": 40}},
        "iterations": 2,
        "align": {"loss": {"name": "dpo"}, "reference": "average", "minibatches": 1},
        "rows": {"name": "group-pairs"},
        "explore": {"tasks": {"n": 2, "skip": 40}, "per_iteration": 2, "samples": 2},
    }
    run = make(tmp_path, names=("lessons", "base"), **online)

    assert run.is_done("base")
    assert {each.name for each in run.paths.checkpoint("base").parent.iterdir()} == {"base"}


def test_what_is_taught_succeeds_and_is_not_aimless(made):
    all_of_them = list(read_trajectories(made.paths.trajectories("lessons")))

    assert {one.policy for one in all_of_them} == {"expert", "clumsy", "aimless"}
    assert {one.policy for one in base_episodes(made)} == {"expert", "clumsy"}
    assert all(one.success for one in base_episodes(made))


def test_an_aimless_episode_is_not_taught_even_if_it_succeeds(made, tmp_path):
    """Won by chance it shows no way; nor does one of the expert that failed."""
    paths = RunPaths(tmp_path)
    with TrajectoryStore(paths.trajectories("lessons")) as store:
        for sample, success in ((0, False), (1, True), (3, True)):
            store.append(replace(base_episodes(made)[0], sample=sample, success=success))

    assert [one.sample for one in base_episodes(SimpleNamespace(recipe=made.recipe, paths=paths))] == [1]


def test_the_tokenizer_knows_all_that_was_heard(made):
    tokenizer = load_tokenizer(str(made.paths.checkpoint("base")))

    assert not any(tokenizer.unk_token_id in tokenizer(text)["input_ids"] for text in heard(made))


def test_report_and_watch_show_how_it_was_trained(made):
    """The page has its curves; the screen its last loss."""
    page = write_report(made.folder).read_text(encoding="utf-8")
    last = json.loads(made.paths.metrics("base").read_text().splitlines()[-1])

    assert "Base policy, trained from scratch" in page
    assert Watcher(made.folder).look().metrics["base"]["loss"] == last["loss"]


@pytest.mark.slow
def test_the_runs_seed_does_not_move_the_base_and_its_own_does(made, tmp_path):
    """Equal weights under another run's seed; others under another seed of the base."""
    names = ["lessons", "base"]
    same = make(tmp_path / "same", names, seed=7)
    other = make(tmp_path / "other", names, base={**RECIPE["base"], "seed": 7})

    digests = [weights_digest(load_model(str(run.paths.checkpoint("base")))) for run in (made, same, other)]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.slow
def test_a_training_that_was_stopped_goes_on_to_the_same_base(made, tmp_path, monkeypatch):
    """Stopped after a checkpoint: the same weights and the same metrics as without."""
    steps = []

    def stop(self, args, state, control, **_):
        steps.append(state.global_step)
        if len(steps) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("perturn.run.stages.train_stage.TrainingProgress.on_step_end", stop)
        with pytest.raises(KeyboardInterrupt):
            make(tmp_path, ["lessons", "base"])
    run = make(tmp_path, ["lessons", "base"])

    digests = [weights_digest(load_model(str(each.paths.checkpoint("base")))) for each in (made, run)]
    assert digests[0] == digests[1]
    losses = [
        [json.loads(row)["loss"] for row in each.paths.metrics("base").read_text().splitlines()]
        for each in (made, run)
    ]
    assert losses[0] == losses[1]


def test_a_dry_run_measures_lengths_with_the_words_of_a_few_episodes(tmp_path):
    recipe = recipe_in(tmp_path)
    found = look_at_episodes(recipe, check(recipe), renderer_of(recipe))

    assert (found.base, found.lessons) == (48, 52)
    assert 3 < found.said < 6
    assert "4 expert episodes played now" in found.source
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"name": "smollm2-135m"}}, "model.name must be base"),
        ({"model": {"name": "base", "chat_template": "chatml"}}, "model.chat_template must be left out"),
        ({"base": {"lora": {}}}, "lora must be left out"),
        ({"base": {"shape": {"hidden": 12}}}, "hidden must be a multiple of twice the heads, 8, got 12"),
        (
            {"environment": None, "protocol": None, "evaluate": None},
            "environment is missing, which base plays in",
        ),
    ],
)
def test_what_does_not_go_with_a_base_is_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        recipe_in(tmp_path, **changes)


def test_an_environment_whose_expert_does_not_err_is_refused(tmp_path, own_environment):
    recipe = recipe_in(tmp_path, environment={"name": "own_environment:GuessNumber"}, evaluate=None)

    with pytest.raises(
        ConfigError, match=r"base needs an expert who also errs: .* take alfworld or alfworld-like, or leave"
    ):
        check(recipe)
