"""A policy in the checkpoints of a run is scored by what that run explored, or trained it from."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from perturn.cli import app
from perturn.config.recipe import read_recipe
from perturn.config.stages import explored_before
from perturn.data.file_seals import file_digest
from perturn.data.run_paths import OPTIMIZER, RunPaths
from perturn.data.store import TrajectoryStore, read_trajectories
from perturn.errors import ConfigError, PerturnError, RunError
from perturn.estimate.dry_run import make_plan
from perturn.policy.action_scorers import ActionValues
from perturn.quantities.readers import open_reader
from perturn.quantities.reference_logprobs import reference_of
from perturn.report import summarize
from perturn.run.execute import check, open_run, run_stages
from perturn.run.policy_origin import Maker
from perturn.run.score_recipe import scoring_recipe
from perturn.run.task_lists import read_task_lists
from perturn.types import Trajectory, Turn
from support.models import make_tiny_model

OWN = "own_environment:GuessNumber"
ASKED = ({"role": "user", "content": "?"},)
TAUGHT = ["name=made", "align=null", "rows=null", "evaluate=null"]
DECODED = ["evaluate.sampling.temperature=1.0", "evaluate.sampling.max_new_tokens=4", "protocol.max_turns=3"]
BEST = [*DECODED, "evaluate.select={name: value, samples: 3}"]
TAKEN = [*DECODED, "evaluate.select={name: value, among: actions, samples: 3}"]
IMPLICIT = [*DECODED, "evaluate.select={name: implicit-reward, samples: 3}"]


@pytest.fixture
def explore(renderer):
    """Writes what a run explored: each of its tasks twice, of which the second won."""

    def action(text):
        ids = renderer.tokenizer(text, add_special_tokens=False).input_ids
        return renderer.action([*ids, renderer.end_id], (-1.0,) * (len(ids) + 1))

    def write(run, word="take"):
        file = run.paths.trajectories("explore")
        file.unlink(missing_ok=True)
        with run.stage("explore", file) as counts, TrajectoryStore(file) as store:
            for task in read_task_lists(run.paths.tasks).tasks["explore"]:
                for sample, text in enumerate(("no", f"{word} the lamp")):
                    turns = (Turn(ASKED, action(text)),)
                    store.append(Trajectory(task, turns, total_reward=float(sample), sample=sample))
            counts["episodes"] = len(store)

    return write


@pytest.fixture
def made(recipe, tokenizer, explore):
    """Makes a run that has taught a policy and explored with it, and gives its folder."""

    def make(*words):
        with open_run(recipe, [*TAUGHT, *words]) as run:
            folder = run.paths.checkpoint("sft")
            with run.stage("sft", folder):
                make_tiny_model(3).save_pretrained(folder)
                tokenizer.save_pretrained(folder)
                (folder / OPTIMIZER[0]).write_bytes(b"moments")
            if run.recipe.explore:
                explore(run)
        return run.folder

    return make


@pytest.fixture
def score(tmp_path):
    """The recipe of a score of a model."""

    def recipe(model, *words, split="test"):
        own = ["worlds.processes=0", f"output={tmp_path / 'scores'}", "name=score", "model.dtype=float32"]
        return scoring_recipe(str(model), OWN, split=split, overrides=[*own, *words])

    return recipe


def noted(run):
    """The part of a score's protocol that says what it was chosen by."""
    return json.loads(run.paths.stamp.read_text())["maker"]


