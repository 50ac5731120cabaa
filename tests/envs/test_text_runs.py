"""The recipes of HotpotQA and WebShop from end to end, with a tiny policy on invented data."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from perturn.cli import app
from perturn.data.store import read_pairs, read_trajectories
from perturn.errors import ConfigError, RunError
from perturn.run.execute import open_run, run_stages

RECIPES = Path(__file__).parents[2] / "recipes"
QUESTIONS = json.loads(Path(__file__).with_name("wiki").joinpath("questions.json").read_text())
EPISODES = [
    {
        "instruction": row["question"],
        "output": f"Thought: I search.\nAction: search[Sarn]\nObservation: An island.\n"
        f"Thought: I know.\nAction: finish[{row['answer']}]\nObservation: Episode finished\n",
    }
    for row in [*QUESTIONS, {"question": "Not asked here?", "answer": "x"}]
]


@pytest.fixture
def words(tmp_path, tiny_folder, monkeypatch):
    """What makes a recipe tiny."""
    monkeypatch.setenv("PERTURN_CACHE", str(tmp_path / "cache"))
    return [
        f"model.name={tiny_folder}",
        "model.max_length=2048",
        f"output={tmp_path / 'runs'}",
        "sft.epochs=1",
        "explore.sampling.max_new_tokens=4",
        "evaluate.sampling={max_new_tokens: 4}",
    ]


def setting(key, value):
    """A word of the command line."""
    return f"environment.{key}={json.dumps(value)}"


def asked(wiki):
    """The words that put the encyclopedia into the recipe."""
    task_lists = ["explore.tasks={split: train, per_kind: 1}", "evaluate.tasks={split: test, per_kind: 1}"]
    return [*task_lists, *(setting(key, value) for key, value in wiki.items())]


@pytest.mark.slow
def test_hotpotqa_is_taught_by_episodes_of_others(words, wiki, tmp_path):
    """They are imported once, carry the run's protocol, and are what pairs prefer; worlds in a process work too."""
    recipe, fireact = RECIPES / "hotpotqa_tlm-dre.yaml", tmp_path / "fireact.json"
    fireact.write_text(json.dumps(EPISODES))
    call = ["import-expert", str(fireact), str(recipe), *words, *asked(wiki)]

    first, second = (CliRunner().invoke(app, call, catch_exceptions=False) for _ in range(2))
    run = open_run(recipe, [*words, *asked(wiki), "worlds.processes=1"])
    run_stages(run)

    assert first.stdout.endswith("trajectories/expert.jsonl: 4 imported, 0 there before\n")
    assert second.stdout.endswith("trajectories/expert.jsonl: 0 imported, 4 there before\n")
    experts = list(read_trajectories(run.paths.trajectories("expert")))
    assert [(one.success, one.protocol, one.policy) for one in experts] == [
        (True, "hotpotqa-react-react", "recorded")
    ] * 4
    assert experts[0].prompt[1]["content"].startswith("Question: Which river")
    pairs = read_pairs(run.paths.pairs())
    assert [pair.chosen for pair in pairs] == [
        one for one in experts if one.task.id in {p.chosen.task.id for p in pairs}
    ]
    assert len(pairs) == 2
    assert all(
        one.environment.startswith("hotpotqa-1-f1-best-")
        for one in read_trajectories(run.paths.evaluation("base"))
    )


def test_episodes_on_other_questions_are_refused(words, wiki, tmp_path):
    """And environments that read none."""
    from perturn.run.stages.collect_stage import import_expert

    fireact = tmp_path / "fireact.json"
    fireact.write_text(json.dumps(EPISODES[-1:]))
    run = open_run(RECIPES / "hotpotqa_tlm-dre.yaml", [*words, *asked(wiki)], "collect")

    with pytest.raises(
        ConfigError, match=r"no episode is on one of the 4 tasks of sft\.tasks and explore\.tasks"
    ):
        import_expert(run, fireact)


@pytest.mark.slow
def test_webshop_is_taught_by_its_buyer(words, shop, tmp_path):
    """Whose episodes all succeed."""
    from perturn.run.stages.collect_stage import import_expert

    given = [*words, "evaluate.tasks={split: test, per_kind: 1}", *(setting(*item) for item in shop.items())]
    run = open_run(RECIPES / "webshop_tlm-dre.yaml", given)

    run_stages(run)

    experts = list(read_trajectories(run.paths.trajectories("expert")))
    assert [(one.success, one.protocol) for one in experts] == [(True, "webshop-eto-react")] * 4
    assert len(read_pairs(run.paths.pairs())) == 4
    fireact = tmp_path / "fireact.json"
    fireact.write_text(json.dumps(EPISODES))
    with pytest.raises(RunError, match=r"expert\.jsonl is finished, so nothing can be added"):
        import_expert(run, fireact)  # conversations, which any environment takes while its expert is not done
