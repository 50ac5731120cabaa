"""`perturn measure` of a run in a world of a user's module, with a policy of its own."""

import json
import shutil
from dataclasses import replace

import pytest
import yaml
from typer.testing import CliRunner

from perturn.cli import app
from perturn.cli.measure_commands import LEFT_OUT, _print
from perturn.data.run_folder import resolve_recipe
from perturn.data.run_paths import RunPaths
from perturn.data.store import read_trajectories
from perturn.episodes.play_many import play
from perturn.errors import ConfigError, EnvironmentFailure, PerturnError, RunError
from perturn.measure.credit_scores import THIRDS
from perturn.measure.measure_run import MEASURED, Wanted, forecast_run, measure_run
from perturn.measure.points import ContinuationFile
from perturn.measure.weigh import weigh
from perturn.report import write_report
from perturn.report.measured import counts_said, measured
from perturn.report.score_headings import HEADINGS, OF_TURNS
from perturn.run.stages.credit_stage import explored_stages
from perturn.types import Status

from .online import GROUPS, begin  # noqa: F401  the fixture `run_once` begins with it

CREDITS = ["rloo", "gigpo", "uniform"]
WANTED = Wanted(CREDITS, episodes=6, continuations=4)


@pytest.fixture(scope="module")
def run(run_once):
    return run_once("measured", *GROUPS, "iterations=1", "evaluate=null")


def test_a_run_is_measured_and_measured_again(run, monkeypatch):
    """A second call plays nothing and finds the same."""
    monkeypatch.chdir(run.parents[1])
    found = measure_run(run, WANTED)
    file = RunPaths(run).continuations()
    before = file.read_bytes()

    again = measure_run(run, WANTED)
    assert file.read_bytes() == before
    assert again == found
    assert found["world"]["kind"] == "deterministic"
    assert found["few_tasks"] == (found["tasks"] < 5)
    assert found["measured"] == found["turns"] == sum(len(one["advantage"]) for one in found["by_episode"])
    assert all(len(one["calls"]) == len(one["actions"]) for one in found["by_episode"])
    assert found["credits"]["uniform"]["by_outcome"]
    assert not found["credits"]["rloo"]["by_outcome"]
    assert found["credits"][MEASURED]["cost"] > 2
    assert found["credits"][MEASURED]["cosine"] is None
    assert "noise" in found["credits"][MEASURED]["withheld"]["cosine"]
    assert found["credits"]["gigpo"]["cosine"] is not None
    assert found["credits"]["rloo"]["cost"] == 1
    for row in found["credits"].values():
        mean, at_cost = row["signal_to_noise"], row["signal_at_cost"]
        assert at_cost == (mean and pytest.approx([each / row["cost"] for each in mean], abs=1e-6))
    assert found["credits"]["rloo"]["correlation"] is None
    assert json.loads(RunPaths(run).measured().read_text()) == again


@pytest.mark.slow
def test_credits_that_cannot_weigh_a_run_are_left_out_with_a_reason(run, monkeypatch):
    monkeypatch.chdir(run.parents[1])

    found = measure_run(run, Wanted(["all"], episodes=6, continuations=4))
    assert found["credits"].keys() >= {*CREDITS, "anchor-rloo", "trloo", "turn-gae"}
    assert {"igpo", "spo", "first-error"} <= found["left_out"].keys()
    assert "remaining" in found["left_out"]["first-error"]


def test_a_measurement_that_was_killed_resumes(run, monkeypatch, tmp_path):
    monkeypatch.chdir(run.parents[1])
    whole = measure_run(run, WANTED)
    file = RunPaths(run).continuations()
    file.write_bytes(file.read_bytes()[:-100])
    shutil.rmtree(RunPaths(run).gradients())

    assert measure_run(run, WANTED) == whole


def test_continuations_of_episodes_that_were_made_again_are_not_taken(run, monkeypatch):
    monkeypatch.chdir(run.parents[1])
    measure_run(run, WANTED)
    file = RunPaths(run).measured_inputs()
    before = file.read_text()
    (name,) = (name for name in json.loads(before) if name.startswith("trajectories/explore"))
    assert any(other.startswith("checkpoints/sft/") for other in json.loads(before))
    file.write_text(json.dumps(json.loads(before) | {name: "other"}))

    for call in (measure_run, forecast_run):
        with pytest.raises(
            RunError, match=r"made again since then. To measure anew, remove .*continuations.jsonl"
        ):
            call(run, WANTED)
    file.write_text(before)
    measure_run(run, WANTED)