@pytest.mark.parametrize(("words", "name"), [(BEST, "drawn"), (TAKEN, "candidates")])
def test_the_command_chooses_by_what_the_run_of_the_policy_explored(made, tmp_path, monkeypatch, words, name):
    """Of eight explored episodes; which these were, and of which policy, stands in the protocol."""
    folder = made()
    monkeypatch.chdir(tmp_path)
    own = ["--model", "runs/made/checkpoints/sft", "--environment", OWN, "--json", "worlds.processes=0"]

    shown = CliRunner().invoke(app, ["evaluate", *own, "model.dtype=float32", *words], catch_exceptions=False)

    assert shown.exit_code == 0, shown.output
    said = json.loads(shown.stdout)
    (row,), paths = said["policies"], RunPaths(folder)
    explored = sorted(read_trajectories(paths.trajectories("explore")), key=lambda one: one.key)
    reader = open_reader(str(paths.checkpoint("sft")))
    values = ActionValues(reader, explored)
    assert row[name]
    assert row["value_head"]["episodes"] == values.episodes == 8
    maker = said["protocol"]["maker"]
    assert {key: maker[key] for key in ("policy", "explored")} == {"policy": "sft", "explored": "explore"}
    assert maker["explored_sha256"] == file_digest(paths.trajectories("explore"))
    if name == "drawn":
        scored = RunPaths(tmp_path / said["run"])
        drawn = sorted(read_trajectories(scored.drawn("base")), key=lambda one: one.key)
        numbers = dict(zip((one.key for one in drawn), values.of_episodes(drawn), strict=True))
        for one in read_trajectories(scored.evaluation("base")):
            best = max(number for key, number in numbers.items() if key[0] == one.task.id)
            assert numbers[one.key] == pytest.approx(best, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("among", ["episodes", "actions"])
def test_an_implicit_reward_is_over_the_policy_that_the_run_began_with(made, score, tiny_folder, among):
    """Sums of the drawn episodes under both say which is scored; the content of that model is noted."""
    folder = made()
    words = [*DECODED, f"evaluate.select={{name: implicit-reward, among: {among}, samples: 3}}"]

    with open_run(score(folder / "checkpoints/sft", *words)) as run:
        run_stages(run)

    maker = noted(run)
    assert (maker["policy"], maker["start"]) == ("sft", str(tiny_folder))
    assert len(maker["start_sha256"]) == 64
    if among == "actions":
        assert summarize(run.folder)["policies"][0]["candidates"]
        return
    drawn = list(read_trajectories(run.paths.drawn("base")))
    found = [
        reference_of(drawn, open_reader(str(model))) for model in (folder / "checkpoints/sft", tiny_folder)
    ]
    gains = {
        one.key: sum(float((ours - its).sum()) for ours, its in zip(*both, strict=True))
        for one, *both in zip(drawn, *found, strict=True)
    }
    for one in read_trajectories(run.paths.evaluation("base")):
        assert gains[one.key] == pytest.approx(
            max(gain for key, gain in gains.items() if key[0] == one.task.id), abs=1e-5
        )


def unfinished(folder):
    """The exploration was stopped."""
    file = folder / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["stages"]["explore"]["done"] = False
    file.write_text(json.dumps(manifest))


def of_failures(folder):
    """No episode was played to an end."""
    file = folder / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["stages"]["explore"]["counts"] = {"episodes": 8, "failed": 8}
    file.write_text(json.dumps(manifest))


def altered(folder):
    """An episode of the exploration is gone."""
    file = folder / "trajectories/explore.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[1:]))


def retrained(folder):
    """The weights are others than the run wrote."""
    make_tiny_model(4).save_pretrained(folder / "checkpoints/sft")


def delete_policy(folder):
    """As of an early iteration: the manifest knows the policy no more."""
    file = folder / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["files"] = {
        name: one for name, one in manifest["files"].items() if not name.startswith("checkpoints/")
    }
    file.write_text(json.dumps(manifest))


def renamed(folder):
    """The policy lies under a name that is none of the run's policies, as a reward model's."""
    shutil.copytree(folder / "checkpoints/sft", folder / "checkpoints/prm")


def of_no_section(folder):
    """A model that the run has not made, under the name of one that it began with."""
    shutil.copytree(folder / "checkpoints/sft", folder / "checkpoints/base")


def of_another_world(folder):
    """The run explored a later version of the world."""
    file = folder / "tasks.json"
    file.write_text(file.read_text().replace("guess-number-1.0", "guess-number-2.0"))
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["files"]["tasks.json"]
    (folder / "manifest.json").write_text(json.dumps(manifest))


def unknown(folder):
    """The recipe is of a version with other settings."""
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), "newer": 1}))


@pytest.mark.parametrize(
    ("spoil", "words", "said"),
    [
        (
            unfinished,
            BEST,
            r"select\.name=value: stage explore of .*made is not done; run: perturn run .*made",
        ),
        (of_failures, BEST, r"name=value: all episodes of .*explore\.jsonl FAILED"),
        (altered, TAKEN, r"select\.name=value: .*explore\.jsonl has \d+ bytes, and was written with"),
        (retrained, BEST, r"name=value: .*model\.safetensors has other content than was written"),
        (
            retrained,
            IMPLICIT,
            r"name=implicit-reward: .*model\.safetensors has other content than was written",
        ),
        (delete_policy, BEST, r"policy sft of .*made was deleted; name a policy that is still there"),
        (renamed, BEST, r"prm is not a policy that .*made trains to act; name one of sft"),
        (of_no_section, IMPLICIT, r"base is not a policy that .*made trains to act; name one of sft"),
        (
            of_another_world,
            BEST,
            r"must be guess-number-2\.0, in which .* explored, .* got 'guess-number-1\.0'",
        ),
        (unknown, BEST, r"the run that made .*sft cannot be read: .*recipe\.yaml: unknown key 'newer'"),
        (
            lambda folder: (folder / "tasks.json").unlink(),
            BEST,
            r"tasks\.json is gone or not sealed, so nobody can tell",
        ),
        (
            lambda folder: None,
            [*BEST, "evaluate.tasks.n=6"],
            r"\d of 6 tasks of evaluate\.tasks",
        ),
    ],
)
def test_what_the_run_lacks_is_said_before_any_work(made, score, tmp_path, spoil, words, said):
    folder = made()
    spoil(folder)
    name = {renamed: "prm", of_no_section: "base"}.get(spoil, "sft")

    split = "train" if "evaluate.tasks.n=6" in words else "test"
    with pytest.raises(PerturnError, match=said):
        open_run(score(folder / "checkpoints" / name, *words, split=split))
    assert not (tmp_path / "scores").exists()


