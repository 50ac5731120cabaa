"""Choosing by values: a head that has learned from the explored episodes of the run, in the loop and before it."""

import json

import pytest
from typer.testing import CliRunner

from perturn.analysis.number_text import cost_lines
from perturn.cli import app
from perturn.config.recipe import read_recipe
from perturn.config.stages import explored_before, stages
from perturn.data.run_folder import Run
from perturn.data.store import TrajectoryStore, read_trajectories
from perturn.episodes.play_many import Job
from perturn.errors import ConfigError
from perturn.policy.action_scorers import ActionValues
from perturn.quantities.readers import open_reader
from perturn.report import summarize
from perturn.run.execute import check, open_run, run_stages
from perturn.run.stages.selection import Selection
from perturn.types import Action, Prompt, Sampling, Task, Trajectory, Turn

ASKED = ({"role": "user", "content": "?"},)
SAMPLED = [
    "evaluate.tasks.per_kind=4",
    "evaluate.sampling.temperature=1.0",
    "evaluate.sampling.max_new_tokens=4",
    "explore.sampling={temperature: 1.0, max_new_tokens: 4}",
]
BEST = [*SAMPLED, "evaluate.select={name: value, samples: 3}"]
TAKEN = [*SAMPLED, "evaluate.select={name: value, among: actions, samples: 3}"]
UNTAUGHT = ["sft=null", "rows=null", "align=null"]
WON, LOST = "take lamp", "the door is shut"


def selection(run):
    """The selector of a run, for the base policy."""
    return Selection(run, "base", run.recipe.evaluate.select)


@pytest.fixture
def write(renderer):
    """Makes an action of a text, in tokens."""

    def make(text):
        ids = renderer.tokenizer(text, add_special_tokens=False).input_ids
        return renderer.action([*ids, renderer.end_id], (-1.0,) * (len(ids) + 1))

    return make


@pytest.fixture
def episode(write):
    """Makes an episode of a task whose turns are these texts; how it ends is in the last one."""

    def make(task, sample, *texts, reward=None):
        won = float(texts[-1] == WON) if reward is None else reward
        turns = tuple(Turn(ASKED, write(text)) for text in texts)
        return Trajectory(Task(task), turns, total_reward=won, sample=sample)

    return make


@pytest.fixture
def taught(recipe, episode):
    """A run of an untrained policy that has explored: whoever took the lamp won."""
    runs = []

    def make(*words):
        run = Run(read_recipe(recipe, [*words, *UNTAUGHT])).__enter__()
        runs.append(run)
        file = run.paths.trajectories("explore")
        with run.stage("explore", file), TrajectoryStore(file) as store:
            for number, word in enumerate(["one", "two of them", "4", "yes", "no", "a box"]):
                for sample, last in enumerate((LOST, WON)):
                    store.append(episode(f"explored/{number}", sample, word, last))
        return run

    yield make
    for run in runs:
        run.__exit__(None, None, None)


def test_a_head_that_knows_the_outcome_picks_the_right_episode_and_action(taught, episode, write):
    """Rewards of what is chosen among are not read: they say the contrary here."""
    drawn = [
        *(
            episode("a", number, "up", last, reward=9.0 * (last == LOST))
            for number, last in enumerate((LOST, WON))
        ),
        *(episode("b", number, "down", last, reward=0.0) for number, last in enumerate((WON, LOST))),
    ]
    prompt = Prompt((), drawn[0].turns[:1], ASKED, 0, "a#0")

    class Engine:
        """Gives each prompt the next of its answers."""

        name = "answers"

        def generate(self, prompts, sampling):
            """One answer a prompt."""
            return [write(each) for each in (LOST, LOST, WON)][: len(prompts)]

    chosen = selection(taught(*BEST)).best(drawn)
    serve = selection(taught(*TAKEN, "name=taken")).serving([Job(Task("a"), 0)])
    (action,) = serve(Engine()).generate([prompt], Sampling())

    assert [(one.task.id, one.sample) for one in chosen] == [("a", 1), ("b", 0)]
    assert action.text == WON
    assert len(action.candidates) == 3


def test_scores_come_after_the_first_exploration(recipe):
    """And learn from the last one before them; other choices leave the order as it was."""
    plain = [stage.name for stage in stages(read_recipe(recipe, SAMPLED))]
    read = read_recipe(recipe, BEST)
    many = read_recipe(recipe, [*BEST, "iterations=2"])
    found = {stage.name: stage for stage in stages(read)}

    assert plain[1:4] == ["evaluate-base", "sft", "evaluate-sft"]
    assert list(found) == [
        *("expert", "sft", "explore", "evaluate-base", "evaluate-sft", "pair", "align"),
        "evaluate-tlm-dre",
    ]
    assert found["evaluate-base"].needs == ("explore",)
    assert found["evaluate-sft"].needs == ("sft", "explore")
    assert set(found["explore"].reads) <= set(found["evaluate-sft"].reads)
    assert [explored_before(read, policy) for policy in ("base", "sft", "tlm-dre")] == ["explore"] * 3
    assert [explored_before(many, policy) for policy in ("sft", "tlm-dre-001", "tlm-dre-002")] == [
        *("explore-001", "explore-001", "explore-002"),
    ]


