"""Whole runs with the API engine, through the command line."""

import itertools
import json
import logging
from pathlib import Path

import pytest

from engines.api.chat import KEY, completion, refusal
from perturn.cli import main
from perturn.data.store import read_trajectories
from perturn.types import Status

ROOT = Path(__file__).parents[3]

RECIPE = """
name: one
output: {output}
model: {{name: teacher-1}}
engine: {{name: api, base_url: "{url}", max_retries: 1}}
environment: {{name: "{world}"}}
worlds: {{processes: 0}}
protocol: {{name: tiny, format: react, system: Guess., max_turns: 6}}
explore: {{tasks: {{split: test}}}}
evaluate: {{tasks: {{split: train}}, concurrency: 2}}
"""


WORLD = ROOT / "examples" / "own_environment.py:GuessNumber"


TRAINED = "sft: {loss: {name: sft}}\nalign: {loss: {name: tlm-dre}}\n"


def bisect(body, number):
    """A policy that halves what is left of 1 to 12; it knows nothing but the conversation it is sent."""
    low, high = 1, 12
    for said, told in itertools.pairwise(body["messages"]):
        if said["role"] == "assistant":
            guess = int(said["content"].rpartition(" ")[2])
            low, high = (guess + 1, high) if told["content"] == "higher" else (low, guess - 1)
    return completion(f"Thought: between {low} and {high}\nAction: {(low + high) // 2}")


@pytest.fixture
def recipe(tmp_path, server):
    """A recipe that evaluates a model of the server."""
    server.reply = bisect
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE.format(output=tmp_path / "runs", url=server.url, world=WORLD))
    return file


@pytest.fixture
def perturn(monkeypatch, capsys):
    """Call the command line in this process: (exit code, what it printed)."""

    def call(*words):
        monkeypatch.setattr("sys.argv", ["perturn", *map(str, words)])
        with pytest.raises(SystemExit) as caught:
            main()
        printed = capsys.readouterr()
        return caught.value.code or 0, printed.out + printed.err

    return call


def played(file):
    """What was recorded, by key."""
    found = list(read_trajectories(file))
    assert len({one.key for one in found}) == len(found)
    return {one.key: one for one in found}


def test_evaluate_scores_the_servers_model(recipe, perturn, server, tmp_path):
    """No tokenizer and no weights: there is no model of that name here. Halving finds 1 to 8 in four guesses."""
    code, printed = perturn("evaluate", recipe)

    assert code == 0, printed
    found = played(tmp_path / "runs" / "one" / "evaluation" / "base.jsonl")
    assert len(found) == 8
    assert all(one.success and one.policy == "teacher-1@127.0.0.1" for one in found.values())
    assert max(len(one.turns) for one in found.values()) == 4
    assert {tuple(body["stop"]) for body in server.bodies} == {("\nObservation:",)}


def test_replaced_parameters_of_requests_are_recorded_with_the_score(recipe, perturn, server, tmp_path):
    """Without a temperature, the server's default decides, so the score is not greedy."""
    code, printed = perturn("evaluate", recipe, "engine.request={temperature: null, top_k: 5}")

    assert code == 0, printed
    stamp = json.loads((tmp_path / "runs/one/evaluation/protocol.json").read_text())
    assert stamp["request"] == {"temperature": None, "top_k": 5}
    assert all("temperature" not in body and body["top_k"] == 5 for body in server.bodies)


def test_the_most_frequent_of_a_servers_actions_is_taken(recipe, perturn, server, tmp_path):
    """Two of three halve, each with a thought of its own; the first of all, which does not, is never taken."""
    first = {}

    def split(body, number):
        plain = first.setdefault(json.dumps(body["messages"]), body["seed"]) == body["seed"]
        return completion("Thought: so\nAction: 1") if plain else bisect(body, number)

    server.reply = split
    words = [
        "evaluate.sampling.temperature=1.0",
        "evaluate.select={name: frequency, among: actions, samples: 3}",
        "engine.concurrency=1",
    ]

    code, printed = perturn("evaluate", recipe, *words)

    assert code == 0, printed
    found = played(tmp_path / "runs" / "one" / "evaluation" / "base.jsonl")
    turns = [turn for one in found.values() for turn in one.turns]
    assert all(one.success for one in found.values())
    assert max(len(one.turns) for one in found.values()) == 4
    assert len(server.bodies) == 3 * len(turns)
    assert {turn.action.candidates for turn in turns} == {(0, 0, 0)}
    assert "the best of 3 actions at each turn by frequency" in " ".join(printed.split())


