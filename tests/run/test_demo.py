"""What comes with the package: the policy `tiny-agent`, and the recipe `demo` that starts from it."""

import hashlib
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from perturn.chat.model_names import PACKAGED, load_config, load_tokenizer
from perturn.cli import app
from perturn.config.recipe import read_recipe
from perturn.run.execute import open_run
from perturn.run.follow_up import planned
from perturn.run.score_recipe import learned_rules, scoring_recipe

FOLDER = PACKAGED["tiny-agent"]
LEAST, MOST = 0.3, 0.6


def perturn(*words):
    found = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return found.stdout


def test_the_packaged_policy_is_small_and_is_the_one_that_its_card_describes():
    """At most 4 MB; the digest and the recipe that the card names."""
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    digest = hashlib.sha256((FOLDER / "model.safetensors").read_bytes()).hexdigest()

    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 4_000_000
    assert re.findall(r"[0-9a-f]{64}", card) == [digest]
    assert "license: apache-2.0" in card
    assert load_config("tiny-agent").vocab_size == len(load_tokenizer("tiny-agent"))


def test_it_knows_every_word_of_its_games():
    """Of 50 held-out games no observation and no action of the expert has an unknown token."""
    from perturn.envs.alfworld.generated_games import ALFWorldLike

    tokenizer, world = load_tokenizer("tiny-agent"), ALFWorldLike()
    for task in world.tasks("valid_seen")[:50]:
        seen = [world.reset(task).text]
        for action in world.expert(task):
            seen += [f"Action: {action}", world.step(action).text]
        assert tokenizer.unk_token_id not in tokenizer(seen, add_special_tokens=False).input_ids


def test_it_is_scored_under_the_rules_that_it_was_trained_under():
    """In its own games; in others, and under rules that one names, it is a model like any other."""
    assert scoring_recipe("tiny-agent", "alfworld-like").protocol.name == "alfworld-lab"
    assert (
        scoring_recipe("tiny-agent", "alfworld-like", protocol="alfworld-eto").protocol.name == "alfworld-eto"
    )
    assert learned_rules("tiny-agent", "hotpotqa") is None
    assert learned_rules("smollm2-135m", "alfworld-like") is None


def test_a_run_keeps_digests_of_it(tmp_path):
    """So that a run goes on with the same weights, whatever a later version of the package carries."""
    words = ["name=one", f"output={tmp_path}", "evaluate.tasks.n=2"]
    with open_run(Path("demo"), words) as run:
        noted = run.manifest["inputs"]

    assert "model.safetensors" in json.dumps(noted["model.name"])


@pytest.mark.slow
def test_it_wins_a_third_to_two_thirds_of_its_games(tmp_path, monkeypatch):
    """200 games of rooms that it was trained in, and as many of other rooms; greedy."""
    monkeypatch.chdir(tmp_path)
    for split in ("valid_seen", "valid_unseen"):
        words = ("--model", "tiny-agent", "--environment", "alfworld-like", "--n", 200, "--split", split)
        found = json.loads(perturn("evaluate", *words, "--json", "evaluate.concurrency=100"))

        assert LEAST <= found["policies"][0]["success_rate"] <= MOST


def test_the_demo_is_two_recipes_that_start_from_it():
    """Online with a credit for each turn, and then pairs with tlm-DRE, on games that nobody trains on."""
    first, second = planned(read_recipe(Path("demo")))

    assert first.model.name == "tiny-agent"
    assert first.credit is not None
    assert second.align.loss == {"name": "tlm-dre"}
    assert {first.explore.tasks.split, second.explore.tasks.split} == {"train"}
    assert {first.evaluate.tasks.split, second.evaluate.tasks.split} == {"valid_seen"}


@pytest.mark.slow
def test_the_demo_runs_to_its_end(tmp_path, monkeypatch):
    """Two short iterations, and one on pairs; both runs have a score of the policy before and after, and a report."""
    monkeypatch.chdir(tmp_path)
    less = ["iterations=2", "evaluate.tasks.n=8", "evaluate.every=2", "then.iterations=1"]
    less += [f"{part}explore.per_iteration={tasks}" for part, tasks in (("", 4), ("then.", 8))]

    said = perturn("run", "demo", *less, "align.minibatches=2")

    for name, last in (("demo", "ppo-clip-002"), ("demo-then", "tlm-dre")):
        summary = json.loads((tmp_path / "runs" / name / "summary.json").read_text())
        assert [row["name"] for row in summary["policies"]] == ["base", last]
        assert f"runs/{name}/report.html" in said
