"""What an import brings with it."""

import subprocess
import sys

import pytest

from perturn.config.parsing import parse
from perturn.config.recipe import Recipe
from perturn.data.run_folder import Run

HEAVY = ("torch", "transformers", "trl", "peft", "matplotlib", "openai", "datasets", "ray")


@pytest.mark.parametrize(
    "module",
    [
        "perturn",
        "perturn.cli",
        "perturn.cluster",
        "perturn.envs.world_child",
        "perturn.data.store",
        "perturn.watch",
        "perturn.report",
        "perturn.audit",
        "perturn.engines.vllm.settings",
        "perturn.engines.local.settings",
        "perturn.chat.tokens",
        "perturn.run.stages.collect_stage",
        "perturn.run.stages.row_stage",
        "perturn.run.stages.evaluate_stage",
        "perturn.run.recipe_template",
    ],
)
def test_light_modules_bring_no_heavy_library(module):
    """`perturn --help` answers, and a world starts, without torch."""
    program = f"import sys, {module}; print(*[name for name in {HEAVY} if name in sys.modules])"

    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )

    assert found.stdout.split() == []


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("perturn.cli", "yaml pydantic numpy scipy plotly importlib.metadata perturn.config.recipe"),
        ("perturn.run.execute", "scipy.stats scipy.optimize plotly perturn.report.report_page pyarrow"),
        ("perturn.report", "scipy.stats scipy.optimize plotly perturn.report.report_page pyarrow"),
        (
            "perturn.run.stages.model_checks",
            "transformers.trainer datasets pandas trl peft perturn.losses perturn.credit",
        ),
        ("perturn.engines.local.engine", "transformers.trainer datasets pandas trl peft"),
        ("perturn.extend", "filelock numpy scipy psutil perturn.data.store"),  # another trainer may lack them
    ],
)
def test_a_module_brings_no_library_that_its_commands_do_not_use(module, absent):
    """`--help` needs typer alone; a score needs neither a trainer, nor the report's figures, nor data sets."""
    program = f"import sys, {module}; print(*[name for name in {absent.split()} if name in sys.modules])"

    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )

    assert found.stdout.split() == []


COMMAND = """
import sys
from perturn.cli import main

try:
    main()
except SystemExit as end:
    assert not end.code, end.code
print("brought:", *[name for name in {heavy} if name in sys.modules], file=sys.stderr)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run folder in which one stage is done."""
    kinds = {"environment": {"name": "none"}, "protocol": {"name": "none"}, "model": {"name": "none"}}
    training = {"sft": {"loss": {"name": "sft"}}, "align": {"loss": {"name": "tlm-dre"}}}
    where = {"name": "one", "output": str(tmp_path_factory.mktemp("runs"))}
    with Run(parse(Recipe, kinds | training | where)) as run, run.stage("expert"):
        pass
    return run.folder


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["report"],
        ["watch", "--once"],
        ["list", "environments"],
        ["list", "engines"],
        ["list", "protocols"],
        ["list", "recipes"],
    ],
    ids=" ".join,
)
def test_commands_that_look_bring_no_torch(folder, words):
    """Reading a run and listing take a second, not ten.

    `inspect` and `list losses` are none of these: a tokenizer of transformers brings torch by itself, and losses are
    made of tensors.
    """
    if words[0] in ("report", "watch"):
        words = [words[0], str(folder), *words[1:]]
    program = COMMAND.replace("{heavy}", repr(HEAVY))

    found = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=120, check=True
    )

    assert found.stderr.splitlines()[-1] == "brought:"


@pytest.mark.slow
def test_a_score_brings_no_trainer(tmp_path, monkeypatch):
    """A score also checks whether a credit reads a distance, which only a recipe that trains needs losses for."""
    monkeypatch.chdir(tmp_path)
    heavy = ["transformers.trainer", "datasets", "pandas", "perturn.losses", "perturn.training"]
    program = COMMAND.replace("{heavy}", repr(heavy))
    words = [
        "evaluate",
        "--model",
        "tiny-agent",
        "--environment",
        "alfworld-like",
        "--n",
        "1",
        "protocol.max_turns=1",
    ]

    found = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=120, check=True
    )

    assert found.stderr.splitlines()[-1] == "brought:"


def test_the_trainer_is_found_in_the_package():
    """Names that are loaded when they are asked for."""
    import perturn

    assert perturn.TurnConfig.__module__ == "perturn.training.turn_config"
    assert perturn.TurnTrainer.__module__ == "perturn.training.turn_trainer"
    with pytest.raises(AttributeError, match="has no attribute 'TurnTrane'"):
        perturn.TurnTrane  # noqa: B018
