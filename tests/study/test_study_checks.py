"""What is refused before any work: test tasks that something learns from, and what `perturn run` would refuse."""

import re
import sys

import pytest
import torch
import yaml

from perturn.cli import main
from perturn.config.sections import Tasks
from perturn.data.run_lock import RunLock
from perturn.data.store import write_records
from perturn.envs.load_environment import make_environment
from perturn.errors import ConfigError, InUseError, ModelError
from perturn.run.task_lists import choose_tasks
from perturn.study.run_study import cells_at_once, open_study, run_study
from perturn.types import Action, PreferencePair, Trajectory, Turn

STUDY = """
name: small
recipe: recipe.yaml
output: {output}
methods:
  tlm-dre: {{}}
tune: {{tasks: {{split: test, per_kind: 2}}}}
test: {{tasks: {{split: test, per_kind: 2, skip: 2}}}}
"""


@pytest.fixture
def study(recipe, tmp_path):
    """A study of the tiny recipe, which is beside it."""
    file = tmp_path / "study.yaml"
    file.write_text(STUDY.format(output=tmp_path / "studies"))
    return file


def refusal(study, *words):
    with pytest.raises(ConfigError) as caught:
        open_study(study, words)
    return str(caught.value)


@pytest.mark.parametrize(
    ("split", "skip", "section"), [("train", 0, "sft"), ("train", 5, "explore"), ("test", 1, "tune")]
)
def test_nothing_is_learned_or_tuned_on_the_test_task_list(study, split, skip, section):
    """SFT has tasks 0 to 3 of train, exploration 4 to 7, tuning 0 and 1 of test."""
    said = refusal(study, f"test.tasks={{split: {split}, per_kind: 1, skip: {skip}}}")

    assert re.search(
        rf"test\.tasks shares 1 tasks with {section}\.tasks, such as '.+'; what is tested must not", said
    )


@pytest.mark.parametrize("among", ["episodes", "actions"])
def test_a_model_that_no_run_made_is_chosen_by_nothing_of_its_making(study, among):
    """Other methods are, by what their runs train and explore."""
    untaught = "sft: null, align: null, expert: null, "
    for name, said in (
        ("implicit-reward", "no policy here is trained"),
        ("value", "nothing is explored here"),
    ):
        best = f"evaluate.sampling: {{temperature: 1.0}}, evaluate.select: {{name: {name}, among: {among}}}"

        found = refusal(study, f"methods={{plain: {{{untaught}{best}}}}}")

        assert f"plain seed 0: evaluate.select.name={name}: " in found
        assert said in found
        assert open_study(
            study, [f"methods={{taught: {{align: null, {best}}}, aligned: {{{best}}}}}"]
        ).to_do()


def test_a_method_that_explores_for_its_score_does_not_explore_the_test_task_list(study):
    """SFT without an alignment; its exploration has tasks 4 to 7 of train."""
    best = "{align: null, evaluate.sampling: {temperature: 1.0}, evaluate.select: {name: value}}"

    said = refusal(study, f"methods={{best: {best}}}", "test.tasks={split: train, per_kind: 1, skip: 5}")

    assert re.search(r"test\.tasks shares 1 tasks with explore\.tasks", said)


@pytest.mark.parametrize(
    ("method", "said"),
    [
        (
            "evaluate.select: {name: implicit-reward}, sft: null, align: null",
            "best seed 0: evaluate.select.name=implicit-reward",
        ),
        ("evaluate.select: {name: likelyhood}", "best seed 0: unknown evaluate.select.name 'likelyhood'"),
        ("evaluate.select: {name: own_environment:no_such, among: actions}", "best seed 0: "),
    ],
)
def test_a_score_that_cannot_be_made_is_refused_before_its_policy_is(study, method, said):
    """Where nothing is tuned, a run does not score, and the runs that do come hours later."""
    best = f"{{evaluate.sampling: {{temperature: 1.0}}, {method}}}"

    assert said in refusal(study, "tune=null", f"methods={{best: {best}}}")


