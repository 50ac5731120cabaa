"""Best-of-N: several episodes of each task are played, and one of them is scored."""

import json
import re
from dataclasses import replace
from statistics import fmean

import pytest
import torch
from typer.testing import CliRunner

from perturn.cli import app
from perturn.config.recipe import read_recipe
from perturn.config.stages import learned_from, policy_of
from perturn.data.run_folder import Run
from perturn.data.store import read_trajectories
from perturn.errors import ConfigError, EngineFailure
from perturn.quantities.readers import open_reader
from perturn.quantities.reference_logprobs import reference_of
from perturn.report import summarize, write_report
from perturn.run.execute import check, open_run, run_stages
from perturn.run.stages.selection import Selection
from perturn.select.protocol import SelectorTraits
from perturn.types import Action, Status, Task, Trajectory, Turn
from support.models import make_tiny_model

SAMPLED = [
    "evaluate.tasks.per_kind=4",
    "evaluate.sampling.temperature=1.0",
    "evaluate.sampling.max_new_tokens=4",
]
SCORED = [
    *SAMPLED,
    "evaluate.select={name: outcome, samples: 3}",
    "sft=null",
    "rows=null",
    "explore=null",
    "align=null",
]


def episode(task, sample, reward, *said, logprobs=(-1.0,), **changes):
    """An episode of a turn for each of its texts."""
    turns = [Turn(({"role": "user", "content": "?"},), Action(text, logprobs=logprobs)) for text in said]
    turns[-1] = replace(turns[-1], reward=reward)
    return Trajectory(Task(task), tuple(turns), total_reward=reward, sample=sample, **changes)


DRAWN = [
    episode("a", 0, 0.0, "x", logprobs=(-2.0, -4.0)),
    episode("a", 1, 1.0, "x", "y", logprobs=(-3.5,)),
    episode("a", 2, 1.0, "z", logprobs=(-0.5,) * 9),
    episode("b", 0, 0.0, "x"),
    episode("b", 1, 2.0, "y", status=Status.FAILED, error="lost"),
    episode("c", 0, 5.0, "x", status=Status.FAILED, error="lost"),
]


@pytest.fixture
def opened(recipe):
    """Opens a run of the recipe that chooses by something."""
    runs = []

    def make(name, *words):
        runs.append(Run(read_recipe(recipe, [*SAMPLED, f"evaluate.select.name={name}", *words])).__enter__())
        return runs[-1]

    yield make
    for run in runs:
        run.__exit__(None, None, None)


def best(run, policy, drawn):
    """What the selector of a run chooses for a policy."""
    return Selection(run, policy, run.recipe.evaluate.select).best(drawn)


def samples(chosen):
    return [(one.task.id, one.sample) for one in chosen]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("outcome", [("a", 1), ("b", 0), ("c", 0)]),
        ("likelihood", [("a", 2), ("b", 0), ("c", 0)]),
        ("own_environment:shortest", [("a", 0), ("b", 0), ("c", 0)]),
    ],
)
def test_the_highest_is_scored_and_of_equal_ones_the_first(
    opened, own_environment, monkeypatch, name, expected
):
    """A FAILED one only where there is no other; a mean over tokens, so that long episodes are as likely."""
    monkeypatch.setattr(
        own_environment, "shortest", lambda all_: [-len(one.turns) for one in all_], raising=False
    )

    assert samples(best(opened(name), "base", DRAWN)) == expected


def test_the_implicit_reward_is_that_of_the_policy_over_its_start(opened, tiny_folder, tokenizer, caplog):
    """Sums over the tokens that the policy wrote; the base has none, which is said."""
    run = opened("implicit-reward")
    folder = run.paths.checkpoint("sft")
    make_tiny_model(3).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    drawn = [
        episode("a", number, 0.0, *text.split("/")) for number, text in enumerate(["two/three", "one", "4"])
    ]
    found = [reference_of(drawn, open_reader(str(model))) for model in (folder, tiny_folder)]
    gains = [
        sum(float((o - t).sum()) for o, t in zip(*both, strict=True)) for both in zip(*found, strict=True)
    ]

    chosen = best(run, "sft", drawn)

    assert samples(chosen) == [("a", gains.index(max(gains)))]
    assert gains.index(max(gains)) != 0
    assert samples(best(run, "base", drawn)) == [("a", 0)]
    assert "policy base was trained from no other; the first sample of each task is scored" in caplog.text


