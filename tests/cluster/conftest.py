"""A cluster of several nodes on this machine, a world and a recipe."""

import gc
from collections import Counter

import pytest

from cluster import nodes as helpers
from cluster.nodes import STEPS, Nodes


@pytest.fixture(scope="session")
def whole_cluster():
    nodes = Nodes()
    yield nodes
    nodes.close()


@pytest.fixture
def nodes(whole_cluster):
    """A cluster without nodes, and this process not connected to it."""
    ray = pytest.importorskip("ray")
    ray.cloudpickle.register_pickle_by_value(helpers)
    yield whole_cluster
    ray.cloudpickle.unregister_pickle_by_value(helpers)
    ray.shutdown()
    whole_cluster.clear()
    gc.collect()


@pytest.fixture
def steps(tmp_path):
    """Section of a world that traces its resets, and a function that counts them by task."""
    (tmp_path / "steps.py").write_text(STEPS)
    trace = tmp_path / "trace"

    def resets():
        return Counter(line.split()[0] for line in trace.read_text().splitlines())

    return {"name": f"{tmp_path / 'steps.py'}:Steps", "trace": str(trace), "pause": 0.1}, resets


@pytest.fixture
def recipe(tmp_path, tiny_folder, steps):
    """A recipe whose base policy is to be evaluated."""
    section, _ = steps
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE.format(model=tiny_folder, environment=section | {"pause": 0.0}))
    return file


RECIPE = """
name: whole
model: {{name: "{model}", dtype: float32}}
environment: {environment}
protocol: {{name: tiny, format: action, system: Walk., max_turns: 3}}
sft: {{loss: {{name: sft}}}}
align: {{loss: {{name: dpo}}}}
evaluate:
  tasks: {{split: train}}
  sampling: {{temperature: 1.0, max_new_tokens: 8}}
  concurrency: 3
"""
