"""The command line: mistakes end with code 2 and one line, before any work; help has examples."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from perturn.cli._scores import print_summary
from perturn.data.store import read_trajectories
from support.command_line import assert_refused

PERTURN = Path(sys.executable).with_name("perturn")
STAGES = ["run", "collect", "pair", "train", "evaluate"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["sed=1"], "unknown key 'sed'. Did you mean 'seed'?"),
        (
            ["align.loss.bata=1", "align.loss.name=dpo"],
            "unknown key 'align.loss.bata'. Did you mean 'align.loss.beta'?",
        ),
        (["align.loss.name=tlm-der"], "unknown align.loss.name 'tlm-der'. Did you mean 'tlm-dre'?"),
        (["align.loss.low=-1"], "align.loss.low must be"),
        (
            ["align.loss.name=sft"],
            "align.loss.name must be a loss on pairs (dpo, dmpo, dil, tlm-dpo, tlm-dre, w-dpo), got 'sft'",
        ),
        (["sft.loss.name=dpo"], "sft.loss.name must be a loss on single trajectories (sft), got 'dpo'"),
        (["align.scheduler=cosin"], "align: cosin is not a valid SchedulerType"),
        (["align.shared_prefix=drop"], "shared_prefix must be one of keep, mask, got 'drop'"),
        (["model.name=./nowhere"], "model folder './nowhere' does not exist. Give a Hugging Face Hub id"),
        (["model.dtype=float8"], "model.dtype must be one of"),
        (
            ["model.chat_template=nowhere.jinja"],
            "model.chat_template 'nowhere.jinja' is neither a template of ours, a file nor Jinja",
        ),
        (["model.chat_template=qwen-3"], "a file nor Jinja. Did you mean 'qwen3'?"),
        (["protocol.name=scienceworld-et", "protocol.system=null"], "Did you mean 'scienceworld-eto'?"),
        (["protocol.format=recat"], "unknown protocol.format 'recat'. Did you mean 'react'?"),
        (
            ["environment.name=scienceworl"],
            "unknown environment.name 'scienceworl'. Did you mean 'scienceworld'?",
        ),
        (["environment.name=nowhere:World"], "'nowhere:World' cannot be loaded: ModuleNotFoundError"),
        (["environment.size=3"], "unknown key 'environment.size'"),
        (["evaluate.tasks.split=dev"], "evaluate.tasks: guess-number-1.0 has no tasks for split 'dev'"),
        (
            ["explore.tasks.per_kind=5"],
            "explore.tasks: kind 'guess' has 8 tasks in split 'train', but per_kind=5",
        ),
        (["seed"], "an override must look like key=value, such as seed=1 or align.loss.beta=0.2, got 'seed'"),
        (
            ["protocol.format=tools", "model.chat_template=tools"],
            "offers no tools; set protocol.format",
        ),
        (["protocol.format=tools"], "shows no tools. Set model.chat_template to one of"),
        (["name=a b"], "name must be usable as a folder name"),
    ],
)
def test_a_mistake_in_a_recipe_is_refused_before_anything_is_made(perturn, recipe, tmp_path, words, says):
    """Also what only the last stage would have met, such as a setting of the alignment's loss."""
    result = perturn("run", recipe, *words)

    assert_refused(result, says)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", STAGES)
def test_every_stage_checks_the_whole_recipe(perturn, recipe, tmp_path, command):
    """`collect` too refuses a loss that only `train` would build."""
    result = perturn(command, recipe, "align.loss.name=dop")

    assert_refused(result, "unknown align.loss.name 'dop'. Did you mean 'dpo'?")
    assert not (tmp_path / "runs").exists()


def test_a_template_that_rewrites_history_is_refused_before_anything_is_made(perturn, recipe, tmp_path):
    """It shows only the last message, so no turn's tokens are a prefix of the next one's."""
    template = tmp_path / "last.jinja"
    template.write_text("{{ messages[-1]['content'] }}<|im_end|>{% if add_generation_prompt %}>{% endif %}")

    result = perturn("run", recipe, f"model.chat_template={template}")

    assert_refused(result, "not append-only")
    assert not (tmp_path / "runs").exists()


