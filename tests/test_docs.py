"""What the documentation shows is run: code blocks, example files and commands."""

import inspect
import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from turnwise.cli import app
from turnwise.envs import ENVIRONMENTS
from turnwise.envs.protocols import PROTOCOLS

ROOT = Path(__file__).parents[1]


def blocks(file, language):
    """The code blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / file).read_text(), re.MULTILINE | re.DOTALL)


def test_readme_trains_on_your_own_data(tiny_folder, tmp_path, monkeypatch):
    """The ten lines run as printed, with a tiny model in the place of the pretrained one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TURNWISE_CACHE", str(tmp_path / "cache"))
    code = next(block for block in blocks("README.md", "python") if "TurnTrainer" in block)

    exec(code.replace("smollm2-135m", str(tiny_folder)), {})

    assert list((tmp_path / "aligned").glob("checkpoint-*/model.safetensors"))


def test_readme_computes_a_loss():
    """One value a pair."""
    code = next(block for block in blocks("README.md", "python") if "from_nested" in block)
    names = {}

    exec(code, names)

    assert names["value"].shape == (1,)


def test_methods_page_computes_a_loss():
    """The first block of the page runs as printed."""
    names = {}

    exec(blocks("docs/methods.md", "python")[0], names)

    assert names["value"].shape == (1,)


def test_readme_shows_the_example_environment_as_it_is():
    """The block is the file that the tests check."""
    shown = next(block for block in blocks("README.md", "python") if "class GuessNumber" in block)

    assert shown.rstrip() == (ROOT / "docs/examples/own_environment.py").read_text().rstrip()


SHOWN = re.findall(r"^turnwise ([a-z-]+(?: \| [a-z-]+)*)", (ROOT / "README.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("command", sorted({name for line in SHOWN for name in line.split(" | ")}))
def test_every_command_that_the_readme_names_exists(command):
    """Each explains itself."""
    result = CliRunner().invoke(app, [command, "--help"])

    assert result.exit_code == 0


def test_recipes_say_how_to_run_them():
    """The header of each recipe has its command, hardware, time and result."""
    for recipe in (ROOT / "recipes").glob("*.yaml"):
        header = "".join(
            line for line in recipe.read_text().splitlines(keepends=True) if line.startswith("#")
        )

        for word in ("Command:", "Hardware:", "Time:", "Result:"):
            assert word in header, f"{recipe.name}: {word}"


def test_the_page_on_own_environments_runs_as_printed(tiny_folder, tmp_path, monkeypatch):
    """Its check and its run, with a tiny model in the place of the pretrained one, beside the example alone."""
    page = "docs/own-environment.md"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TURNWISE_CACHE", str(tmp_path / "cache"))
    shutil.copy(ROOT / "docs/examples/own_environment.py", tmp_path)
    recipe = blocks(page, "yaml")[0]
    (tmp_path / "guess.yaml").write_text(recipe.replace("smollm2-135m", str(tiny_folder)))
    commands = [line for block in blocks(page, "shell") for line in block.splitlines()]

    for command in commands:
        words = shlex.split(command.replace("smollm2-135m", str(tiny_folder)))[1:]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, (command, result.output)

    assert [command.split()[1] for command in commands] == ["check-env", "run", "inspect"]
    assert (tmp_path / "runs/guess/report.html").is_file()


@pytest.mark.parametrize("page", ["docs/own-environment.md", "docs/environments.md"])
def test_environments_that_the_pages_name_exist(page):
    """In each recipe part, with settings that the class takes."""
    sections = [yaml.safe_load(block).get("environment") for block in blocks(page, "yaml")]

    assert sections
    for section in filter(None, sections):
        if section["name"] in ENVIRONMENTS:
            settings = inspect.signature(ENVIRONMENTS[section["name"]]).parameters
            assert section.keys() - {"name"} <= settings.keys()


def test_protocols_that_the_pages_name_exist():
    """In each recipe part."""
    shown = [yaml.safe_load(block) for block in blocks("docs/environments.md", "yaml")]

    assert {block["protocol"]["name"] for block in shown if "protocol" in block} <= set(PROTOCOLS)
