"""Agreement of a judge with labels, on files of which each figure is worked by hand."""

import json
import math

import pytest
from typer.testing import CliRunner

from engines.api.chat import KEY, Server, completion, heard
from engines.serving import serve
from perturn.cli import app
from perturn.config.recipe import read_recipe
from perturn.errors import ConfigError, DataError
from perturn.run.judging.judge_agreement import measure_agreement
from perturn.stats import kappa

RECIPE = """
name: judged
model: {name: policy}
environment: {name: alfworld-like}
engine: &server {name: api, base_url: URL, max_retries: 3}
evaluate: {tasks: {split: test, n: 2}}
reward: {judge: {model: judge, rubric: Say a number., engine: *server, scale: [1, 5], evaluates: true}}
"""


@pytest.fixture
def server(monkeypatch):
    """A judge that gives the digit behind `rate`, and nothing readable where there is none."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")

    def reply(body, number):
        said = heard(body).partition("rate ")[2][:1]
        return completion(f"[[{said}]]" if said.isdecimal() else "Hm.")

    state = Server(reply=reply)
    with serve(state.answer) as address:
        state.url = f"{address}/v1"
        yield state


@pytest.fixture
def measure(server, tmp_path):
    """Measure the agreement on rows."""
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("URL", server.url))

    def measure(*rows, words=()):
        file = tmp_path / "labeled.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return measure_agreement(read_recipe(tmp_path / "recipe.yaml", words), file)

    return measure


def labeled(rating, label):
    return {"text": f"rate {rating}", "label": label}


def test_each_figure_is_worked_by_hand(measure):
    """Ratings 1 2 3 5 of labels 1 3 3 4: two agree, differences 0 -1 0 1, one item is unreadable."""
    found = measure(*(labeled(*each) for each in ((1, 1), (2, 3), (3, 3), (5, 4), ("none", 2))))

    assert (found["items"], found["rated"], found["unreadable"]) == (5, 4, 1)
    assert found["agreement"]["mean"] == 0.5
    assert found["bias"]["mean"] == 0.0
    assert found["error"] == pytest.approx(math.sqrt(0.5))
    by_chance = 2.1875 + 1.1875  # variances of 1 2 3 5 and 1 3 3 4, whose means are equal
    assert found["kappa"]["mean"] == pytest.approx(1 - 0.5 / by_chance)
    assert found["rank_correlation"]["mean"] == pytest.approx(0.9486833)
    assert found["noise"] is None
    low, high = found["kappa"]["interval"]
    assert low < found["kappa"]["mean"] <= high <= 1


def test_kappa_is_that_of_the_weighted_table():
    """On whole ratings it equals 1 - sum(w o) / sum(w e) over the table of 1 to 3 with weights (i - j)^2."""
    a, b = [1, 1, 2, 3, 3, 2], [1, 2, 2, 3, 1, 2]
    weights = [[(i - j) ** 2 for j in (1, 2, 3)] for i in (1, 2, 3)]
    observed = sum(weights[x - 1][y - 1] for x, y in zip(a, b, strict=True)) / 6
    expected = sum(weights[x - 1][y - 1] for x in a for y in b) / 36

    assert kappa(a, b) == pytest.approx(1 - observed / expected)
    assert kappa([2, 2], [2, 2]) is None
    assert kappa([], []) is None
    with pytest.raises(ValueError, match="as many values"):
        kappa([1], [])


def test_samples_tell_the_noise(measure, server):
    """Samples 2 and 4 of each item: standard deviation sqrt(2), mean 3."""
    server.reply = lambda body, number: completion(f"[[{2 if body['seed'] == 0 else 4}]]")
    words = ["reward.judge.samples=2", "reward.judge.sampling.temperature=1.0"]

    found = measure(labeled(0, 3), labeled(1, 3), words=words)

    assert found["noise"] == pytest.approx(2**0.5)
    assert (found["agreement"]["mean"], found["judgments"]) == (1.0, 4)
    assert found["rank_correlation"] is None


def test_episodes_and_turns_are_asked_about_as_in_a_run(measure, server):
    """A conversation whole; or its second action, and what came after it is not shown."""
    said = [
        ("user", "Hi"),
        ("assistant", "rate 4"),
        ("user", "And?"),
        ("assistant", "rate 2"),
        ("user", "Well"),
    ]
    messages = [{"role": role, "content": text} for role, text in [*said, ("assistant", "Bye")]]
    rows = [
        {"episode": {"messages": messages}, "label": 4},
        {"episode": {"messages": messages}, "turn": 1, "label": 4},
    ]

    found = measure(*rows)

    assert found["rated"] == 2
    assert sorted("Bye" in heard(body) for body in server.bodies) == [False, True]


def test_labels_of_one_episode_are_one_unit(measure, server):
    """Four turns of one episode, and four of another: intervals as wide as two episodes give."""
    rows = []
    for rating in (1, 4):
        said = [("user", "Go"), ("assistant", f"rate {rating}")] * 4
        messages = [{"role": role, "content": text} for role, text in said]
        rows += [{"episode": {"messages": messages}, "turn": turn, "label": 4} for turn in range(4)]
    server.reply = lambda body, number: completion(f"[[{heard(body).rpartition('rate ')[2][:1]}]]")

    found = measure(*rows)

    assert found["rated"] == 8
    assert (found["agreement"]["mean"], found["bias"]["mean"]) == (0.5, -1.5)
    assert [found[name]["n"] for name in ("agreement", "kappa", "bias")] == [2, 2, 2]
    low, high = found["bias"]["interval"]
    assert (low, high) == pytest.approx((-1.5 - 12.7062 * 1.5, -1.5 + 12.7062 * 1.5), abs=1e-3)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": "a"}, r"labeled\.jsonl:1.*label"),
        ({"text": "a", "label": 9}, "from 1 to 5, got 9"),
        ({"label": 3}, "either text or episode"),
        ({"text": "a", "episode": {}, "label": 3}, "either text or episode"),
        ({"episode": {"messages": 3}, "label": 3}, "episode"),
        ({"episode": {"messages": [{"role": "assistant", "content": "a"}]}, "turn": 7, "label": 3}, "got 7"),
    ],
)
def test_a_malformed_row_is_told_with_its_line(measure, row, said):
    with pytest.raises(DataError, match=said):
        measure(row)


def test_a_recipe_without_a_judge_is_refused(measure):
    with pytest.raises(
        ConfigError,
        match=r"reward\.judge is missing, and its ratings are compared with labels; set it, such as",
    ):
        measure(words=["reward=null"])


def test_the_command_prints_figures(measure, tmp_path):
    """As a table, or as JSON."""
    measure(labeled(1, 1), labeled(2, 3), labeled(4, 4))
    words = ["check-judge", str(tmp_path / "recipe.yaml"), str(tmp_path / "labeled.jsonl")]

    shown = CliRunner().invoke(app, words, catch_exceptions=False)
    told = CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False)

    assert shown.exit_code == told.exit_code == 0
    assert "rank correlation" in shown.output
    assert json.loads(told.stdout)["agreement"]["mean"] == pytest.approx(2 / 3)