@pytest.mark.parametrize(("words", "name"), [(BEST, "drawn"), (TAKEN, "candidates")])
def test_the_loop_explores_and_then_chooses(recipe, tiny_folder, words, name):
    """By the head of the explored episodes; what taught it and what was sampled is said beside the score."""
    shown = CliRunner().invoke(app, ["run", str(recipe), *words, *UNTAUGHT], catch_exceptions=False)

    assert shown.exit_code == 0, shown.output
    folder = recipe.parent / "runs" / "one"
    (row,) = summarize(folder)["policies"]
    counts = json.loads((folder / "manifest.json").read_text())["stages"]["evaluate-base"]["counts"]
    explored = sorted(read_trajectories(folder / "trajectories/explore.jsonl"), key=lambda one: one.key)
    reader = open_reader(str(tiny_folder))
    values = ActionValues(reader, explored)
    (line,) = [each for each in cost_lines([row]) if "value head" in each]
    assert row[name]
    assert row["value_head"]["episodes"] == counts["value_episodes"] == values.episodes == 8
    assert row["value_head"]["tokens"] == counts["value_tokens"] == values.tokens > 0
    assert line.startswith(
        f"The value head of base was trained on 8 explored episodes with {values.tokens} tokens"
    )
    assert " ".join(line.split()[:6]) in " ".join(shown.output.split())
    if name == "drawn":
        drawn = sorted(read_trajectories(folder / "evaluation/drawn/base.jsonl"), key=lambda one: one.key)
        numbers = dict(zip((one.key for one in drawn), values.of_episodes(drawn), strict=True))
        for one in read_trajectories(folder / "evaluation/base.jsonl"):
            best = max(number for key, number in numbers.items() if key[0] == one.task.id)
            assert numbers[one.key] == pytest.approx(best, abs=1e-6)
    else:
        assert counts["candidates"] == 3 * counts["turns"]


def test_a_score_that_was_stopped_says_what_a_whole_one_says(recipe):
    """A kill after the last episode; the head is taught again, to be counted."""
    with open_run(recipe, [*TAKEN, *UNTAUGHT]) as run:
        run_stages(run)
        paths = run.paths
    manifest = json.loads(paths.manifest.read_text())
    counts = manifest["stages"]["evaluate-base"]["counts"]
    manifest["stages"]["evaluate-base"]["done"] = False
    manifest["files"] = {
        file: one for file, one in manifest["files"].items() if one["stage"] != "evaluate-base"
    }
    paths.manifest.write_text(json.dumps(manifest))

    with open_run(recipe, [*TAKEN, *UNTAUGHT]) as run:
        run_stages(run)
        assert run.manifest["stages"]["evaluate-base"]["counts"] == counts


@pytest.mark.parametrize("among", ["episodes", "actions"])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            [*UNTAUGHT, "explore=null"],
            r"name=value: it learns from explored episodes, and nothing is explored here; add the section explore",
        ),
        (
            [*UNTAUGHT, "engine={name: api, base_url: 'http://127.0.0.1:9/v1'}"],
            "name=value: it needs the policy in memory, which engine 'api' does not give. Or take",
        ),
        (
            [*UNTAUGHT, "evaluate.tasks={split: train, per_kind: 6}"],
            "2 of 6 tasks of evaluate.tasks are explored too, such as .* score tasks that are held out",
        ),
    ],
    ids=["explores", "engine", "held out"],
)
def test_what_teaches_no_head_is_refused_before_work(recipe, among, words, said):
    chosen = [*SAMPLED, f"evaluate.select={{name: value, among: {among}, samples: 3}}", *words]
    if "explore=null" in words:
        chosen = [word for word in chosen if not word.startswith("explore.sampling")]

    with pytest.raises(ConfigError, match=said):
        check(read_recipe(recipe, chosen))


def test_the_command_without_a_run_has_nothing_to_learn_from(tiny_folder):
    words = ["evaluate", "--model", str(tiny_folder), "--environment", "own_environment:GuessNumber"]

    said = CliRunner().invoke(
        app, [*words, "evaluate.sampling.temperature=1.0", "evaluate.select.name=value"]
    )

    assert said.exit_code != 0
    assert "nothing is explored here; add the section explore" in str(said.exception)


def test_a_head_of_equal_scores_is_said_to_know_nothing():
    row = {"name": "base", "value_head": {"episodes": 2, "tokens": 9, "explained": None}}

    assert cost_lines([row]) == [
        "The value head of base was trained on 2 explored episodes with 9 tokens; the scores of these episodes are all "
        "equal."
    ]


def test_an_action_of_which_no_tokens_are_known_is_the_last(taught, write):
    """Such as one that an engine gave as text."""
    run = taught(*TAKEN)

    class Engine:
        """Text, then tokens."""

        name = "answers"

        def generate(self, prompts, sampling):
            """One answer a prompt."""
            return [Action(WON), write(LOST), Action(WON)][: len(prompts)]

    serve = selection(run).serving([Job(Task("a"), 0)])
    (action,) = serve(Engine()).generate([Prompt((), (), ASKED, 0, "a#0")], Sampling())

    assert action.text == LOST