def test_all_episodes_stay_and_one_of_each_task_is_scored(recipe):
    """The score and the stamp are of the choice; what it cost is counted."""
    with open_run(recipe, [*SCORED, "evaluate.select.name=likelihood"], "evaluate") as run:
        run_stages(run, "evaluate")
        paths, counts = run.paths, run.manifest["stages"]["evaluate-base"]["counts"]
        drawn, chosen = (
            list(read_trajectories(file)) for file in (paths.drawn("base"), paths.evaluation("base"))
        )

    def likelihood(one):
        return fmean(each for turn in one.turns for each in turn.action.logprobs)

    assert (len(drawn), len(chosen)) == (12, 4)
    for one in chosen:
        assert one == max((each for each in drawn if each.task.id == one.task.id), key=likelihood)
    assert {one.sample for one in chosen} != {0}
    assert json.loads(paths.stamp.read_text())["select"] == {
        "name": "likelihood",
        "samples": 3,
        "among": "episodes",
    }
    assert (counts["episodes"], counts["drawn_episodes"]) == (4, 12)
    assert counts["drawn_turns"] == sum(len(one.turns) for one in drawn) > counts["turns"]


def test_what_was_lost_of_it_is_played_again_to_the_same(recipe):
    """A kill between two episodes leaves the first ones; the choice is of all."""
    with open_run(recipe, [*SCORED, "deterministic=true"], "evaluate") as run:
        run_stages(run, "evaluate")
        paths = run.paths
    whole = [file.read_bytes() for file in (paths.drawn("base"), paths.evaluation("base"))]
    manifest = json.loads(paths.manifest.read_text())
    manifest["stages"]["evaluate-base"]["done"] = False
    manifest["files"] = {
        file: one for file, one in manifest["files"].items() if one["stage"] != "evaluate-base"
    }
    paths.manifest.write_text(json.dumps(manifest))
    lines = whole[0].splitlines(keepends=True)
    paths.drawn("base").write_bytes(b"".join(lines[:5]))
    paths.evaluation("base").unlink()

    with open_run(recipe, [*SCORED, "deterministic=true"], "evaluate") as run:
        run_stages(run, "evaluate")

    assert [file.read_bytes() for file in (paths.drawn("base"), paths.evaluation("base"))] == whole


def test_the_command_says_what_the_score_is_of(recipe):
    """And what it cost; a plain score says nothing of it."""
    shown = CliRunner().invoke(app, ["evaluate", str(recipe), *SCORED])
    plain = CliRunner().invoke(app, ["evaluate", str(recipe), *SCORED, "evaluate.select=null", "name=plain"])

    assert shown.exit_code == plain.exit_code == 0, shown.output + plain.output
    assert "the best of 3 episodes of each task by outcome, which looks at the result" in shown.output
    assert "base played 12 episodes in all, with" in shown.output
    assert "best of" not in plain.output
    assert "played" not in plain.output
    page = write_report(recipe.parent / "runs" / "one").read_text()
    assert "base played 12 episodes in all, with" in page
    (row,) = summarize(recipe.parent / "runs" / "one")["policies"]
    assert row["drawn"]["episodes"] == 12
    assert 0 <= row["drawn"]["success_rate"] <= row["success_rate"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["evaluate.sampling.temperature=0.0"],
            r"evaluate\.sampling\.temperature must be > 0, .* which are all equal at 0, got 0\.0",
        ),
        (
            ["evaluate.select.name=outcom"],
            r"unknown evaluate\.select\.name 'outcom'\. Did you mean 'outcome'\?",
        ),
        (["evaluate.select.name=own_environment:nobody"], "cannot be loaded: AttributeError"),
        (
            ["evaluate.select.name=own_environment:__doc__"],
            "must be a function that gives scores, or a selector: a class",
        ),
        (
            ["evaluate.select.name=own_environment:GuessNumber"],
            r"be a function that .* class with `traits = SelectorTraits.*GuessNumber'",
        ),
        (["evaluate.select.samples=1"], r"evaluate\.select\.samples must be >= 2, got 1"),
        (["evaluate.select.sample=3"], r"unknown key 'evaluate\.select\.sample'\. Did you mean .*samples'\?"),
        (
            ["evaluate.select.name=frequency"],
            r"select\.name=frequency: it chooses among actions alone, .* Or take .*name=outcome, likelihood or a",
        ),
        (
            ["evaluate.select.name=implicit-reward"],
            "no policy here is trained; score .* Or take evaluate.select.name=outcome, likelihood or a",
        ),
        (
            ["evaluate.select.name=likelihood", "engine={name: api, base_url: 'http://127.0.0.1:9/v1'}"],
            "which engine 'api' does not give. Or take evaluate.select.name=outcome or a",
        ),
    ],
)
def test_a_choice_that_cannot_be_is_refused_before_work(recipe, words, said):
    with pytest.raises(ConfigError, match=said):
        check(read_recipe(recipe, [*SCORED, *words]))


@pytest.mark.parametrize(
    ("scores", "said"),
    [
        (
            lambda all_: [1.0],
            r"failed: ValueError: it must give one finite number for each of the 3 episodes, got 1",
        ),
        (
            lambda all_: [float("nan")] * len(all_),
            "failed: ValueError: it must give one finite number for each",
        ),
        (lambda all_: 1 / 0, "failed: ZeroDivisionError"),
    ],
)
def test_a_function_that_gives_no_numbers_is_named(opened, own_environment, monkeypatch, scores, said):
    monkeypatch.setattr(own_environment, "scores", scores, raising=False)

    with pytest.raises(ConfigError, match=f"own_environment:scores' {said}"):
        best(opened("own_environment:scores"), "base", DRAWN)


