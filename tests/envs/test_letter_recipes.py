"""Recipes with the papers' own settings pass `--dry-run`, with a tiny policy in place of 7 billion parameters."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest

from perturn.estimate.dry_run import make_plan

RECIPES = Path(__file__).parents[2] / "recipes"
ALFWORLD = (
    "alfworld_tlm-dre_llama-2-7b",
    "alfworld_tlm-dre_qwen2.5-7b",
    "alfworld_tlm-dre_gigpo-protocol",
    "alfworld_gigpo_qwen2.5-7b",
    "alfworld_dmpo",
)
SCIENCEWORLD = ("scienceworld_tlm-dre_llama-2-7b", "scienceworld_tlm-dre_qwen2.5-7b", "scienceworld_dmpo")


def steps(name, words, folder, tiny):
    """Names of the steps that the recipe would do."""
    model = [f"model.name={tiny}", "model.max_length=2048", f"output={folder / 'runs'}"]
    return [step.name for step in make_plan(RECIPES / f"{name}.yaml", [*model, *words], None).steps]


@pytest.mark.slow
@pytest.mark.parametrize("name", ALFWORLD)
def test_alfworld(name, tiny_folder, tmp_path):
    """On made-up games, which have the same rules and need no data."""
    found = steps(name, ["environment={name: alfworld-like}"], tmp_path, tiny_folder)

    assert ("sft" in found) == (name != "alfworld_gigpo_qwen2.5-7b")
    assert any(step.startswith("align") for step in found)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCIENCEWORLD)
def test_scienceworld(name, tiny_folder, tmp_path):
    if importlib.util.find_spec("scienceworld") is None or shutil.which("java") is None:
        pytest.skip("scienceworld or Java is not installed")

    assert "align" in steps(name, [], tmp_path, tiny_folder)


@pytest.mark.slow
def test_webshop(shop, tiny_folder, tmp_path):
    words = [f"environment.{key}={json.dumps(value)}" for key, value in shop.items()]

    assert "align" in steps(
        "webshop_dmpo", [*words, "evaluate.tasks={split: test, per_kind: 1}"], tmp_path, tiny_folder
    )