def test_a_damaged_policy_is_not_measured(run, monkeypatch):
    monkeypatch.chdir(run.parents[1])
    file = RunPaths(run).checkpoint("sft") / "config.json"
    before = file.read_bytes()
    file.write_bytes(before + b" ")

    with pytest.raises(RunError, match=r"config.json has .* `perturn verify"):
        measure_run(run, WANTED)
    file.write_bytes(before)


def test_a_deleted_optimizer_makes_no_other_policy(run, monkeypatch):
    """A run that goes on deletes it, and keeps the policy."""
    monkeypatch.chdir(run.parents[1])
    whole = measure_run(run, WANTED)
    file = RunPaths(run).measured_inputs()
    noted = json.loads(file.read_text())
    file.write_text(
        json.dumps(noted | {"checkpoints/sft/optimizer.pt": "then", "checkpoints/sft/scheduler.pt": "then"})
    )

    assert measure_run(run, WANTED) == whole
    assert json.loads(file.read_text()) == noted


def test_a_measurement_that_was_stopped_amid_continuations_goes_on(run, monkeypatch):
    """Ctrl-C after the fifth continuation: five lines are there, and the next call finds what an unbroken one does."""
    monkeypatch.chdir(run.parents[1])
    whole = measure_run(run, WANTED)
    file = RunPaths(run).continuations()
    file.unlink()
    append = ContinuationFile.append

    def stopped(store, one):
        append(store, one)
        if len(store.found) == 5:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ContinuationFile, "append", stopped)
        with pytest.raises(KeyboardInterrupt):
            measure_run(run, WANTED)
    assert len(file.read_bytes().splitlines()) == 5
    assert measure_run(run, WANTED) == whole


@pytest.mark.parametrize("error", ["RuntimeError: torn", "NotComeBack: elsewhere"])
def test_failed_continuations_stop_the_command_and_are_played_again(run, monkeypatch, error):
    """Continuations that do not come back are counted apart, and are not played again."""
    monkeypatch.chdir(run.parents[1])
    whole = measure_run(run, WANTED)
    file = RunPaths(run).continuations()
    file.unlink()

    def torn(jobs, *rest, **how):
        return (replace(one, status=Status.FAILED, error=error) for one in play(jobs, *rest, **how))

    with monkeypatch.context() as patched:
        patched.setattr("perturn.measure.play_points.play", torn)
        if error.startswith("Not"):
            with pytest.raises(
                RunError, match=r"of (\d+) continuations, 0 failed .* and \1 did not come back"
            ):
                measure_run(run, WANTED)
            file.unlink()
        else:
            with pytest.raises(EnvironmentFailure, match=r"continuations: 8 of .* RuntimeError: torn"):
                measure_run(run, WANTED)
    assert measure_run(run, WANTED) == whole


def test_the_recipes_own_credit_is_measured_with_all(run, monkeypatch, tmp_path):
    """And a credit that is named is no longer left out if it cannot be computed."""
    monkeypatch.chdir(run.parents[1])
    monkeypatch.setattr("perturn.measure.weigh.CREDITS", {"gigpo": None})
    file = tmp_path / "own.py"
    file.write_text(
        "from dataclasses import dataclass\nimport torch\nfrom perturn.extend.tensors import GroupCredit\n\n"
        "@dataclass(frozen=True)\nclass Own(GroupCredit):\n"
        "    def __call__(self, group, **_):\n        return [torch.ones(len(one.turns)) for one in group]\n"
    )
    paths, own = RunPaths(run), f"{file}:Own"
    recipe = replace(resolve_recipe(run), credit={"name": own})
    stage = explored_stages(paths, recipe)[-1]
    explored = list(read_trajectories(paths.trajectories(stage.name)))

    found, left_out = weigh(paths, recipe, stage, ["all"], explored)
    assert (list(found), left_out) == (["gigpo", own], {})
    with pytest.raises(PerturnError, match="remaining"):
        weigh(paths, recipe, stage, ["all", "first-error"], explored)


def test_a_run_whose_policy_was_deleted_or_that_explored_nothing_is_rejected(run, monkeypatch, tmp_path):
    monkeypatch.chdir(run.parents[1])
    gone, empty = tmp_path / "gone", tmp_path / "empty"
    shutil.copytree(run, gone, ignore=shutil.ignore_patterns("checkpoints"))
    empty.mkdir()
    shutil.copy(run / "recipe.yaml", empty)

    with pytest.raises(RunError, match="policy 'sft' is not trained yet, or its iteration is long past"):
        measure_run(gone, WANTED)
    with pytest.raises(RunError, match="has explored nothing yet; run: perturn collect"):
        measure_run(empty, WANTED)


