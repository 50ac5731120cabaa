"""The examples of the folder `examples`: each keeps the contract, and its commands run with a tiny model."""

import json
import re
import runpy
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from typer.testing import CliRunner

from perturn.cli import app
from perturn.config.recipe import read_recipe
from perturn.run.execute import check
from perturn.run.recipe_template import write_recipe

ROOT = Path(__file__).parents[1]
EXAMPLES = ["text_game", "own_environment", "native_tools", "gymnasium_environment", "trl_environment"]


def commands(name):
    """The commands that the docstring of an example shows, of one line or continued on the next."""
    said = (
        (ROOT / f"examples/{name}.py").read_text().split('"""')[1].replace("\\\n", " ").replace("\\\\\n", " ")
    )
    return [shlex.split(line)[1:] for line in re.findall(r"^ *(perturn .*)$", said, re.MULTILINE)]


def run(words, **settings):
    """Exit code and output of a command."""
    result = CliRunner().invoke(app, words, **settings)
    assert result.exit_code == 0, (words, result.output)
    return result.output


@pytest.fixture
def at_root(monkeypatch, tmp_path):
    """The folder that the commands are given in."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PERTURN_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_as_it_says(name, at_root, tiny_folder, tmp_path):
    """Its check, its score and its play; a template with tools stands in for that of a model that was made for them."""
    shown = commands(name)
    assert shown

    for words in shown:
        if words[0] == "evaluate":
            words[words.index("--model") + 1] = str(tiny_folder)
            more = ["--n", "1", f"output={tmp_path}", "protocol.max_turns=2", "worlds.processes=0"]
            template = ["model.chat_template=tools"] if "native" in name or "trl" in name else []
            found = json.loads(run([*words, *more, *template, "--json"]).strip().splitlines()[-1])
            assert [(each["n"], each["failed"]) for each in found["policies"]] == [(1, 0)]
        else:
            run(words, input="7\n8\n9\n10\n11\n12\n" if words[0] == "play" else None)


def test_the_examples_of_the_page_are_those_of_the_folder():
    """And what else lies there is named in them."""
    files = {each.stem for each in (ROOT / "examples").glob("*.py")}

    assert files == {*EXAMPLES, "agent", "openenv_server", "online", "pairs", "own_credit", "tiny_tau3"}
    assert not list((ROOT / "docs/examples").glob("*_environment.py"))
    page = (ROOT / "examples/README.md").read_text()
    assert all(f"{name}.py" in page for name in files)
    assert all(len(each.read_text().splitlines()) <= 100 for each in (ROOT / "examples").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("example", ["text_game.py:Guess", "own_environment.py:GuessNumber"])
def test_init_writes_at_most_forty_lines_that_run(example, at_root, tiny_folder, tmp_path):
    """With an expert, and without; from the first stage to the report."""
    file = tmp_path / "first.yaml"
    write_recipe(file, environment=f"examples/{example}", model=str(tiny_folder), lora=True)

    assert len(file.read_text().splitlines()) <= 40
    words = [f"output={tmp_path}", "worlds.processes=0", "protocol.max_turns=2", "explore.samples=2"]
    small = ["iterations=2"] if "text" in example else ["rows.threshold=0"]
    check(read_recipe(file, [*words, *small]))
    assert yaml.safe_load(file.read_text())["protocol"]["format"] == "action"


def test_a_recipe_needs_no_protocol(at_root, tiny_folder, tmp_path, capsys):
    """The class's rules are taken, said once with their sources, and kept; a file beside the recipe counts."""
    (tmp_path / "beside.py").write_text((ROOT / "examples/text_game.py").read_text())
    file = tmp_path / "mine.yaml"
    file.write_text(
        f"name: mine\noutput: {tmp_path}\nmodel: {{name: {tiny_folder}}}\nenvironment: {{name: beside.py:Guess}}\n"
        "protocol: {max_turns: 1}\nevaluate: {tasks: {split: test, n: 1}, sampling: {max_new_tokens: 2}}\n"
        "worlds: {processes: 0}\n"
    )

    first = CliRunner().invoke(app, ["run", str(file)])
    again = CliRunner().invoke(app, ["run", str(file)])

    assert (first.exit_code, again.exit_code) == (0, 0), first.output
    kept = yaml.safe_load((tmp_path / "mine/recipe.yaml").read_text())["protocol"]
    assert (kept["format"], kept["max_turns"]) == ("action", 1)
    assert kept["system"].startswith("Guess a whole number")
    assert first.output.count("(docstring of Guess)") == 1
    assert "max_turns " not in first.output  # the recipe's own
    assert "docstring" not in again.output


def _main(name, **sizes):
    """Run the function `main` of an example; return what it gives."""
    module = SimpleNamespace(**runpy.run_path(str(ROOT / f"examples/{name}.py")))
    return module.main(**sizes)


def _online(**sizes):
    """Run the method of `examples/online.py`; return its trainer."""
    return _main("online", **sizes)


def test_ten_pairs_move_apart(tmp_path, capsys):
    """The good episodes gain on the bad ones, and the policy is saved."""
    before, after = _main("pairs", output=str(tmp_path / "aligned"), epochs=1)

    assert before == pytest.approx(0, abs=1e-4)
    assert after > before
    assert (tmp_path / "aligned/model.safetensors").exists()
    assert "0.000 before" in capsys.readouterr().out


def test_a_credit_of_ones_own_weighs_what_was_played():
    """Each episode that RLOO weighs has as many weights, twice as large at new observations; zeros stay."""
    rloo, own = _main("own_credit", tasks=1, samples=2)

    assert [len(row.weight) for row in own] == [len(row.trajectory.turns) for row in rloo]
    assert all(
        each in (pytest.approx(one), pytest.approx(2 * one))
        for a, b in zip(rloo, own, strict=True)
        for one, each in zip(a.weight, b.weight, strict=True)
    )


def test_the_online_method_is_two_screens_long():
    """A newcomer reads all of it before an edit."""
    assert len((ROOT / "examples/online.py").read_text().splitlines()) <= 60


def test_the_online_method_trains(capsys):
    """One iteration of two short games."""
    trainer = _online(iterations=1, tasks=1, samples=2, held_out=1)

    assert trainer.iteration == 1
    assert "success on 1 held-out games" in capsys.readouterr().out


@pytest.mark.slow
def test_the_online_method_runs_as_it_stands(capsys):
    """As a newcomer starts it."""
    trainer = _online()

    assert trainer.iteration == 3
    assert "held-out games" in capsys.readouterr().out
