"""The whole loop on agents: explored, credited, trained and scored; killed, and resumed."""

import json
import os
import signal
import time

import psutil
import pytest
import yaml

from perturn.config.parsing import parse
from perturn.config.recipe import Recipe
from perturn.data.store import read_trajectories
from perturn.errors import ConfigError
from perturn.run.execute import check
from perturn.serve import Endpoint
from perturn.types import OPENS, Action, failed
from support.loop import finish, make_place
from support.processes import Started

from .playing import HERE, Scripted, agents, played

RECIPE = f"""
name: agents
output: runs
model: {{name: tiny, dtype: float32}}
environment:
  name: agent
  tasks: {{train: train.jsonl, test: test.jsonl}}
  command: [python, {HERE / "letter_agent.py"}]
iterations: 2
explore:
  samples: 4
  sampling: {{temperature: 1.0, max_new_tokens: 4}}
  concurrency: 4
rows: {{name: groups}}
credit: {{name: rloo}}
align:
  loss: {{name: ppo-clip}}
  learning_rate: 3.0e-3
  scheduler: constant
  warmup_ratio: 0
evaluate:
  tasks: {{split: test}}
  sampling: {{max_new_tokens: 4}}
  every: 2
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_folder):
    """A folder with a policy, a recipe, three tasks to explore, one of which crashes, and one to be scored on."""
    place = make_place(tmp_path_factory.mktemp("agents"), tiny_folder)
    (place / "agents.yaml").write_text(RECIPE)
    for name, ids in (("train", ["a", "b", "bad"]), ("test", ["c"])):
        (place / f"{name}.jsonl").write_text("".join(json.dumps({"id": each}) + "\n" for each in ids))
    return place


def begin(place, name, pause=0.0):
    """Begin the run as a process of its own."""
    environment = os.environ | {"PERTURN_CACHE": str(place / "cache"), "AGENT_PAUSE": str(pause)}
    return Started(["run", "agents.yaml", f"name={name}"], place, environment)


def bins(run):
    """The account of each iteration: how many episodes were asked for, and those in each bin."""
    stages = json.loads((run / "manifest.json").read_text())["stages"]
    counts = [stages[f"credit-00{iteration}"]["counts"] for iteration in (1, 2)]
    names = ("trained", "no_spread", "failed", "filtered")
    return [(each["asked"], [each.get(name, 0) for name in names]) for each in counts]


def recorded(file):
    """Episodes in a file."""
    return file.read_text().count("\n") if file.exists() else 0


def stop(place, name, kind, episodes):
    """Signal the run once so many more episodes are recorded; their file, the children of the run, and those left."""
    file = place / "runs" / name / "trajectories" / "explore-001.jsonl"
    wanted = recorded(file) + episodes
    process = begin(place, name, pause=0.5)
    while recorded(file) < wanted:
        assert process.poll() is None
        time.sleep(0.02)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(kind)
    process.communicate()
    _, left = psutil.wait_procs(family, timeout=60)
    return file, family, [one for one in left if one.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGINT])
def test_a_run_of_agents_is_killed_and_resumed(place, kind):
    """It is killed while agents play: they end with it, and no episode is lost or played twice after that."""
    name = kind.name
    file, family, left = stop(place, name, kind, 2)
    kept, run = file.read_text().splitlines()[:2], place / "runs" / name

    finish(begin(place, name))

    assert family
    assert left == []
    explored = list(read_trajectories(file))
    assert file.read_text().splitlines()[:2] == kept
    assert sorted(one.key for one in explored) == [(task, n) for task in ("a", "b", "bad") for n in range(4)]
    assert {one.key[0] for one in explored if failed(one)} == {"bad"}
    assert all([turn.follows for turn in one.turns] == [None, OPENS, 0] for one in explored)
    assert [(asked, sum(each), each[2]) for asked, each in bins(run)] == [(12, 12, 4)] * 2
    summary = json.loads((run / "summary.json").read_text())
    assert [row["n"] for row in summary["policies"]] == [1, 1]
    assert "sequences" in (run / "report.html").read_text()


@pytest.mark.slow
def test_a_run_of_agents_is_killed_at_many_moments(place):
    """By two signals in turn, each as soon as a further episode is recorded, until the last is."""
    kinds, file = [signal.SIGINT, signal.SIGKILL], None
    while file is None or recorded(file) < 12:
        file, _, left = stop(place, "often", kinds[0], 1)
        assert left == []
        kinds.reverse()

    finish(begin(place, "often"))

    explored = list(read_trajectories(file))
    assert sorted(one.key for one in explored) == [(task, n) for task in ("a", "b", "bad") for n in range(4)]
    assert [(asked, sum(each), each[2]) for asked, each in bins(place / "runs" / "often")] == [
        (12, 12, 4)
    ] * 2


TLM_DRE = {
    "rows": {"name": "expert-pairs", "threshold": 0.2},
    "credit": None,
    "iterations": None,
    "deterministic": True,
    "sft": {"loss": {"name": "sft"}, "epochs": 1, "learning_rate": 1e-4, "warmup_ratio": 0},
    "align": {"loss": {"name": "tlm-dre"}, "epochs": 1, "learning_rate": 1e-4, "warmup_ratio": 0},
    "evaluate": {"tasks": {"split": "test"}, "sampling": {"max_new_tokens": 4}},
}
"""What a recipe of pairs changes of the other recipe."""


@pytest.mark.slow
def test_an_expert_teaches_an_agent_and_tlm_dre_learns_from_pairs(place, monkeypatch):
    """The expert is a model behind an API; the program crashes on one task of three. Two runs explore the same."""
    recipe = {**yaml.safe_load(RECIPE), **TLM_DRE}
    with Endpoint(Scripted(lambda prompt: Action("apple"))) as endpoint:
        monkeypatch.setenv("EXPERT_API_KEY", endpoint.key)
        recipe["environment"]["expert"] = {
            "model": "strong",
            "base_url": endpoint.url(),
            "api_key_env": "EXPERT_API_KEY",
        }
        (place / "agents.yaml").write_text(yaml.safe_dump({k: v for k, v in recipe.items() if v is not None}))
        for name in ("first", "second"):
            finish(begin(place, name))
    (place / "agents.yaml").write_text(RECIPE)

    first, second = (place / "runs" / name for name in ("first", "second"))
    shown = {one.key[0]: one for one in read_trajectories(first / "trajectories" / "expert.jsonl")}
    assert [turn.action.text for turn in shown["a"].turns] == ["apple"] * 3
    assert (shown["a"].total_reward, shown["a"].success, failed(shown["bad"])) == (1.0, True, True)
    explored, again = (
        list(read_trajectories(run / "trajectories" / "explore.jsonl")) for run in (first, second)
    )
    ids = [
        {one.key: [turn.action.token_ids for turn in one.turns] for one in each} for each in (explored, again)
    ]
    assert ids[0] == ids[1]
    pairs = (first / "pairs.jsonl").read_text().splitlines()
    assert pairs
    assert (first / "pairs.jsonl").read_text() == (second / "pairs.jsonl").read_text()
    summary = json.loads((first / "summary.json").read_text())
    assert [row["name"] for row in summary["policies"]] == ["base", "sft", "tlm-dre"]


REFUSED = [
    ({"protocol": {"name": "agent", "suffix": "Hurry."}}, "protocol.suffix is set"),
    (
        {"worlds": {"processes": 2}},
        "worlds.processes is set, and each episode of agent starts its own processes",
    ),
    ({"worlds": {"pass_env": ["A_KEY", "B_KEY"]}}, r"write environment.pass_env=\[A_KEY, B_KEY\]"),
    ({"evaluate": {"tasks": {"split": "test"}, "turns": {"limit": 3}}}, "evaluate.turns tells a policy"),
    ({"credit": {"name": "matchtir"}}, "matchtir needs tool-matches, which asks the environment"),
]


@pytest.mark.parametrize(("changes", "said"), REFUSED, ids=[each[1][:20] for each in REFUSED])
def test_what_agents_cannot_do_is_refused_before_work(place, monkeypatch, changes, said):
    """In one line."""
    monkeypatch.chdir(place)
    recipe = {
        "name": "refused",
        "model": {"name": "tiny"},
        "environment": {"name": "agent", "tasks": "train.jsonl", "command": ["python", "x.py"]},
        "protocol": {"name": "agent"},
        "explore": {"samples": 2, "sampling": {"temperature": 1.0}},
        "rows": {"name": "groups"},
        "credit": {"name": "rloo"},
        "align": {"loss": {"name": "ppo-clip"}},
    }
    with pytest.raises(ConfigError, match=said):
        check(parse(Recipe, {**recipe, **changes}))


def test_a_seed_of_the_row_is_kept_and_generators_get_the_seed_of_the_episode(tmp_path):
    """The row's seed may name a world; two samples of it draw other numbers."""
    (tmp_path / "seeded.py").write_text(
        "import os, random\n"
        "async def rollout(task, client):\n"
        "    said = f\"{task['seed']} {os.environ['PERTURN_SEED']} {random.random()}\"\n"
        "    posed = [{'role': 'user', 'content': said}]\n"
        "    await client.chat.completions.create(model='policy', messages=posed)\n"
        "    return 1.0\n"
    )
    rows = [{"id": "own", "seed": "world-7"}, {"id": "without"}]
    section = agents(tmp_path, rows, function=f"{tmp_path / 'seeded.py'}:rollout")

    found = played(section, samples=2)

    said = {key: one.turns[0].observation_text.split() for key, one in found.items()}
    seeds = {key: str(one.seed) for key, one in found.items()}
    assert {key: own for key, (own, *_) in said.items()} == {
        key: "world-7" if key[0] == "own" else seeds[key] for key in found
    }
    assert {key: given for key, (_, given, _) in said.items()} == seeds
    assert len({drawn for _, _, drawn in said.values()}) == 4
