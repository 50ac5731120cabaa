"""Credit igpo on HotpotQA: in the loop, again on stored episodes, in Python, and where there is no gold answer."""

import json
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close
from typer.testing import CliRunner

from perturn import assign_credit
from perturn.cli import app
from perturn.credit import CREDITS
from perturn.data.groups import groups_of, read_credits
from perturn.data.seals import read_manifest
from perturn.data.store import read_trajectories
from perturn.errors import ConfigError, DataError
from perturn.policy.models import load_model
from perturn.policy.names import load_tokenizer
from perturn.run.answers import answer_form
from perturn.run.loop import check, open_run, run_stages
from perturn.run.quantities import answers_of
from perturn.settings.recipe import read_recipe

RECIPE = """
name: asked
output: {output}
model: {{name: "{model}", dtype: float32, max_length: 2048}}
environment: {{name: hotpotqa, questions: {questions}, corpus: {corpus}}}
protocol: {{name: hotpotqa-react, max_turns: 3}}
explore:
  tasks: {{split: train, n: 2}}
  samples: 3
  sampling: {{temperature: 1.0, max_new_tokens: 4}}
groups: {{}}
credit: {{name: igpo}}
align: {{loss: {{name: ppo-clip}}, batch_size: 2}}
worlds: {{processes: 0}}
"""
FORM = "Thought: I know the answer.\nAction: finish[{answer}]"


@pytest.fixture
def file(tmp_path, wiki, tiny_folder, monkeypatch):
    """A recipe of one iteration by a tiny policy."""
    monkeypatch.setenv("PERTURN_CACHE", str(tmp_path / "cache"))
    found = tmp_path / "asked.yaml"
    settings = {"questions": json.dumps(wiki["questions"]), "corpus": json.dumps(wiki["corpus"])}
    found.write_text(RECIPE.format(output=tmp_path / "runs", model=tiny_folder, **settings))
    return found


def expected_of(episodes, model):
    """Weights by the credit itself, asked with likelihoods of a policy."""
    found = {}
    for group in groups_of(episodes):
        weights = CREDITS["igpo"]()(group, answer=answers_of(group, FORM, str(model)))
        found |= zip([one.key for one in group], weights, strict=True)
    return found


@pytest.mark.slow
def test_the_loop_asks_the_policy_that_acted(file, tiny_folder):
    """Explored, credited, trained; then weighed again by the same credit and by another, beside the run's own."""
    run = open_run(file, [])
    run_stages(run)

    episodes = list(read_trajectories(run.paths.trajectories("explore")))
    rows = read_credits(run.paths.credit("igpo", ""))
    expected = expected_of(episodes, tiny_folder)
    assert len(rows) == len(episodes) == 6
    assert {len(row.weight) for row in rows} == {3}
    assert any(row.bin == "trained" for row in rows)
    for row in rows:
        found = torch.tensor(row.weight, dtype=torch.float64)
        assert_close(found, expected[row.key], atol=1e-6, rtol=0)
    assert all(note["done"] for note in read_manifest(run.folder)["stages"].values())

    words = ["credit", str(run.folder), "credit.name=igpo", "credit.normalize=mean", "--as", "mean", "--json"]
    said = CliRunner().invoke(app, [*words, "--against", "igpo"], catch_exceptions=False)
    assert said.exit_code == 0, said.output
    (one,) = json.loads(said.stdout)["iterations"]
    assert one["file"] == "credits/mean.jsonl"
    assert one["against"]["turns"] == 18


def test_in_python_the_form_of_an_answer_is_given(file, tiny_folder):
    """`assign_credit` has no recipe to take it from; it gives what the stage gives."""
    run = open_run(file, [])
    run_stages(run, names={"explore"})
    episodes = list(read_trajectories(run.paths.trajectories("explore")))
    expected = expected_of(episodes, tiny_folder)

    found = assign_credit(episodes, "igpo", model=str(tiny_folder), answer=FORM)
    model, tokenizer = load_model(str(tiny_folder)), load_tokenizer(str(tiny_folder))
    again = assign_credit(episodes, "igpo", model=model, tokenizer=tokenizer, answer=FORM)

    for one, weight, other in zip(episodes, found, again, strict=True):
        assert_close(weight, expected[one.key], atol=1e-6, rtol=0)
        assert torch.equal(weight, other)
    with pytest.raises(ConfigError, match="reads the policy that acted; give model="):
        assign_credit(episodes, "igpo", answer=FORM)
    for form in (None, "finish"):
        with pytest.raises(
            ConfigError, match=r"give answer=, the text of a turn .* 'Action: finish\[{answer}\]'"
        ):
            assign_credit(episodes, "igpo", model=str(tiny_folder), answer=form)
    bare = [replace(one, task=replace(one.task, data={})) for one in episodes]
    with pytest.raises(DataError, match="has no gold answer"):
        assign_credit(bare, "igpo", model=str(tiny_folder), answer=FORM)


def test_an_answer_is_written_as_the_protocol_writes_actions(file):
    """With a thought where there is one. Tool calls are refused."""
    action = ["protocol={name: mine, format: action, system: Ask., max_turns: 3}"]
    tools = ["protocol={name: mine, format: tools, system: Ask., max_turns: 3}"]

    assert answer_form(read_recipe(file)) == FORM
    assert answer_form(read_recipe(file, action)) == "Action: finish[{answer}]"
    with pytest.raises(ConfigError, match=r"protocol\.format .tools. gives answers as tool calls"):
        answer_form(read_recipe(file, tools))


def test_an_environment_without_answers_is_refused_before_work(file, own_environment, monkeypatch):
    """One that does not say how they are given, then one whose tasks have none."""
    words = ["environment={name: 'own_environment:GuessNumber'}", "explore.tasks={split: train, n: 2}"]
    recipe = read_recipe(file, words)
    with pytest.raises(
        ConfigError, match=r"environment 'own_environment:GuessNumber' does not say how an answer is"
    ):
        check(recipe)

    monkeypatch.setattr(own_environment.GuessNumber, "answer_action", "{answer}", raising=False)
    with pytest.raises(
        DataError, match=r"task 'guess/\d' has no gold answer: expected a text in data\['answer'\]"
    ):
        check(recipe)
    check(read_recipe(file, [*words, "credit.name=rloo"]))


def test_training_alone_computes_no_likelihood(train_rows, file):
    """Rows without weights are refused, for a trainer has no gold answer to ask for."""
    with pytest.raises(
        ConfigError, match="credit IGPO needs answer, which training does not compute; give rows"
    ):
        train_rows()


@pytest.fixture
def train_rows(file, make_trainer):
    """Train on the episodes of the recipe by the credit."""
    run = open_run(file, [])
    run_stages(run, names={"explore"})
    episodes = list(read_trajectories(run.paths.trajectories("explore")))
    return lambda: make_trainer(episodes, loss={"name": "ppo-clip"}, credit="igpo")