@pytest.mark.parametrize("among", ["episodes", "actions"])
def test_actions_are_chosen_as_the_test_task_list_samples_them(study, among):
    """Tuned at temperature 1 and tested at 0, where all are alike; and the other way round."""
    select = f"evaluate.select: {{name: likelihood, among: {among}}}"
    words = (f"methods={{best: {{evaluate.sampling: {{temperature: 1.0}}, {select}}}}}",)

    said = refusal(study, *words, "test.sampling={temperature: 0}")

    assert "best seed 0: evaluate.sampling.temperature must be > 0, since evaluate.select chooses" in said
    assert "all equal at 0" in said


def test_nothing_is_learned_on_the_tuning_task_list(study):
    """SFT has tasks 0 to 3 of train."""
    said = refusal(study, "tune.tasks={split: train, per_kind: 1}")

    assert re.search(
        r"tune\.tasks shares 1 tasks with sft\.tasks, such as '.+'; what is tuned on must not", said
    )


@pytest.mark.parametrize(
    ("key", "task_list"), [("expert.file", "test"), ("expert.file", "tune"), ("rows.path", "test")]
)
def test_no_file_of_the_users_teaches_a_task_that_is_tuned_or_tested_on(
    study, recipe, tmp_path, key, task_list
):
    """SFT is taught every episode of such a file, whatever its own task list."""
    env = make_environment(yaml.safe_load(recipe.read_text())["environment"])
    tasks = choose_tasks(env, Tasks(split="test", per_kind=1, skip=2 if task_list == "test" else 0))
    turn = Turn(({"role": "user", "content": "a"},), Action("b"))
    episodes = [Trajectory(task, (turn,), "e", success=True) for task in tasks]
    file = tmp_path / "own.jsonl"
    rows = episodes if key == "expert.file" else [PreferencePair(one, one) for one in episodes]
    write_records(file, rows)

    own = f"rows: {{name: file, path: {file}}}" if key == "rows.path" else f"{key}: {file}"
    said = refusal(study, f"methods.own={{{own}}}")

    assert f"{task_list}.tasks shares {len(tasks)} tasks with {key}, such as" in said
    assert "take its rows out" in said


def test_cells_that_come_after_tuning_are_checked_before_it(study):
    """Seed 1 is not tuned, so its cells are made once a point is chosen; it would explore tasks 2 and 3 of test."""
    said = refusal(
        study,
        "seeds=[0, 1]",
        "tune.seeds=[0]",
        "sweep={align.learning_rate: [1.0e-4, 1.0e-3]}",
        "by_seed={explore.tasks: [{split: train, per_kind: 1}, {split: test, per_kind: 1, skip: 2}]}",
    )

    assert "seed 1: test.tasks shares 1 tasks with explore.tasks" in said


def test_the_next_tasks_are_nobodys(study):
    assert open_study(study, ["test.tasks={split: test, per_kind: 1, skip: 2}"]).to_do()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["methods.dpo={align.loss: {name: dop}}"], "dpo seed 0: unknown align.loss.name 'dop'"),
        (["methods.dpo={align.loss: {name: ppo-clip}}"], "align.loss.name must be a loss on pairs"),
        (["sweep={align.loss.pivot: [0.5, 2]}"], "pivot=2 seed 0: align.loss.pivot must be"),
        (["test.tasks.split=tset"], "test.tasks: "),
        (["test.tasks.per_kind=10000"], "test.tasks: kind"),
        (["tune.tasks.per_kind=10000"], "tune.tasks: kind"),
        (["methods.far={environment.name: nowhere}"], "far seed 0: "),
    ],
)
def test_every_recipe_is_checked_as_a_run_would(study, words, said):
    assert said in refusal(study, *words)


