"""The documentation is right: commands, recipes, tables, names. `tests/test_docs_run.py` runs its Python."""

import importlib.util
import inspect
import itertools
import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import typer
import yaml
from accelerate.commands.launch import launch_command_parser
from typer.testing import CliRunner

import perturn
from perturn.cli import app
from perturn.cli._base import EXIT_CODES
from perturn.config.parsing import parse, to_mapping
from perturn.config.recipe import Recipe, read_recipe
from perturn.envs import ENVIRONMENTS
from perturn.envs.named_protocols import PROTOCOLS
from perturn.run.served_policy import engine_settings
from perturn.study.cells import Plan
from perturn.study.rescore import AgainFile
from perturn.study.settings import read_study
from support.docs import PAGES, ROOT, blocks

NOT_CHECKED = {"source .venv/bin/activate", "mkdir -p runs"}
"""Lines of shell blocks that are neither run nor parsed: they change the shell itself."""


def lines(language):
    """(page, line) of all blocks in one language, without comments."""
    return [
        (page, line.split("  #")[0].strip())
        for page in PAGES
        for block in blocks(page, language)
        for line in re.sub(r" *\\\n *", " ", block).splitlines()  # continued lines are one
        if line.strip() and not line.startswith("#")
    ]


def check_perturn(words, tiny_folder):
    """A command of ours: its name and options are known, its recipe and settings are accepted; quick ones are run."""
    group = typer.main.get_command(app)
    if words[0].startswith("--"):
        assert words[0] in {flag for option in group.params for flag in option.opts} | {"--help"}
        return
    command = group.commands[words[0]]
    if "--help" in words:
        return
    values = command.make_context(words[0], list(words[1:])).params
    source = values.get("source")
    if source and (ROOT / source).suffix == ".yaml" and str(source).startswith("recipes/"):
        read_recipe(ROOT / source, values["overrides"] or [])
    if words[0] in ("list", "check-env"):
        assert CliRunner().invoke(app, words).exit_code == 0
    if words[0] == "init":
        result = CliRunner().invoke(
            app, [str(tiny_folder) if word == "smollm2-135m" else word for word in words]
        )
        assert result.exit_code == 0, result.output
        read_recipe(Path(values["file"]))


def check_other(words):
    """A target of the Makefile, a script of ours, an extra that exists, a launcher with its own help."""
    if words[0] == "make":
        targets = re.findall(r"^([\w%-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert any(re.fullmatch(target.replace("%", ".+"), words[1]) for target in targets)
    elif words[:2] == ["python", "-m"]:
        assert importlib.util.find_spec(words[2])
    elif words[0] != "python" and "vllm" in words:
        assert (
            words[words.index("vllm") + 1] == "serve"
        )  # of a package that is not ours, in an environment of its own
    elif words[0] == "python":
        assert (ROOT / words[1]).is_file()
        known = (ROOT / words[1]).read_text()
        assert all(f'"{word}"' in known for word in words[2:] if word.startswith("--"))
    elif words[:2] == ["pip", "install"]:
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        named = [
            extra
            for word in words[2:]
            for found in re.findall(r"\[(.*)\]", word)
            for extra in found.split(",")
        ]
        assert set(named) <= set(extras)
    elif words[0] == "docker":
        assert words[1] in ("build", "run")
        known = (ROOT / "Dockerfile").read_text()
        given = [value.split("=")[0] for flag, value in itertools.pairwise(words) if flag == "--build-arg"]
        assert all(f"ARG {name}=" in known for name in given)
    else:
        assert words[:2] == ["accelerate", "launch"], words
        launch_command_parser().parse_args(words[2:])


@pytest.mark.parametrize(("page", "line"), lines("shell"))
def test_shell_lines_are_run_or_parsed(page, line, tiny_folder, tmp_path, monkeypatch):
    """None is left out, but for the list above."""
    if line in NOT_CHECKED:
        return
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "own_environment.py").symlink_to(ROOT / "examples/own_environment.py")
    words = list(itertools.dropwhile(lambda word: re.match(r"[A-Z_]+=", word), shlex.split(line)))

    if words[0] == "perturn":
        check_perturn(words[1:], tiny_folder)
    else:
        check_other(words)


