"""Credit igpo on HotpotQA: in the loop, again on stored episodes, in Python, and where there is no gold answer."""

import json
from dataclasses import replace
from math import isnan

import pytest
import torch
from torch.testing import assert_close
from typer.testing import CliRunner

from perturn import weigh
from perturn.chat.model_names import load_tokenizer
from perturn.cli import app
from perturn.config.recipe import read_recipe
from perturn.credit import CREDITS
from perturn.data.file_seals import read_manifest
from perturn.data.group_account import read_credits
from perturn.data.store import TrajectoryStore, read_trajectories
from perturn.errors import ConfigError, DataError
from perturn.group import groups_of
from perturn.methods.siop.answer_clusters import own_answers_of
from perturn.methods.siop.siop_credit import AnswerClusters
from perturn.policy.models import load_model
from perturn.quantities import compute
from perturn.quantities.answer import answers_of
from perturn.quantities.readers import Models, open_reader
from perturn.run.execute import check, open_run, run_stages
from perturn.run.stages.answer_form import answer_form
from perturn.training.credit_choice import make_credit
from perturn.traits import EnvironmentTraits
from support.weights import weights_of

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
rows: {{name: groups}}
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
        answer = answers_of(group, FORM, open_reader(str(model)), after_last=False)
        weights = CREDITS["igpo"]()(group, answer=answer)
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


@pytest.mark.slow
def test_the_clip_ranges_of_a2tgpo_go_from_the_gold_answer_to_the_loss(file, tiny_folder):
    """In the file of weights, in what is logged of training, in Python; and with 0 there are none anywhere."""
    run = open_run(file, ["credit.name=a2tgpo"])
    run_stages(run)

    episodes = list(read_trajectories(run.paths.trajectories("explore")))
    credit, expected = make_credit({"name": "a2tgpo"}), {}
    for group in groups_of(episodes):
        answer = answers_of(group, FORM, open_reader(str(tiny_folder)), after_last=False)
        expected |= zip([one.key for one in group], credit.clips(group, answer=answer), strict=True)
    rows = read_credits(run.paths.credit("a2tgpo", ""))
    trained = [row for row in rows if row.bin == "trained"]
    (logged,) = [json.loads(line) for line in run.paths.metrics("align").read_text().splitlines()][:1]
    direct = weigh(episodes, "a2tgpo", model=str(tiny_folder), answer=FORM)
    assert trained
    for row in rows:
        assert row.clip == pytest.approx(expected[row.key].tolist(), abs=1e-6)
        assert row.clip[-1] == 1.0
    assert len({row.clip[0] for row in trained}) > 1
    assert 0.7 < logged["clip/turn_1"] < 1.3
    assert logged["clip/turn_3-4"] == 1.0
    assert {one.trajectory.key: one.clip for one in direct} == {
        row.key: pytest.approx(row.clip, abs=1e-6) for row in rows
    }

    words = ["credit", str(run.folder), "credit.name=a2tgpo", "credit.clip_scale=0", "--as", "none"]
    said = CliRunner().invoke(app, [*words, "--json", "--against", "a2tgpo"], catch_exceptions=False)
    assert said.exit_code == 0, said.output
    none = read_credits(run.paths.credit("none", ""))
    assert [row.clip for row in none] == [None] * 6
    assert [row.weight for row in none] == [pytest.approx(row.weight, abs=1e-6) for row in rows]
    assert "clip" not in run.paths.credit("none", "").read_text()
    shown = CliRunner().invoke(
        app, ["inspect", str(run.folder), "--model", str(tiny_folder)], catch_exceptions=False
    )
    assert shown.exit_code == 0, shown.output