def test_run_evaluates_and_reports_where_nothing_is_trained(recipe, perturn, tmp_path):
    """And explores nothing where no section asks for it, which would cost money."""
    code, printed = perturn("run", recipe, "explore=null", "rows=null")

    assert code == 0, printed
    assert "report.html" in printed.replace("\n", "")
    assert not (tmp_path / "runs" / "one" / "trajectories" / "explore.jsonl").exists()


def test_collect_records_the_server_as_teacher(recipe, perturn, tmp_path):
    """On the tasks of explore, besides the expert."""
    code, printed = perturn("collect", recipe)

    assert code == 0, printed
    found = played(tmp_path / "runs" / "one" / "trajectories" / "explore.jsonl")
    assert {one.task.split for one in found.values()} == {"test"}
    assert {one.policy for one in found.values()} == {"teacher-1@127.0.0.1"}


@pytest.mark.parametrize("command", ["train", "run"])
def test_training_a_servers_model_is_refused_before_work(recipe, perturn, server, tmp_path, command):
    """One line; no folder is made. Evaluating with the same recipe works."""
    recipe.write_text(recipe.read_text() + TRAINED)

    code, printed = perturn(command, recipe)

    assert code == 2
    assert "training changes the weights of the policy, which engine 'api' does not give" in printed
    assert len(printed.splitlines()) == 1
    assert not (tmp_path / "runs").exists()
    assert server.bodies == []
    assert perturn("evaluate", recipe)[0] == 0


def test_a_recipe_for_training_becomes_a_baseline_by_overrides(perturn, server, tmp_path):
    """As `perturn evaluate RECIPE engine.name=api model.name=...` with a recipe that knows of no engine."""
    server.reply = bisect
    text = RECIPE.format(output=tmp_path / "runs", url="", world=WORLD) + TRAINED
    file = tmp_path / "trained.yaml"
    file.write_text("".join(line for line in text.splitlines(True) if not line.startswith("engine")))

    code, printed = perturn(
        "evaluate", file, "engine.name=api", f"engine.base_url={server.url}", "model.name=gpt-x"
    )

    assert code == 0, printed
    assert {body["model"] for body in server.bodies} == {"gpt-x"}


def test_a_spent_budget_stops_a_run_and_a_higher_one_goes_on(recipe, perturn, server, tmp_path):
    """The result is that of a run that nothing stopped: none doubled, none missing, and no answer bought twice."""
    assert perturn("evaluate", recipe, "name=whole")[0] == 0
    whole = server.answered
    stops = 0
    for limit in itertools.count(60, 60):
        code, printed = perturn("evaluate", recipe, f"engine.max_tokens_total={limit}")
        if code == 0:
            break
        stops += 1
        assert code == 2
        error = next(line for line in printed.splitlines() if line.startswith("error: "))
        assert "the budget is spent: " in error
        assert f" of engine.max_tokens_total={limit} after " in error

    assert stops > 3
    assert server.answered == 2 * whole
    runs = tmp_path / "runs"
    found = [played(runs / name / "evaluation" / "base.jsonl") for name in ("whole", "one")]
    assert found[0] == found[1]
    assert len(found[0]) == 8


def test_limits_may_change_between_calls_but_the_server_may_not(recipe, perturn):
    """A run holds one policy's episodes."""
    assert perturn("evaluate", recipe)[0] == 0

    faster = perturn("evaluate", recipe, "engine.concurrency=2", "engine.requests_per_minute=1000")
    other = perturn("evaluate", recipe, "engine.base_url=http://elsewhere/v1")

    assert faster[0] == 0
    assert other[0] == 2
    assert "was made by another recipe: engine.base_url is" in other[1]