def test_exceptions_are_still_needed():
    """A line that is shown nowhere is no exception."""
    assert {line for _, line in lines("shell")} >= NOT_CHECKED


def merged(recipe, changes):
    """Sections of one recipe over those of another; one that names another entry takes the place of the former."""
    deep = {
        key: merged(recipe[key], value)
        if isinstance(value, dict) and isinstance(recipe.get(key), dict) and same_entry(recipe[key], value)
        else value
        for key, value in changes.items()
    }
    return recipe | deep


def same_entry(section, other):
    """Whether two sections do not name different entries."""
    return section.get("name", other.get("name")) == other.get("name", section.get("name"))


YAML = [(page, block) for page in PAGES for block in blocks(page, "yaml")]


@pytest.mark.parametrize("block", [block for _, block in YAML if "again:" in block])
def test_studies_again_of_the_pages_are_accepted(block):
    """What they name is another study, which is not there."""
    asked = parse(AgainFile, yaml.safe_load(block))

    assert asked.again != asked.name


@pytest.mark.parametrize("block", [block for _, block in YAML if "methods:" in block])
def test_study_files_of_the_pages_have_cells(block, tmp_path):
    """With the recipe that they name, which comes with the package; every point of every method makes a recipe."""
    (tmp_path / "study.yaml").write_text(block)

    plan = Plan(*read_study(tmp_path / "study.yaml"))

    assert len(list(plan.tuning())) == sum(map(len, plan.points.values())) * len(plan.study.tuned_seeds)


OF_RECIPES = [each for each in YAML if "methods:" not in each[1] and "again:" not in each[1]]


@pytest.mark.parametrize(("page", "block"), OF_RECIPES)
def test_yaml_blocks_are_parts_of_a_recipe(page, block):
    """A block over the demo's recipe is accepted; a block that is a whole recipe is accepted alone."""
    demo = yaml.safe_load((ROOT / "recipes/scienceworld_tlm-dre_demo.yaml").read_text())

    shown = yaml.safe_load(block)
    whole = {"name", "model", "environment", "explore", "align"} <= shown.keys()
    recipe = parse(Recipe, shown if whole else merged(demo, shown))

    taken = json.loads(json.dumps(to_mapping(recipe)))
    assert merged(taken, shown) == taken
    assert engine_settings(recipe)


def test_the_exit_codes_on_the_page_are_those_of_the_help():
    """One sentence, in both places."""
    assert EXIT_CODES.removeprefix("Exit codes: ") in " ".join(
        (ROOT / "docs/commands.md").read_text().split()
    )


def test_the_walk_through_shows_the_example_environment_as_it_is():
    """The blocks are the files that the tests check, the first without its header."""
    short = blocks("docs/how-to/environment.md", "python")[0].rstrip()
    whole = blocks("docs/own-environment.md", "python", "## The class")[0].rstrip()

    assert (ROOT / "examples/text_game.py").read_text().rstrip().endswith(f"\n\n{short}")
    assert whole == (ROOT / "examples/own_environment.py").read_text().rstrip()


def rows(page, heading):
    """Cells of the first table behind a heading, by the first cell of each row."""
    table = (ROOT / page).read_text().split(heading, 1)[1].split("|---", 1)[1].split("\n\n", 1)[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[1:]]
    return {first: rest for first, *rest in cells}


def test_the_table_of_results_has_the_scores_of_the_file():
    """The policies' scores of each seed, and the difference; three decimals."""
    results = rows("docs/results/demo-scienceworld.md", "# The demo")
    measured = json.loads((ROOT / "benchmarks/alignment.json").read_text())[0]
    difference = measured["difference"]

    assert [cell.split()[0] for cell in results["SFT"][:3]] == [f"{score:.3f}" for score in measured["sft"]]
    assert [cell.split()[0] for cell in results["tlm-DRE"][:3]] == [
        f"{score:.3f}" for score in measured["aligned"]
    ]
    assert results["tlm-DRE − SFT"][3].replace("−", "-") == (
        f"{difference['mean_difference']:+.3f} [{difference['low']:+.3f}, {difference['high']:+.3f}], "
        f"p = {difference['p_value']:.2f}"
    )