BAD = "evaluate.select.name 'mine.py:Bad' must give one number for each of 4 candidates, got"


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ("lambda episodes: [1.0]", BAD),
        ("lambda episodes: [float('nan')] * 4", BAD),
        ("lambda episodes: [(1.0, float('nan'))] * 4", BAD),
        ("lambda episodes: {one.key: 1.0 for one in episodes}", BAD),
        ("lambda episodes: 'abcd'", BAD),
        ("lambda episodes: [None] * 4", BAD),
        ("lambda episodes: [1.0, 1.0, 1.0, (1.0,)]", BAD),
        ("lambda episodes: [][2]", "'mine.py:Bad' failed: IndexError: list index out of range (at "),
        ("inputs.nothing", "'mine.py:Bad' failed: AttributeError: "),
        ("[1.0] * 4", "the result of among_episodes must be a function that scores candidates, got [1.0"),
    ],
)
def test_a_selector_that_gives_no_numbers_is_named(opened, tmp_path, monkeypatch, made, says):
    """A class is checked as a function is; -inf is a score."""
    (tmp_path / "mine.py").write_text(
        "from perturn.extend import SelectorTraits\n\n\nclass Bad:\n    traits = SelectorTraits()\n\n"
        f"    def among_episodes(self, inputs):\n        return {made}\n\n"
        "    def among_actions(self, inputs):\n        return lambda *_: []\n"
    )
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ConfigError, match=re.escape(says)):
        best(opened("mine.py:Bad"), "base", DRAWN)


@pytest.mark.parametrize("form", [torch.tensor, lambda scores: [torch.tensor([each]) for each in scores]])
def test_scores_may_be_an_array_or_a_tensor(opened, own_environment, monkeypatch, form):
    """Of a class, whose scores are not converted by a wrapper; also a tensor for each score."""

    class Shortest:
        traits = SelectorTraits()

        def among_episodes(self, inputs):
            return lambda episodes: form([-len(one.turns) for one in episodes])

        def among_actions(self, inputs):
            return lambda *_: []

    monkeypatch.setattr(own_environment, "Shortest", Shortest, raising=False)

    assert samples(best(opened("own_environment:Shortest"), "base", DRAWN))[0] == ("a", 0)


def test_an_engine_without_log_probabilities_cannot_say_what_is_likely(opened):
    silent = [episode("a", 0, 0.0, "x", logprobs=None)]

    with pytest.raises(
        EngineFailure, match="the engine gives none; take another of `perturn list selectors`"
    ):
        best(opened("likelihood"), "base", silent)


def test_of_what_the_engine_said_nothing_the_likelihood_is_lowest(opened):
    """But a FAILED episode comes after it."""
    lost = episode("a", 0, 0.0, "x", status=Status.FAILED, error="lost")
    drawn = [lost, episode("a", 1, 0.0, "x", logprobs=None), episode("b", 0, 0.0, "x")]

    assert samples(best(opened("likelihood"), "base", drawn)) == [("a", 1), ("b", 0)]


def test_a_function_gets_the_episodes_of_one_task(opened, own_environment, monkeypatch):
    """Two tasks in turns: each call has both samples of a task, and its numbers return to their episodes."""
    calls = []

    def ranked(episodes):
        calls.append(samples(episodes))
        return range(len(episodes))

    monkeypatch.setattr(own_environment, "ranked", ranked, raising=False)
    drawn = [episode(task, sample, 0.0, "x") for sample in (0, 1) for task in "ab"]

    assert samples(best(opened("own_environment:ranked"), "base", drawn)) == [("a", 1), ("b", 1)]
    assert calls == [[("a", 0), ("a", 1)], [("b", 0), ("b", 1)]]


def test_where_all_failed_nobody_is_asked(opened, own_environment, monkeypatch):
    monkeypatch.setattr(
        own_environment, "best", lambda all_: [float(one is max(all_)) for one in all_], raising=False
    )
    lost = [episode("a", sample, 0.0, "x", status=Status.FAILED, error="lost") for sample in (0, 1)]

    assert samples(best(opened("own_environment:best"), "base", lost)) == [("a", 0)]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "sft"),
        (["sft=null"], "base"),
        (["rows={name: coh}", "align.loss={name: sft}"], "base"),
    ],
)
def test_a_policy_learned_from_what_the_loop_began_with(recipe, words, expected):
    """And one that begins anew, as coh's does, from the base."""
    read = read_recipe(recipe, words)

    assert learned_from(read, policy_of(read, 1)) == expected
    assert (learned_from(read, "sft"), learned_from(read, "base")) == ("base", None)
