"""A simulated user in a run: collected, resumed after a stop, and named by the score."""

import json

import pytest

import perturn
from engines.api.chat import KEY, Server, completion
from engines.serving import serve
from perturn.config.recipe import read_recipe
from perturn.data.store import read_trajectories
from perturn.errors import ConfigError, RunError
from perturn.report import summarize
from perturn.run.execute import open_run, run_stages
from support.shop import Shop

RECIPE = """
name: shop
model: {name: policy}
environment: {name: "support.shop:Shop"}
worlds: {processes: 0}
engine: &server {name: api, base_url: URL, max_retries: 3, concurrency: 1}
user: {model: customer, engine: *server, prompt: "Be brief. {instructions}"}
expert: {}
explore: {samples: 2, sampling: {temperature: 1.0, max_new_tokens: 4}, concurrency: 1}
evaluate: {tasks: {split: test, n: 2}}
"""


@pytest.fixture
def server(monkeypatch):
    """A policy that sells apples, and a customer who wants some fruit."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")

    def reply(body, number):
        return completion("Some fruit." if body["model"] == "customer" else "sell apple")

    state = Server(reply=reply)
    with serve(state.answer) as address:
        state.url = f"{address}/v1"
        yield state


@pytest.fixture
def do(server, tmp_path, monkeypatch):
    """Do stages of the recipe in this process; the run's folder, and what the customer was asked."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shop.yaml").write_text(RECIPE.replace("URL", server.url))

    def do(*words, command="collect"):
        server.bodies.clear()
        with open_run(tmp_path / "shop.yaml", words, command) as run:
            run_stages(run, command)
        return tmp_path / "runs/shop", [body for body in server.bodies if body["model"] == "customer"]

    return do


def test_a_customer_is_played_by_its_model_and_for_the_expert_by_the_script(do):
    """Two tasks, two samples: the apple is sold, the pear is not."""
    run, asked = do()

    explored = list(read_trajectories(run / "trajectories/explore.jsonl"))
    expert = list(read_trajectories(run / "trajectories/expert.jsonl"))
    assert sorted(one.total_reward for one in explored) == [0.0, 0.0, 1.0, 1.0]
    assert {turn.user_said for one in explored for turn in one.turns} == {("Some fruit.",)}
    assert {one.total_reward for one in expert} == {1.0}
    assert {turn.user_said for one in expert for turn in one.turns} <= {
        ("I would like one apple.",),
        ("I would like one pear.",),
    }
    assert len(asked) == 4
    assert {body["messages"][0]["content"] for body in asked} <= {
        "Be brief. You want one apple.",
        "Be brief. You want one pear.",
    }
    assert {body["max_tokens"] for body in asked} == {256}
    assert len((run / "user/api.jsonl").read_text().splitlines()) == 4


def test_a_run_that_stopped_hears_the_same_words(do, server):
    """The account is empty after three questions; the two episodes that were played are not played again."""
    seen = []

    def reply(body, number):
        seen.append(body["model"])
        if len(seen) > 5:
            return 402, {"error": {"message": "no credit", "type": "t", "code": None}}
        return completion(f"Fruit {number}." if body["model"] == "customer" else "sell apple")

    server.reply = reply
    with pytest.raises(RunError, match="no credit"):
        do()
    before = list(read_trajectories("runs/shop/trajectories/explore.jsonl"))
    server.reply = lambda body, number: completion("Other." if body["model"] == "customer" else "sell apple")

    run, asked = do()

    after = list(read_trajectories(run / "trajectories/explore.jsonl"))
    assert before == after[: len(before)]
    assert len(before) == 2
    assert sum(one.turns[0].user_said == ("Other.",) for one in after) == len(asked) == 1


def test_collect_and_evaluate_take_a_user_and_a_judge(server):
    """The judge rates each episode 6 on a scale of 1 to 11, which is a reward of one half."""

    def reply(body, number):
        said = {"customer": "Some fruit.", "judge": "[[6]]"}
        return completion(said.get(body["model"], "sell apple"))

    server.reply = reply
    engine = {"name": "api", "base_url": server.url}
    user = {"model": "customer", "engine": engine}
    judge = {"model": "judge", "engine": engine, "rubric": "Is the fruit sold?", "scale": [1, 11]}
    others = {"engine": engine, "user": user, "judge": judge}

    explored = perturn.collect("policy", Shop, n=2, **others)
    shown = perturn.collect("expert", Shop, n=2, user=user)
    score = perturn.evaluate("policy", Shop, n=2, **others)

    assert {turn.user_said for one in explored for turn in one.turns} == {("Some fruit.",)}
    assert [one.total_reward for one in explored] == [0.5, 0.5]
    assert sorted(one.turns[0].environment_reward for one in explored) == [0.0, 1.0]
    assert ("Some fruit.",) not in {turn.user_said for one in shown for turn in one.turns}
    assert (score.n, score.mean_score) == (2, 0.5)
    assert (score.protocol["user"]["model"], score.protocol["judge"]["model"]) == ("customer", "judge")


def test_a_score_names_its_user(do):
    run, _ = do(command="evaluate")

    stamp = json.loads((run / "evaluation/protocol.json").read_text())
    assert stamp["user"]["model"] == "customer"
    assert stamp["user"]["prompt"] == "Be brief. {instructions}"


def test_a_user_without_an_engines_name_is_refused(do, tmp_path):
    with pytest.raises(ConfigError, match=r"engine\.name is missing"):
        read_recipe(tmp_path / "shop.yaml", ["user.engine={}"])


def test_a_users_missing_key_shows_before_work(do, monkeypatch):
    monkeypatch.delenv("OTHER_KEY", raising=False)
    with pytest.raises(ConfigError, match="OTHER_KEY must hold a key, and is not set"):
        do("user.engine.api_key_env=OTHER_KEY")


def test_several_episodes_of_each_task_tell_pass_hat_k(do):
    """The apple is sold each time and the pear never: half of the tasks, however many episodes must succeed."""
    run, _ = do("evaluate.samples=3", command="evaluate")

    (row,) = summarize(run)["policies"]
    assert (row["n"], row["success_rate"]) == (6, 0.5)
    assert {k: (each["mean"], each["n"]) for k, each in row["pass_hat"].items()} == {
        "1": (0.5, 2),
        "2": (0.5, 2),
        "3": (0.5, 2),
    }
    assert json.loads((run / "evaluation/protocol.json").read_text())["samples"] == 3


def test_samples_beside_a_selector_are_refused(do, tmp_path):
    words = ["evaluate.samples=2", "evaluate.select={name: outcome}"]
    with pytest.raises(ConfigError, match="samples are all scored, and select scores one of several"):
        read_recipe(tmp_path / "shop.yaml", words)