def test_the_table_of_the_demo_has_the_numbers_of_the_file():
    """Of each seed before, after, and their difference, with intervals; three decimals, and points."""
    found = json.loads((ROOT / "benchmarks/demo.json").read_text())["seeds"]
    shown = rows("docs/results/demo.md", "## What it brings")

    assert list(shown) == list(found)
    for seed, cells in shown.items():
        its = found[seed]["online"]
        before, after = ("{:.3f} [{:.3f}, {:.3f}]".format(*its[name]) for name in ("before", "after"))
        difference = "{:+.1f} points [{:+.1f}, {:+.1f}]".format(*(100 * value for value in its["difference"]))
        assert [cell.replace("−", "-") for cell in cells[:3]] == [before, after, difference]
        assert its["n"] == 400


def test_the_page_for_contributors_says_what_each_room_is():
    """Each package, folder of data and module of perturn is in the table."""
    source = ROOT / "src/perturn"
    rooms = {f"{path.name}/" for path in source.iterdir() if path.is_dir() and path.name != "__pycache__"}
    modules = {path.name for path in source.glob("*.py")} - {"__init__.py"}

    named = " ".join(rows("CONTRIBUTING.md", "## What is where"))

    assert set(re.findall(r"`([\w.]+/?)`", named)) == rooms | modules


def test_files_that_pages_name_are_there():
    """Under the repository, a package of ours, or the package that the page is about."""
    files = [path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py") if ".venv" not in path.parts]

    for page in PAGES:
        for name in re.findall(r"`([\w/.-]+\.py)`", (ROOT / page).read_text()):
            assert any(f"/{file}".endswith(f"/{name}") for file in files), f"{page}: {name}"


def test_the_page_of_commands_has_each_once():
    """The first words of its table are the commands of the app."""
    first = (ROOT / "docs/commands.md").read_text().split("|---", 1)[1].split("\n\n", 1)[0]
    named = [
        name
        for cell in re.findall(r"^\| (.*?) \|", first, re.MULTILINE)
        for name in re.findall(r"`([a-z-]+)", cell)
    ]

    assert sorted(named) == sorted(typer.main.get_command(app).commands)


@pytest.mark.parametrize("name", dir(perturn))
def test_a_public_name_is_on_the_page_of_the_api(name):
    """By itself, or in a module that is shown whole."""
    shown = re.findall(r"^::: (\S+)$(?!\n    options)", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
    alone = re.findall(r"^::: perturn\.(\w+)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE)

    assert name in alone or getattr(perturn, name).__module__ in shown


def test_recipes_say_how_to_run_them():
    """The header of each recipe has its command, hardware, time and result."""
    for recipe in (ROOT / "recipes").glob("*.yaml"):
        header = "".join(
            line for line in recipe.read_text().splitlines(keepends=True) if line.startswith("#")
        )

        for word in ("Command:", "Hardware:", "Time:", "Result:"):
            assert word in header, f"{recipe.name}: {word}"


OF_ENVIRONMENTS = ["docs/environments.md", "docs/own-environment.md", "docs/how-to/environment.md"]


def test_environments_that_the_page_names_exist():
    """In each recipe part, with settings that the class takes."""
    sections = [
        yaml.safe_load(block).get("environment") for page in OF_ENVIRONMENTS for block in blocks(page, "yaml")
    ]

    assert sections
    for section in filter(None, sections):
        if section["name"] in ENVIRONMENTS:
            settings = inspect.signature(ENVIRONMENTS[section["name"]]).parameters
            assert section.keys() - {"name"} <= settings.keys()


def test_protocols_that_the_page_names_exist():
    """In each recipe part; one with rules of its own has a name of its own."""
    shown = [
        yaml.safe_load(block).get("protocol", {})
        for page in OF_ENVIRONMENTS
        for block in blocks(page, "yaml")
    ]

    assert {rules["name"] for rules in shown if rules and "max_turns" not in rules} <= set(PROTOCOLS)
