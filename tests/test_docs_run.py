"""What the documentation shows in Python runs as printed; `tests/lints` reads the rest of it."""

import json
import shlex
import shutil
import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest
import yaml
from entry_kinds import KINDS
from typer.testing import CliRunner

from perturn.cli import app
from perturn.config.parsing import parse
from perturn.config.recipe import Recipe
from perturn.data.store import write_records
from perturn.run.execute import check
from perturn.run.protocol_rules import ruled
from perturn.table_index import table
from perturn.types import Action, PreferencePair
from support.docs import PAGES, ROOT, blocks
from support.states import episode


@pytest.fixture(scope="module")
def tiny_folder(whole_vocabulary):
    """The tiny policy that knows all tokens, of which the pages name some."""
    return whole_vocabulary


@pytest.fixture
def demo_folder(tiny_folder, tmp_path):
    """What the pages take from a run: its policies, which are a tiny model here, and an export of its pairs."""
    (tmp_path / "runs/demo-scienceworld/checkpoints").mkdir(parents=True)
    for policy in ("sft", "tlm-dre"):
        (tmp_path / "runs/demo-scienceworld/checkpoints" / policy).symlink_to(tiny_folder)
    task, good, bad = (
        [{"role": role, "content": text}]
        for role, text in (("user", "Find it."), ("assistant", "go"), ("assistant", "wait"))
    )
    (tmp_path / "demo-scienceworld-trl").mkdir()
    (tmp_path / "demo-scienceworld-trl/pairs.jsonl").write_text(
        json.dumps({"prompt": task, "chosen": good, "rejected": bad})
    )


TRAINERS = ("verl", "skyrl", "prime_rl", "tinker_cookbook")
"""Packages of other trainers, by whose names their pages import; these run where they are installed."""


@pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"
)  # peft's and TRL's
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
def test_python_blocks_run_as_printed(page, tiny_folder, demo_folder, tmp_path, monkeypatch):
    """In order, in one folder, with a tiny model in the place of the pretrained one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PERTURN_CACHE", str(tmp_path / "cache"))

    for block in blocks(page, "python"):
        if lacks := [
            name
            for name in TRAINERS
            if f"{name} import" in block or f"from {name}." in block
            if find_spec(name) is None
        ]:
            compile(block, page, "exec")
            pytest.skip(f"{lacks[0]} is not installed; make test-hosts runs this page")
        names = {"__name__": page}
        exec(block.replace("smollm2-135m", str(tiny_folder)), names)
        if "from_nested" in block:
            assert names["value"].shape == (1,)
        if "output_dir" in block:
            assert list(tmp_path.glob("*/checkpoint-*/*model.safetensors"))


EXAMPLES = {
    (kind, name): KINDS[kind].example(name, entry)
    for kind in KINDS
    for name, entry in sorted(table(kind).items())
}
PROGRAMS = {each: shown for each, (language, shown) in EXAMPLES.items() if language == "python"}
SECTIONS = {each: shown for each, (language, shown) in EXAMPLES.items() if language == "yaml"}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), PROGRAMS)
def test_examples_of_reference_pages_run_as_printed(kind, name, tmp_path, monkeypatch, capsys):
    """Each prints weights, or a value."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PERTURN_CACHE", str(tmp_path / "cache"))
    shown = PROGRAMS[kind, name]

    exec(shown, {"__name__": name})

    assert capsys.readouterr().out.strip() or "print" not in shown