def test_the_model_of_each_seed_is_opened(study, tmp_path):
    """And not only the model of the first seed, on which settings are tuned."""
    missing = tmp_path / "no-model"

    with pytest.raises(ModelError, match=f"seed 1: model folder '{missing}' does not exist"):
        open_study(study, ["seeds=[0, 1]", f"by_seed={{model.name: [tiny-agent, {missing}]}}"])


def test_a_dry_run_says_what_would_be_done_and_does_nothing(study, tmp_path, monkeypatch, capsys):
    """Three methods of one seed; expert, base, SFT and its score are made once."""
    monkeypatch.setattr(sys, "argv", ["perturn", "study", str(study), "--dry-run"])

    with pytest.raises(SystemExit) as caught:
        main()

    assert not caught.value.code
    assert not (tmp_path / "studies").exists()
    said = " ".join(capsys.readouterr().out.split())
    assert "3 runs with 13 stages, of which 9 are computed and the others are shared" in said


@pytest.mark.parametrize(
    ("place", "gpus", "workers", "found"),
    [
        ("cpu", 0, None, 2),
        ("cpu", 0, 2, 2),
        (
            "cpu",
            0,
            3,
            "workers must be <= 2, since each has launch.processes=2 on the 5 cores, got 3",
        ),
        ("cuda", 4, None, 1),
        (
            "cuda",
            4,
            2,
            "workers must be <= 1, .* on the GPUs of this machine, .* got 2. Or set launch.processes=1",
        ),
    ],
)
def test_cells_that_train_in_processes_do_not_share_cores_or_gpus(
    study, recipe, monkeypatch, place, gpus, workers, found
):
    """Two processes for each cell of five cores, or of four GPUs."""
    recipe.write_text(recipe.read_text() + "launch: {processes: 2}\n")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(5)), raising=False)
    monkeypatch.setattr("perturn.policy.models.device", lambda: torch.device(place))
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    board = open_study(study)

    if isinstance(found, int):
        assert cells_at_once(board, workers) == found
        return
    with pytest.raises(ConfigError, match=found):
        cells_at_once(board, workers)
    with pytest.raises(ConfigError, match=found):
        open_study(study, [f"workers={workers}"])


def test_a_method_is_warned_of_once(study, caplog):
    """And not for each of its seeds."""
    open_study(study, ["tune=null", "seeds=[0, 1]", "methods.tlm-dre={evaluate.samples: 2}"])

    assert caplog.text.count("evaluate.samples=2 at temperature 0") == 1


def test_a_cell_on_a_node_gets_a_device_for_each_training_process(study, recipe):
    """Rejected before the nodes are asked for; one core is what a cell gets where the recipe does not say."""
    recipe.write_text(recipe.read_text() + "cluster: {address: auto}\n")
    words = ["methods.tlm-dre={launch.processes: 2}"]

    with pytest.raises(
        ConfigError,
        match=r"be <= 1, which cluster.engine_cpus gives a cell, got 2. Set cluster.engine_cpus=2",
    ):
        open_study(study, words)
    recipe.write_text(recipe.read_text().replace("auto}", "auto, engine_cpus: 2}"))
    assert cells_at_once(open_study(study, words)) is None


def test_two_processes_do_not_work_on_one_study(study, tmp_path, monkeypatch):
    """The one that comes second is told; it changes no file."""
    board = open_study(study)

    def taken(*_):
        raise InUseError("in use")

    monkeypatch.setattr(RunLock, "__init__", taken)

    with pytest.raises(InUseError):
        run_study(board)
    assert [file.name for file in (tmp_path / "studies" / "small").iterdir()] == ["logs"]


def test_a_study_without_pyarrow_is_refused_before_its_work(study, monkeypatch):
    """The rows of its episodes are Parquet, which the plain install cannot write."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)

    assert refusal(study) == 'a study needs pyarrow; run: pip install "perturn[datasets]"'