def test_a_policy_behind_an_api_is_not_opened_for_a_credit_that_reads_passes(run, monkeypatch):
    monkeypatch.chdir(run.parents[1])
    paths, engine = RunPaths(run), {"name": "api", "base_url": "http://localhost:1/v1", "api_key_env": None}
    recipe = replace(resolve_recipe(run), engine=engine)
    stage = explored_stages(paths, recipe)[-1]
    explored = list(read_trajectories(paths.trajectories(stage.name)))

    with pytest.raises(RunError, match="credit 'v0' reads passes of a policy, and engine 'api' serves"):
        weigh(paths, recipe, stage, ["v0"], explored)
    assert weigh(paths, recipe, stage, ["gigpo"], explored)[0].keys() == {"gigpo"}


def test_the_command_says_what_it_found_and_what_it_needs(run, monkeypatch):
    monkeypatch.chdir(run.parents[1])
    words = ["measure", str(run), "--credits", "rloo,gigpo", "--episodes", "6", "--continuations", "4"]

    said = CliRunner().invoke(app, words)
    forecast = [*words, "--dry-run", "--width", "0.2"]
    planned = CliRunner().invoke(app, [*forecast, "--json"])
    assert said.exit_code == 0
    assert "rloo" in said.output
    world = "The environment is deterministic: 6 of 6 replayed episodes gave the same observations."
    assert world in " ".join(said.output.split())
    assert f"{MEASURED} has no cosine" in said.output
    assert (
        CliRunner()
        .invoke(app, forecast)
        .output.startswith("With 4 continuations from each point, the 95 % interval")
    )
    assert json.loads(planned.output)["to_play"] == 0
    assert forecast_run(run, WANTED).needed >= 4


def test_the_printed_tables_are_not_cut_at_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    estimate = [-0.12, -1.25, 10.75]
    scores = dict.fromkeys(HEADINGS.keys() - LEFT_OUT, estimate)
    world = {"kind": "open", "came_back": 3, "episodes": 4}
    counts = dict.fromkeys(["measured", "turns", "episodes", "tasks", "continuations", "explored"], 7)
    counts |= {"played": 7, "failed": 0, "came_elsewhere": 0, "explored_failed": 0}
    row = {"cost": 12.3, **scores}
    found = {"world": world, "environment": "guess", "credits": {"progress-advantage": row, MEASURED: row}}

    _print({**counts, **found, "sentences": [], "left_out": {}})
    said = capsys.readouterr().out
    assert "\u2026" not in said
    assert said.count("-1.25 10.75") == 2 * len(scores)
    assert said.count("progress-advantage") == 2


def test_claims_have_a_caution_and_missing_gradients_no_table(capsys):
    """Two credits are compared, and each claim is about one of them."""
    world = {"kind": "open", "came_back": 3, "episodes": 4}
    counts = dict.fromkeys(["measured", "turns", "episodes", "tasks", "continuations", "explored"], 7)
    counts |= {"played": 9, "failed": 2, "came_elsewhere": 0, "explored_failed": 3}
    row = {"cost": 12.3, "auc": [0.7, 0.6, 0.8]}
    credits = {"rloo": row, "gigpo": row, "measured advantage": row}
    found = {"world": world, "environment": "guess", "credits": credits, "left_out": {}}

    _print({**counts, **found, "sentences": ["On guess, gigpo tells turns apart."]})
    claimed = " ".join(capsys.readouterr().out.split())
    _print({**counts, **found, "sentences": [], "failed": 0})
    silent = capsys.readouterr().out

    assert "It is not corrected for the comparison of 2 credits" in claimed
    assert (
        "Of 9 continuations, 2 failed with an error of the environment or the engine, and 0 did not"
        in claimed
    )
    assert "7 of 7 turns were measured, in 7 of 7 explored episodes" in claimed
    assert "3 explored episodes FAILED and cannot be measured." in claimed
    assert "did not come back" not in silent
    assert "policy gradient" not in claimed
    assert "corrected" not in silent