@pytest.mark.parametrize(("kind", "name"), SECTIONS)
def test_sections_of_reference_pages_pass_the_checks_before_a_run(
    kind, name, tiny_folder, tmp_path, monkeypatch
):
    """The sections of the page replace the sections of a whole recipe."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PERTURN_CACHE", str(tmp_path / "cache"))
    shutil.copy(ROOT / "tests/envs/wiki/corpus.jsonl", tmp_path)
    questions = [{"question": f"What is {i}?", "answer": f"{i}", "type": "bridge"} for i in range(20)]
    (tmp_path / "questions.json").write_text(json.dumps(questions))
    asked = ({"role": "user", "content": "go"},)
    pair = [
        replace(episode(["start"] * turns, [1.0] * turns, sample=turns), prompt=asked) for turns in (1, 2)
    ]
    sampled = Action("start", token_ids=(1, 2), logprobs=(-0.5, -0.5))
    own = [replace(one, turns=tuple(replace(turn, action=sampled) for turn in one.turns)) for one in pair]
    write_records(tmp_path / "my_episodes.jsonl", own)
    write_records(tmp_path / "my_rows.jsonl", [PreferencePair(*pair)])
    whole = {
        "name": "page",
        "model": {"name": str(tiny_folder), "chat_template": "tools"},
        "environment": {"name": "alfworld-like", "train_games": 60},
        "explore": {"tasks": {"n": 16}, "per_iteration": 16, "samples": 4},
        "rows": {"name": "expert-pairs"},
        "align": {"loss": {"name": "dpo"}},
        "evaluate": {"tasks": {"split": "train", "n": 2, "skip": 16}},
    }
    part = yaml.safe_load(SECTIONS[kind, name])

    task_lists = check(
        ruled(parse(Recipe, {**whole, **part, "evaluate": whole["evaluate"] | part.get("evaluate", {})}))
    )

    assert task_lists is not None
    assert task_lists.tasks.keys() >= {"evaluate"}


@pytest.mark.slow
def test_the_page_on_own_environments_runs_as_printed(tiny_folder, tmp_path, monkeypatch):
    """Its scores, check and run, with a tiny model in the place of the pretrained one, beside the example alone."""
    page = "docs/how-to/environment.md"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PERTURN_CACHE", str(tmp_path / "cache"))
    shutil.copy(ROOT / "examples/own_environment.py", tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    recipe = blocks(page, "yaml")[0]
    (tmp_path / "guess-rules.yaml").write_text(recipe.replace("smollm2-135m", str(tiny_folder)))
    commands = [line for block in blocks(page, "shell") for line in block.splitlines()]
    commands = [line for line in commands if line.startswith("perturn")]

    for command in commands:
        words = shlex.split(command.replace("smollm2-135m", str(tiny_folder)))[1:]
        result = CliRunner().invoke(app, words, input="9\n10\n11\n12\n")
        assert result.exit_code == 0, (command, result.output)

    assert [each.split()[1] for each in commands] == ["evaluate", "play", "check-env", "run", "inspect"]
    assert (tmp_path / "runs/guess-rules/report.html").is_file()


@pytest.mark.slow
def test_the_page_on_logs_runs_as_printed(tiny_folder, tmp_path, monkeypatch):
    """Its first section, from a log to policies that KTO, tlm-DRE and DPO trained, with a tiny model."""
    page, section = "docs/how-to/logs.md", "## From a log to a trained policy"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PERTURN_CACHE", str(tmp_path / "cache"))
    exec(blocks(page, "python", section)[0], {"__name__": page})
    for name, recipe in zip(("kto", "pairs"), blocks(page, "yaml", section), strict=True):
        (tmp_path / f"{name}.yaml").write_text(recipe.replace("smollm2-135m", str(tiny_folder)))
    commands = [line for block in blocks(page, "shell", section)[:2] for line in block.splitlines()]
    printed = ""

    for command in commands:
        words = shlex.split(command.replace("smollm2-135m", str(tiny_folder)))[1:]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, (command, result.output)
        printed += result.output

    assert [each.split()[1] for each in commands] == ["import-logs"] * 2 + ["inspect"] + ["run"] * 3
    assert blocks(page, "text", section)[0] in printed
    policies = {run.name: list((run / "checkpoints").iterdir()) for run in (tmp_path / "runs").iterdir()}
    assert policies.keys() == {"thumbs", "thumbs-pairs", "thumbs-dpo"}
    assert all(policies.values())


@pytest.mark.slow
def test_the_notebook_runs(tiny_folder, tmp_path, monkeypatch, capsys):
    """Its code cells in their order, with a tiny model in the place of the pretrained one; it ends in two scores."""
    cells = json.loads((ROOT / "docs/examples/turns.ipynb").read_text())["cells"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PERTURN_CACHE", str(tmp_path / "cache"))
    names = {"__name__": "notebook"}

    for cell in cells:
        if cell["cell_type"] == "code":
            assert not cell["outputs"]  # a number of the page would be of no run that anybody can look up
            exec("".join(cell["source"]).replace("smollm2-135m", str(tiny_folder)), names)

    printed = capsys.readouterr().out
    assert "8 episodes, 24 turns" in printed
    assert printed.count("n = 4") == 2
    assert names["after"].n == 4


@pytest.mark.slow
def test_the_page_on_agents_trains_a_program_as_printed(tmp_path, monkeypatch, capsys):
    """Its first section: the program and its tasks are written, scored, trained once and inspected."""
    page, section = "docs/how-to/agents.md", "## From a program to a trained policy"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PERTURN_CACHE", str(tmp_path / "cache"))
    program, tasks, *_ = blocks(page, "py", section)
    (tmp_path / "coin.py").write_text(program)
    exec(tasks, {"__name__": page})
    (tmp_path / "tasks.jsonl").write_text(capsys.readouterr().out)
    recipe = yaml.safe_load(blocks(page, "yaml", section)[0])
    recipe["environment"]["command"][0] = sys.executable
    (tmp_path / "coin.yaml").write_text(yaml.safe_dump(recipe))
    commands = blocks(page, "shell", section)[1].splitlines()

    for command in commands:
        result = CliRunner().invoke(app, shlex.split(command)[1:])
        assert result.exit_code == 0, (command, result.output)

    assert [each.split()[1] for each in commands] == ["evaluate", "run", "inspect"]
    counts = json.loads((tmp_path / "runs/coin/manifest.json").read_text())["stages"]["credit"]["counts"]
    assert counts["asked"] == 32
    assert counts["trained"] >= 8
    assert list((tmp_path / "runs/coin/checkpoints").glob("ppo-clip*"))
