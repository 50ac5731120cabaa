"""The examples of frameworks: each is played, trained once as it stands, and its traffic is accounted for."""

import json
import os
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from perturn.cli import app
from perturn.data.store import read_trajectories
from support.docs import blocks

ROOT = Path(__file__).parents[2]
BROKEN = {"smolagents_tools": {"system prompt changed": 8}, "openai_agents": {}, "langgraph_tools": {}}
"""What breaks the 8 conversations of a framework: smolagents asks for a last answer under another system prompt."""


def python_of(package):
    """The interpreter that has a framework: this one, or for LangGraph that of PERTURN_LANGGRAPH_PYTHON."""
    if package != "langgraph":
        pytest.importorskip(package)
        return sys.executable
    if (found := os.environ.get("PERTURN_LANGGRAPH_PYTHON")) is None:
        pytest.skip("set PERTURN_LANGGRAPH_PYTHON to a Python with langgraph and langchain-openai")
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("smolagents_tools", "smolagents"),
        ("openai_agents", "agents.models"),
        ("langgraph_tools", "langgraph"),
    ],
)
def test_an_agent_of_a_framework_is_trained_once(name, package, tmp_path, monkeypatch):
    """By the recipe of the page, with 2 tasks of 4 samples each."""
    python = python_of(package)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PERTURN_CACHE", str(tmp_path / "cache"))
    program = ROOT / f"examples/agents/{name}.py"
    recipe = yaml.safe_load(blocks("docs/how-to/agents.md", "yaml", "## From a program")[0])
    recipe["environment"] |= {
        "command": [python, str(program)],
        "tasks": str(program.parent / "tasks.jsonl"),
    }
    recipe["explore"]["tasks"]["n"] = recipe["evaluate"]["tasks"]["n"] = 2
    recipe["protocol"]["max_turns"] = 8
    (tmp_path / "coin.yaml").write_text(yaml.safe_dump(recipe))

    ran = CliRunner().invoke(app, ["run", "coin.yaml"])
    checked = CliRunner().invoke(app, ["inspect", "runs/coin", "--check", "--json"])

    assert (ran.exit_code, checked.exit_code) == (0, 0), ran.output + checked.output
    episodes = read_trajectories(tmp_path / "runs/coin/trajectories/explore.jsonl")
    assert [each.error for each in episodes] == [None] * 8
    assert list((tmp_path / "runs/coin/checkpoints").glob("ppo-clip*"))
    assert len(program.read_text().splitlines()) <= 40
    traffic = json.loads(checked.stdout)["parts"]["explored"]["traffic"]
    assert traffic["broken"] == BROKEN[name]
    assert traffic["turns"] == traffic["append_only"] + sum(BROKEN[name].values())