@pytest.mark.slow
def test_in_python_the_form_of_an_answer_is_given(file, tiny_folder):
    """`weigh` has no recipe to take it from; it gives what the stage gives."""
    run = open_run(file, [])
    run_stages(run, names={"explore"})
    episodes = list(read_trajectories(run.paths.trajectories("explore")))
    expected = expected_of(episodes, tiny_folder)

    found = weights_of(episodes, "igpo", model=str(tiny_folder), answer=FORM)
    model, tokenizer = load_model(str(tiny_folder)), load_tokenizer(str(tiny_folder))
    again = weights_of(episodes, "igpo", model=model, tokenizer=tokenizer, answer=FORM)

    for one, weight, other in zip(episodes, found, again, strict=True):
        assert_close(weight, expected[one.key], atol=1e-6, rtol=0)
        assert torch.equal(weight, other)
    with pytest.raises(
        ConfigError, match=r"model is missing, and credit .* reads the policy that acted; give model="
    ):
        weights_of(episodes, "igpo", answer=FORM)
    for form in (None, "finish"):
        with pytest.raises(
            ConfigError, match=r"answer must be the text of a turn .* 'Action: finish\[{answer}\]'"
        ):
            weights_of(episodes, "igpo", model=str(tiny_folder), answer=form)
    bare = [replace(one, task=replace(one.task, data={})) for one in episodes]
    with pytest.raises(DataError, match="has no gold answer"):
        weights_of(bare, "igpo", model=str(tiny_folder), answer=FORM)


@pytest.mark.parametrize(("name", "reads"), [("igpo", False), ("a2tgpo", False), ("igpo-last", True)])
def test_after_the_last_turn_is_asked_for_credits_that_read_it(answered, tiny_folder, name, reads):
    credit = make_credit({"name": "igpo", "last_gain": True} if reads else {"name": name})
    source = Models({"acted": open_reader(str(tiny_folder))}, FORM)
    found = compute(credit.needs, answered, source)["answer"].entries

    assert [isnan(each[-1]) for each in found] == [not reads] * len(answered)
    assert not any(isnan(value) for each in found for value in each[:-1])


def test_an_answer_is_written_as_the_protocol_writes_actions(file):
    """With a thought where there is one. Tool calls are refused."""
    action = ["protocol={name: mine, format: action, system: Ask., max_turns: 3}"]
    tools = ["protocol={name: mine, format: tools, system: Ask., max_turns: 3}"]

    assert answer_form(read_recipe(file)) == FORM
    assert answer_form(read_recipe(file, action)) == "Action: finish[{answer}]"
    with pytest.raises(
        ConfigError,
        match=r"protocol\.format must be react or action .* answers, got 'tools'\. Or use a credit",
    ):
        answer_form(read_recipe(file, tools))


def test_an_environment_without_answers_is_refused_before_work(file, own_environment, monkeypatch):
    """One that does not say how they are given, then one whose tasks have none."""
    words = ["environment={name: 'own_environment:GuessNumber'}", "explore.tasks={split: train, n: 2}"]
    recipe = read_recipe(file, words)
    with pytest.raises(
        ConfigError,
        match=r"answer_action of environment 'own_environment:GuessNumber' must be a text with .*, got None",
    ):
        check(recipe)

    monkeypatch.setattr(
        own_environment.GuessNumber, "traits", EnvironmentTraits(answer_action="{answer}"), raising=False
    )
    with pytest.raises(
        DataError, match=r"task 'guess/\d' has no gold answer: expected a text in data\['answer'\]"
    ):
        check(recipe)
    check(read_recipe(file, [*words, "credit.name=rloo"]))


def test_training_alone_computes_no_likelihood(train_rows, file):
    """Rows without weights are refused, for a trainer has no gold answer to ask for."""
    with pytest.raises(
        ConfigError, match="credit IGPO needs answer, which training does not provide; give rows"
    ):
        train_rows()


@pytest.fixture
def train_rows(file, make_trainer):
    """Train on the episodes of the recipe by the credit."""
    run = open_run(file, [])
    run_stages(run, names={"explore"})
    episodes = list(read_trajectories(run.paths.trajectories("explore")))
    return lambda: make_trainer(episodes, loss={"name": "ppo-clip"}, credit="igpo")


ENDS = ["finish[Paris]", "finish[paris!]", "finish[Rome]", "search[Rome]", "finish[]", "finish[Paris]"]


@pytest.fixture
def answered(file):
    """Six explored episodes that end in the ways of ENDS, in tokens as they were sampled."""
    run = open_run(file, [])
    run_stages(run, names={"explore"})

    def ended(turn, end):
        action = replace(turn.action, text=f"Thought: so.\nAction: {end}")
        return replace(turn, valid=True, action=action)

    played = read_trajectories(run.paths.trajectories("explore"))
    return [
        replace(one, turns=(*one.turns[:-1], ended(one.turns[-1], end)))
        for one, end in zip(sorted(played, key=lambda each: each.key), ENDS, strict=True)
    ]