def test_a_folder_of_another_recipe_is_refused(perturn, recipe, tmp_path):
    """The first run recorded seed 0; by recipe and by folder, with seed 1 nothing changes."""
    assert perturn("collect", recipe)[0] == 0
    before = {
        path: (path.stat().st_mtime_ns, path.is_file() and path.read_bytes()) for path in tmp_path.rglob("*")
    }

    results = [
        perturn(command, source, "seed=1")
        for command in ("run", "report")
        for source in (recipe, tmp_path / "runs/one")
    ]

    for result in results:
        assert_refused(result, "was made by another recipe: seed is 0 there and 1 here")
    assert {
        path: (path.stat().st_mtime_ns, path.is_file() and path.read_bytes()) for path in tmp_path.rglob("*")
    } == before


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run", "nowhere.yaml"], "'nowhere.yaml' is no recipe file, run folder or bundled recipe"),
        (["run", "."], "'.' is no run folder: it has no recipe.yaml"),
        (["list", "looses"], "unknown table 'looses'. Did you mean 'losses'?"),
        (["check-env", "nowhere:World"], "'nowhere:World' cannot be loaded: ModuleNotFoundError"),
        (["convert", "./nowhere"], "no bundled model is named './nowhere'. Known: "),
    ],
)
def test_a_wrong_argument_is_refused(perturn, tmp_path, monkeypatch, words, says):
    """In an empty folder, which stays empty."""
    monkeypatch.chdir(tmp_path)

    result = perturn(*words)

    assert_refused(result, says)
    assert not list(tmp_path.iterdir())


def test_a_report_of_a_run_that_was_never_begun_makes_no_folder(perturn, recipe, tmp_path):
    """There is nothing to report on."""
    code, output, notices = perturn("report", recipe)

    assert (code, output) == (2, "")
    assert notices.startswith("error: ")
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("align.loss.bata=1", "unknown key 'align.loss.bata'"),
        ("model.name=nobody/nothing", "model 'nobody/nothing' cannot be loaded"),
    ],
)
def test_the_installed_command_refuses_with_one_line_and_ends_soon(recipe, tmp_path, word, says):
    """A process of its own: exit code, no traceback; a Hub id offline is given up at once, in well under 30 s."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    example = Path(__file__).parents[1] / "examples"

    began = time.monotonic()
    result = subprocess.run(
        [PERTURN, "run", recipe, word],
        cwd=example,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert_refused((result.returncode, result.stdout, result.stderr), says)
    assert time.monotonic() - began < 60
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["evalute", "runs/demo"], "No such command 'evalute'. Did you mean 'evaluate'?"),
        (["inspect", "data", "--modle", "m"], "--model"),  # in the words of the installed typer and click
        (["run"], "Missing argument 'RECIPE-OR-RUN'"),
    ],
)
def test_a_mistyped_command_or_option_is_told_what_was_meant(perturn, words, says):
    """Code 2, on standard error."""
    code, output, notices = perturn(*words)

    assert (code, output) == (2, "")
    assert says in " ".join(notices.replace("│", " ").split())


def test_stages_print_json_for_machines(perturn, recipe, tmp_path):
    """What the manifest has of the command's steps; null for those that wait."""
    code, output, _ = perturn("collect", recipe, "--json", "worlds.processes=0")

    stages = json.loads(output)["stages"]
    assert code == 0
    assert stages["expert"]["counts"]["episodes"] == 8
    assert stages["explore"] is None


def test_an_end_that_an_interval_lacks_is_a_question_mark(capsys):
    """One task whose score has no bounds says nothing of the others; summary.json then has null."""
    row = {"name": "base", "n": 1, "mean_score": 7.0, "success_rate": 1.0, "mean_turns": 2.0}
    compared = {"a": "sft", "b": "base", "n": 1, "mean_difference": 2.0, "interval": [None, None]} | {
        "p_value": 1.0, "mcnemar_p_value": None, "wins": 1, "losses": 0, "ties": 0
    }  # fmt: skip
    row |= {"interval": [None, None], "success_interval": [0.2, 1.0], "failed": 0}

    print_summary({"protocol": None, "policies": [row], "comparison": compared})

    printed = capsys.readouterr().out
    assert "7.000 [?, ?]" in printed
    assert "Whether sft differs from base is unclear" in " ".join(printed.split())


def test_an_environment_that_keeps_the_contract_passes(perturn, own_environment):
    """The documentation's example, in both of its splits."""
    results = [
        perturn("check-env", "own_environment:GuessNumber", "--split", split) for split in ("train", "test")
    ]

    assert [code for code, _, _ in results] == [0, 0]
    assert "own_environment:GuessNumber keeps the contract." in results[0][1]


def test_an_environment_that_breaks_the_contract_is_told_how(perturn, tmp_path, monkeypatch):
    """Code 1, and a sentence for each problem."""
    (tmp_path / "perturn_bad_world.py").write_text(
        "class World:\n    name = 'bad'\n    def close(self): pass\n"
    )
    monkeypatch.chdir(tmp_path)

    code, output, _ = perturn("check-env", "perturn_bad_world:World")

    assert code == 1
    assert "- Method reset() is missing in World. Remedy: " in output
    assert all(line.startswith("- ") for line in output.splitlines())