@pytest.mark.slow
def test_the_plan_of_a_score_counts_what_the_run_explored(made, score):
    """Its head reads them all; without one the score takes less long."""
    model = made() / "checkpoints/sft"
    (by_value,), (by_likelihood,) = (
        make_plan(score(model, *DECODED, f"evaluate.select={{name: {name}, samples: 3}}"), [], None).steps
        for name in ("value", "likelihood")
    )

    assert by_value.work.endswith("chosen by a value head trained on 8 episodes of another run")
    assert by_value.seconds > by_likelihood.seconds


def test_a_run_that_explored_nothing_teaches_no_head(made, score):
    """Its implicit reward is there all the same."""
    policy = made("explore=null") / "checkpoints/sft"

    with pytest.raises(ConfigError, match=r"name=value: .*made explores nothing to learn from"):
        check(score(policy, *BEST))
    check(score(policy, *IMPLICIT))


def test_a_model_beside_the_checkpoints_of_a_run_is_of_no_run(made, score):
    folder = made()
    shutil.copytree(folder / "checkpoints/sft", folder / "exports/sft")

    with pytest.raises(ConfigError, match="nothing is explored here"):
        check(score(folder / "exports/sft", *BEST))


def test_a_base_of_the_runs_own_is_asked_for_too(made, recipe):
    """SFT began with it, so its implicit reward reads it."""
    read = read_recipe(recipe, ["model={name: base}", "base={}"])

    with pytest.raises(RunError, match=r"stage base of .*made is not done"):
        Maker(made(), read, "sft").seals({"start"})


def test_a_base_has_no_implicit_reward(recipe, tmp_path):
    read = read_recipe(recipe, ["model={name: base}", "base={}"])

    assert "policy base of runs/x was trained from no other" in Maker(tmp_path / "runs/x", read, "base").lack(
        {"start"}
    ).replace(str(tmp_path) + "/", "")
    assert Maker(tmp_path, read, "base").lack({"explored"}) is None


def test_the_exploration_before_a_policy_is_known_where_nothing_is_scored(recipe):
    """As of a study's cell, whose score is another run's."""
    many = read_recipe(recipe, ["iterations=2", "evaluate=null"])

    found = [explored_before(many, name) for name in ("base", "sft", "tlm-dre-001", "tlm-dre-002")]

    assert found == ["explore-001", "explore-001", "explore-001", "explore-002"]


@pytest.fixture
def stopped(made, score):
    """A score by values that was stopped before its end: its recipe, and the counts that it had come to."""
    folder = made()
    read = score(folder / "checkpoints/sft", *BEST)
    with open_run(read) as run:
        run_stages(run)
    manifest = json.loads(run.paths.manifest.read_text())
    counts = manifest["stages"]["evaluate-base"]["counts"]
    manifest["stages"]["evaluate-base"]["done"] = False
    manifest["files"] = {
        file: one for file, one in manifest["files"].items() if one["stage"] != "evaluate-base"
    }
    run.paths.manifest.write_text(json.dumps(manifest))
    drawn = run.paths.drawn("base")
    drawn.write_bytes(b"".join(drawn.read_bytes().splitlines(keepends=True)[:5]))
    return read, counts


@pytest.mark.slow
def test_a_score_that_was_stopped_goes_on_with_the_same_exploration(stopped):
    read, counts = stopped

    with open_run(read) as run:
        run_stages(run)
        found = run.manifest["stages"]["evaluate-base"]["counts"]

    assert {key: found[key] for key in found if key.startswith("value_")} == {
        key: counts[key] for key in counts if key.startswith("value_")
    }
    assert found["drawn_episodes"] == counts["drawn_episodes"] == 12


@pytest.mark.slow
def test_a_score_goes_on_once_the_optimizer_is_deleted(stopped):
    """As a run does with that of a policy from which no training goes on; the policy is the same."""
    read, _ = stopped
    policy = Path(read.model.name)
    (policy / OPTIMIZER[0]).unlink()
    file = policy.parents[1] / "manifest.json"
    manifest = json.loads(file.read_text())
    del manifest["files"][f"checkpoints/sft/{OPTIMIZER[0]}"]
    file.write_text(json.dumps(manifest))

    with open_run(read) as run:
        run_stages(run)
        assert run.is_done("evaluate-base")


def test_a_score_does_not_go_on_with_another_exploration(stopped, recipe, explore):
    """Which was made anew meanwhile, whole and sealed."""
    read, _ = stopped
    with open_run(recipe, TAUGHT) as theirs:
        explore(theirs, "leave")

    with (
        pytest.raises(RunError, match=r"was begun with other explored_sha256 of .*made than are there now"),
        open_run(read) as run,
    ):
        run_stages(run)


def test_a_score_that_is_done_needs_its_run_no_more(made, score):
    folder = made()
    read = score(folder / "checkpoints/sft", *BEST)
    with open_run(read) as run:
        run_stages(run)
    shutil.rmtree(folder)

    with open_run(read) as run:
        run_stages(run)
        assert run.is_done("evaluate-base")