def test_own_answers_are_asked_for_as_gold_ones_are(answered, tiny_folder):
    """Clusters are counted within a task, and the likelihoods are those of gold answers of the same text."""
    given = own_answers_of(answered, AnswerClusters(), FORM, open_reader(str(tiny_folder)))

    assert [one.cluster for one in given] == [0, 0, 1, -1, -1, 0]
    assert [len(one.logprobs[0]) for one in given] == [2, 2, 1, 0, 0, 1]
    for index, k, text in [(0, 0, "Paris"), (1, 1, "paris!"), (2, 0, "Rome"), (5, 0, "Paris")]:
        one = answered[index]
        gold = replace(one, task=replace(one.task, data={**one.task.data, "answer": text}))
        (alone,) = answers_of([gold], FORM, open_reader(str(tiny_folder)))
        assert [each[k] for each in given[index].logprobs] == pytest.approx(alone, abs=1e-5)


def test_with_the_gold_answer_alone_gains_are_those_of_igpo(answered, tiny_folder):
    """Where everybody's outcome is the bonus; 1e-3 for the 1e-8 beside likelihoods of 1e-4 or less."""
    even = [
        replace(one, total_reward=0.5, turns=tuple(replace(turn, reward=0.0) for turn in one.turns))
        for one in answered
    ]
    igpo = {"name": "igpo", "gain": "logprob", "last_gain": True, "normalize": "mean"}
    siop = {"name": "siop", "reference": "gold", "normalize": "mean"}

    found, expected = (
        weights_of(even, credit, model=str(tiny_folder), answer=FORM) for credit in (siop, igpo)
    )

    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, atol=1e-3, rtol=0)
        assert one.abs().max() > 0.02


@pytest.mark.slow
def test_the_loop_needs_no_gold_answer(answered, file, tiny_folder):
    """Weighed and trained on by the stages of a run, and again by the command; tasks have no answer."""
    run = open_run(file, ["name=own", "credit.name=siop"])
    stored = run.paths.trajectories("explore")
    bare = [replace(one, task=replace(one.task, data={"question": "?"})) for one in answered]
    with run.stage("explore", stored), TrajectoryStore(stored) as store:
        for one in bare:
            store.append(one)
    run_stages(run)

    rows = {row.key: row for row in read_credits(run.paths.credit("siop", ""))}
    for group in groups_of(bare):
        needed = own_answers_of(group, AnswerClusters(), FORM, open_reader(str(tiny_folder)))
        for one, weight in zip(group, CREDITS["siop"]()(group, answer_clusters=needed), strict=True):
            assert rows[one.key].weight == pytest.approx(weight.tolist(), abs=1e-5)
    assert {row.bin for row in rows.values()} == {"trained"}
    words = ["credit", str(run.folder), "credit.name=siop", "credit.members=1", "--as", "one", "--json"]
    said = CliRunner().invoke(app, [*words, "--against", "siop"], catch_exceptions=False)
    assert said.exit_code == 0, said.output
    (one,) = json.loads(said.stdout)["iterations"]
    assert one["against"]["turns"] == 18
    for section in ("credit.name=igpo", "credit.reference=gold credit.name=siop"):
        said = CliRunner().invoke(app, ["credit", str(run.folder), *section.split()])
        assert said.exit_code != 0
        assert "has no gold answer" in str(said.exception)


def test_before_work_it_is_asked_how_answers_are_given(file, own_environment, monkeypatch):
    """The gold answer only where it is the reference."""
    words = ["environment={name: 'own_environment:GuessNumber'}", "explore.tasks={split: train, n: 2}"]
    with pytest.raises(ConfigError, match=r"answer_action .* must be a text with \{answer\}.* got None"):
        check(read_recipe(file, [*words, "credit={name: siop}"]))

    monkeypatch.setattr(
        own_environment.GuessNumber, "traits", EnvironmentTraits(answer_action="{answer}"), raising=False
    )
    check(read_recipe(file, [*words, "credit={name: siop}"]))
    with pytest.raises(DataError, match="has no gold answer"):
        check(read_recipe(file, [*words, "credit={name: siop, reference: gold}"]))
    with pytest.raises(ConfigError, match="no_module:same"):
        check(read_recipe(file, [*words, "credit={name: siop, same: 'no_module:same'}"]))