@pytest.mark.slow
def test_a_model_is_scored_without_a_recipe(perturn, tiny_folder, own_environment, tmp_path):
    """A table; then, of what is done, the scores with their n and interval as JSON."""
    words = (
        "evaluate",
        "--model",
        tiny_folder,
        "--environment",
        "own_environment:GuessNumber",
        "protocol.max_turns=2",
    )
    words = (*words, "evaluate.sampling.max_new_tokens=4", "model.dtype=float32", f"output={tmp_path}")

    code, table, _ = perturn(*words)
    again, output, notices = perturn(*words, "--json")

    assert (code, again) == (0, 0)
    assert "score [95 %]" in table
    assert "done before" in notices
    found = json.loads(output)
    (policy,) = found["policies"]
    assert (policy["name"], policy["n"], policy["mean_score"]) == ("base", 4, 0.0)
    assert policy["interval"][0] == 0.0 < policy["interval"][1] < 1.0
    assert found["protocol"]["environment"] == "guess-number-1.0"
    seen = perturn("watch", found["run"], "--once", "--json")
    assert json.loads(seen[1])["scores"][0]["n"] == 4
    assert (seen[0], json.loads(seen[1])["state"]) == (0, "finished")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            [],
            "RECIPE-OR-RUN is missing, and evaluate scores one; name one, or give --model and --environment",
        ),
        (
            ["--environment", "alfworld-like"],
            "--environment belongs to --model; give --model too, or a recipe or a run without them",
        ),
        (
            ["--model", "m"],
            "--environment is missing, and evaluate needs it to score --model; `perturn list environments`",
        ),
        (["--model", "m", "--environment", "alfworl"], "unknown environment.name 'alfworl'"),
        (
            ["recipe.yaml", "--model", "m", "--environment", "alfworld-like"],
            "a recipe or run and --model exclude each other, got 'recipe.yaml'; leave one out, or set model.name=m",
        ),
    ],
)
def test_a_score_needs_a_model_and_an_environment(perturn, words, says):
    """What is missing is named, and nothing is made."""
    assert_refused(perturn("evaluate", *words), says)


def test_a_person_plays_in_the_terminal_and_keeps_the_episode(
    perturn, own_environment, tmp_path, monkeypatch
):
    """The task is guess/9 and the like; all four numbers are tried."""
    lines = iter(["9", "10", "11", "12"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    file = tmp_path / "mine.jsonl"

    code, output, _ = perturn("play", "own_environment:GuessNumber", "--output", file)

    assert code == 0
    assert "Guess it." in output
    assert "solved: total reward 1" in output
    assert json.loads(file.read_text())["success"] is True


def test_a_task_that_is_played_again_is_kept_beside_the_first(
    perturn, own_environment, tmp_path, monkeypatch
):
    """As its next sample; an empty line by mistake ends nothing."""
    for lines in (["10"], ["9", "", "10"]):
        typed = iter(lines)
        monkeypatch.setattr("builtins.input", lambda _, typed=typed: next(typed))
        code, _, _ = perturn(
            "play", "own_environment:GuessNumber", "--task", "guess/10", "-o", tmp_path / "mine.jsonl"
        )
        assert code == 0

    kept = list(read_trajectories(tmp_path / "mine.jsonl"))

    assert [(one.key, len(one.turns)) for one in kept] == [(("guess/10", 0), 1), (("guess/10", 1), 2)]


def test_an_output_that_cannot_be_written_is_refused_before_the_play(
    perturn, own_environment, tmp_path, monkeypatch
):
    """A folder is no file; nothing is asked."""
    monkeypatch.setattr("builtins.input", lambda _: pytest.fail("a person was asked"))

    assert_refused(perturn("play", "own_environment:GuessNumber", "-o", tmp_path), "cannot be written")


@pytest.mark.parametrize(
    ("ends", "exits"), [(EOFError, 0), (KeyboardInterrupt, 130)], ids=["Ctrl-D", "Ctrl-C"]
)
def test_a_person_is_told_how_to_leave(perturn, own_environment, monkeypatch, ends, exits):
    """It stands above the task; nothing goes on from there, so nothing but the rules is noticed."""

    def leave(_):
        raise ends

    monkeypatch.setattr("builtins.input", leave)

    code, output, notices = perturn("play", "own_environment:GuessNumber")

    assert code == exits
    assert notices.startswith("rules of guess-number-1.0")
    assert "goes on" not in notices
    assert output.index("To leave, press Ctrl-D") < output.index("Guess it.")
    assert output.endswith("you left; nothing is kept\n")


def test_a_run_that_scores_nothing_shows_no_empty_table(capsys):
    """But says so."""
    print_summary({"protocol": None, "policies": [], "comparison": None})

    assert capsys.readouterr().out == "nothing was scored\n"


def test_runs_that_cannot_be_compared_end_with_a_code(perturn, tmp_path):
    """No such run is a mistake."""
    assert_refused(perturn("compare", tmp_path / "a", tmp_path / "b"), "does not exist")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "FILE is missing, and init writes it"),
        (["a.yaml"], "--environment is missing, and init needs it; give it, or --from"),
        (["a.yaml", "--from", "x"], "no recipe 'x'"),
    ],
)
def test_init_says_what_it_needs(perturn, words, says):
    """And writes nothing."""
    assert_refused(perturn("init", *words), says)