def test_the_recipe_of_a_run_names_it(run, monkeypatch, tmp_path):
    """With rules that the recipe left to the environment. A recipe without a run makes no folder."""
    monkeypatch.chdir(run.parents[1])
    data = yaml.safe_load((run / "recipe.yaml").read_text())
    data["protocol"] = None
    named, fresh = tmp_path / "named.yaml", tmp_path / "fresh.yaml"
    named.write_text(yaml.safe_dump(data))
    fresh.write_text(yaml.safe_dump(data | {"name": "fresh"}))

    assert measure_run(named, WANTED) == measure_run(run, WANTED)
    with pytest.raises(RunError, match=r"fresh.yaml has explored nothing yet; run: perturn collect"):
        measure_run(fresh, WANTED)
    assert not (run.parent / "fresh").exists()


def test_a_credit_whose_weights_are_all_zero_is_left_out(run, monkeypatch, tmp_path):
    """It has no score, and its row of the table would be empty."""
    monkeypatch.chdir(run.parents[1])
    file = tmp_path / "idle.py"
    file.write_text(
        "from dataclasses import dataclass\nimport torch\nfrom perturn.extend.tensors import GroupCredit\n\n"
        "@dataclass(frozen=True)\nclass Idle(GroupCredit):\n"
        "    def __call__(self, group, **_):\n        return [torch.zeros(len(one.turns)) for one in group]\n"
    )

    with pytest.raises(
        RunError, match=r"credit .*idle.py:Idle' gives every turn of these episodes the weight 0"
    ):
        measure_run(run, Wanted([f"{file}:Idle"], episodes=6, continuations=4))


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        (Wanted(continuations=3), "must be >= 4, two for each half, got 3"),
        (Wanted(iteration=2), "iteration 2"),
        (Wanted(["nosuch"]), "nosuch"),
    ],
)
def test_what_cannot_be_measured_is_rejected(run, monkeypatch, wanted, problem):
    monkeypatch.chdir(run.parents[1])
    with pytest.raises((ConfigError, RunError), match=problem):
        measure_run(run, Wanted(wanted.credits, 6, wanted.continuations, wanted.iteration))


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["rloo", "rlooo"], "unknown credit.name 'rlooo'"),
        ([], "must name a credit, such as rloo, or all, got"),
    ],
)
def test_a_credit_that_is_not_there_is_refused_before_anything_is_played(run, monkeypatch, names, problem):
    monkeypatch.chdir(run.parents[1])
    with pytest.raises(ConfigError, match=problem):
        forecast_run(run, Wanted(names, 6, 4))


def test_a_credit_that_raises_is_found_before_anything_is_played(run, monkeypatch, tmp_path):
    monkeypatch.chdir(run.parents[1])
    monkeypatch.setattr("perturn.measure.measure_run.play_points", None)
    file = tmp_path / "torn_credit.py"
    file.write_text(
        "from dataclasses import dataclass\nfrom perturn.extend.tensors import GroupCredit\n\n"
        "@dataclass(frozen=True)\nclass Torn(GroupCredit):\n"
        "    def __call__(self, group, **_):\n        return [1 / 0]\n"
    )

    with pytest.raises(PerturnError, match=r"ZeroDivisionError: division by zero"):
        measure_run(run, Wanted([f"{file}:Torn"], episodes=6, continuations=4))


def test_counts_of_an_older_measurement_leave_out_what_it_lacks():
    """It has no number of explored episodes."""
    names = ("measured", "turns", "episodes", "tasks", "continuations", "played", "failed", "came_elsewhere")

    said = counts_said(dict.fromkeys(names, 0))
    assert said.startswith("0 of 0 turns were measured, in 0 episodes, of 0 tasks")
    assert "FAILED" not in said


def test_the_report_shows_the_measurement(run, monkeypatch):
    """A table of credits, a table of their thirds, and one episode turn by turn, with the caution on many credits."""
    monkeypatch.chdir(run.parents[1])
    measure_run(run, WANTED)

    found = measured(RunPaths(run))
    page = write_report(run).read_text()
    assert [each["name"] for each in found["credits"]] == [*CREDITS, MEASURED]
    assert len(found["episode"]["turns"][0]["credits"]) == len(CREDITS)
    assert '<h2 id="measure">' in page
    assert "in 6 of 12 explored episodes, of" in page
    assert "not corrected for the number of credits" in page
    assert "<summary>Scores by third of the episode</summary>" in page
    by_third = [(each["name"], each["third"]) for each in found["by_third"]]
    assert by_third == [(name, third) for name in CREDITS for third in THIRDS]
    credits = json.loads(RunPaths(run).all_measured[-1].read_text())["credits"]
    for each in found["by_third"]:
        scores = credits[each["name"]]["by_third"][each["third"]]
        assert each["cells"] == [scores[key] for key in OF_TURNS]