def test_a_run_that_the_server_stops_goes_on_later(recipe, perturn, server, tmp_path):
    """A refused key in the middle fails no episode: all that is recorded was played."""
    server.reply = lambda body, number: bisect(body, number) if number < 12 else refusal(401, f"bad {KEY}")
    code, printed = perturn("evaluate", recipe)
    assert code == 2
    assert "refuses the key (401: bad [API key])" in printed

    server.reply = bisect

    assert perturn("evaluate", recipe)[0] == 0
    found = played(tmp_path / "runs" / "one" / "evaluation" / "base.jsonl")
    assert [one.status for one in found.values()] == [Status.COMPLETED] * 8


def test_a_planted_key_is_written_nowhere(recipe, perturn, server, tmp_path, caplog, monkeypatch):
    """Not in a log down to DEBUG, a trajectory, a report or on the screen.

    The server does what it can to bring it there: it echoes the key in answers, in errors and in tool calls.
    """
    caplog.set_level(logging.DEBUG)

    def reply(body, number):
        echo = server.headers[number]["Authorization"]
        if number == 3:
            return refusal(400, f"bad request with {echo}")
        if number in (5, 6):
            return refusal(500, f"failed for {echo}")
        status, answer = bisect(body, number)
        message = answer["choices"][0]["message"]
        message["content"] = f"Thought: {echo} " + message["content"].removeprefix("Thought: ")
        message["tool_calls"] = [
            {"id": "x", "type": "function", "function": {"name": "f", "arguments": json.dumps({"k": echo})}}
        ]
        return status, answer

    server.reply = reply
    codes = [perturn("evaluate", recipe), perturn("report", tmp_path / "runs" / "one")]
    server.reply = lambda *_: refusal(403, f"no more for {KEY}")
    codes.append(perturn("evaluate", recipe, "name=two"))

    assert [code for code, _ in codes] == [0, 0, 2]
    assert KEY in server.headers[0]["Authorization"]
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"base.jsonl", "report.html", "api.jsonl", "manifest.json"} <= {path.name for path in written}
    assert "[API key]" in (tmp_path / "runs" / "one" / "evaluation" / "base.jsonl").read_text()
    assert "openai" in {record.name.split(".")[0] for record in caplog.records}
    assert [path for path in written if KEY.encode() in path.read_bytes()] == []
    assert KEY not in caplog.text
    assert not any(KEY in str(vars(record)) for record in caplog.records)
    assert not any(KEY in printed for _, printed in codes)


@pytest.mark.parametrize(
    "word",
    [
        f"engine.api_key={KEY}",
        "engine.api_key=letmein",
        f"engine.request.extra={KEY}",
        f"model.name={KEY}",
        f"environment.authorization=Bearer {KEY}",
    ],
)
def test_a_key_in_a_recipe_is_refused_by_the_name_of_its_place(recipe, perturn, tmp_path, word):
    """With what to do instead; neither shown nor written."""
    code, printed = perturn("evaluate", recipe, word)

    place, _, secret = word.partition("=")
    assert code == 2
    assert f"{place} holds what looks like a key" in printed
    assert "engine.api_key_env" in printed
    assert secret not in printed
    assert not (tmp_path / "runs").exists()


def test_a_key_of_any_form_is_refused_if_it_is_the_one_in_use(recipe, perturn, tmp_path, monkeypatch):
    """Compared with the environment, since not every key looks like one."""
    monkeypatch.setenv("OPENAI_API_KEY", "correct.horse.battery")

    code, printed = perturn("evaluate", recipe, "protocol.system=Use correct.horse.battery")

    assert code == 2
    assert "the recipe holds the key that is in OPENAI_API_KEY" in printed
    assert not (tmp_path / "runs").exists()
