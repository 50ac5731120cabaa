"""Reranking: several actions are sampled at each turn, and one of them is taken."""

import json
from math import nan
from statistics import fmean

import pytest
from typer.testing import CliRunner

from perturn.analysis.number_text import protocol_line
from perturn.cli import app
from perturn.config.recipe import read_recipe
from perturn.data.run_folder import Run
from perturn.data.store import read_trajectories
from perturn.engines.local.engine import LocalEngine
from perturn.episodes.play_many import Job
from perturn.errors import ConfigError, EngineFailure
from perturn.policy.action_scorers import ImplicitReward
from perturn.quantities.readers import open_reader
from perturn.report import summarize, write_report
from perturn.run.execute import check, open_run, run_stages
from perturn.run.stages import quantity_source
from perturn.run.stages.selection import Selection
from perturn.types import Action, Prompt, Sampling, Task

SAMPLED = [
    "evaluate.tasks.per_kind=4",
    "evaluate.sampling.temperature=1.0",
    "evaluate.sampling.max_new_tokens=4",
    *("sft=null", "rows=null", "explore=null", "align=null"),
]
RERANKED = [*SAMPLED, "evaluate.select={name: likelihood, among: actions, samples: 3}"]
PROMPT = Prompt((), (), ({"role": "user", "content": "?"},), 0, "a#0")
TASK = Task("a")


def said(text, *logprobs):
    """An action with its log-probabilities, or without."""
    return Action(text, tuple(range(len(logprobs))) or None, logprobs or None)


@pytest.fixture
def chosen(recipe):
    """Gives the index of the action that a selector takes."""

    def index(name, *candidates, form="action"):
        words = [*RERANKED, f"evaluate.select.name={name}", f"protocol.format={form}", f"name={form}"]
        read = read_recipe(recipe, words)
        with Run(read) as run:
            return Selection(run, "base", read.evaluate.select).index(TASK, PROMPT, candidates)

    return index


@pytest.mark.parametrize(
    ("logprobs", "index"),
    [
        ([(-2.0,), (-1.0, -1.5), (-0.5, -4.0)], 1),
        ([(-1.0, -1.0), (-1.0,), (-3.0,)], 0),
        ([(), (-9.0,)], 1),
    ],
)
def test_the_likeliest_has_the_highest_mean(chosen, logprobs, index):
    """-2, -1.25 and -2.25; of equal ones the first; one of which nothing is known comes last."""
    assert chosen("likelihood", *(said("x", *each) for each in logprobs)) == index


@pytest.mark.parametrize(
    ("candidates", "index"),
    [
        ([said("Action: a", -0.1), said("Action: b", -3.0), said("Action: b ", -2.0)], 2),
        ([said("Action: a", -2.0), said("Action: b", -1.0), said("Action: c", -3.0)], 1),
        ([said("Action: a"), said("Action: b"), said("Action: b"), said("Action: a")], 0),
        ([said("nothing", -0.1), said("nothing", -0.1), said("Action: b", -9.0)], 2),
        ([said("nothing", -0.2), said("none", -0.1)], 1),
    ],
    ids=["votes", "likelihood", "first", "understood", "none understood"],
)
def test_most_agree_on_the_most_frequent(chosen, candidates, index):
    """It is what the world is sent that counts; then likelihood, then order. A broken format never outvotes."""
    assert chosen("frequency", *candidates) == index


def test_thoughts_may_differ_where_actions_agree(chosen):
    """Of those that agree the likeliest is taken, with its own thought."""
    candidates = [
        said("Thought: one\nAction: go", -3.0),
        said("Thought: two\nAction: stay", -0.1),
        said("Thought: three\nAction: go", -2.0),
    ]

    assert chosen("frequency", *candidates, form="react") == 2


def test_a_function_is_asked_about_different_actions_once(chosen, own_environment, monkeypatch):
    """With the task and the prompt; its numbers go back to all."""
    asked = []

    def scores(task, prompt, candidates):
        asked.append((task, prompt, [one.text for one in candidates]))
        return [len(one.text) for one in candidates]

    monkeypatch.setattr(own_environment, "scores", scores, raising=False)

    index = chosen("own_environment:scores", said("x", -1.0), said("yy"), said("x", -1.0), said("yy"))

    assert index == 1
    assert asked == [(TASK, PROMPT, ["x", "yy"])]


@pytest.mark.parametrize(
    ("scores", "told"),
    [
        (
            lambda task, prompt, all_: [1.0],
            "failed: ValueError: it must give one finite number for each of the 2 actions, got 1",
        ),
        (
            lambda task, prompt, all_: [nan] * len(all_),
            "failed: ValueError: it must give one finite number for each",
        ),
        (lambda task, prompt, all_: 1 / 0, "failed: ZeroDivisionError"),
        (lambda task, prompt, all_: ["a", "b"], "failed: ValueError"),
    ],
)
def test_a_function_that_gives_no_numbers_is_named(chosen, own_environment, monkeypatch, scores, told):
    monkeypatch.setattr(own_environment, "scores", scores, raising=False)

    with pytest.raises(ConfigError, match=f"own_environment:scores' {told}"):
        chosen("own_environment:scores", said("x"), said("y"))


class Answers:
    """An engine that gives each prompt the next of its answers."""

    name = "answers"

    def __init__(self, *answers):
        self.answers = answers

    def generate(self, prompts, sampling):
        """One answer a prompt."""
        return [self.answers[index] for index in range(len(prompts))]


def test_the_implicit_reward_is_over_the_policy_that_another_was_trained_from(recipe, tiny_folder, caplog):
    """SFT's over the base; the base has none, which is said, and its first action is taken."""
    actions = [Action("x", (500 + 7 * each, 2), (-1.0, -1.0)) for each in range(3)]
    start = open_reader(str(tiny_folder))
    rewards = ImplicitReward(start)(PROMPT, actions)
    best = rewards.index(max(rewards))
    actions.append(actions.pop(best))  # so that the first is not the best
    select = "evaluate.select={name: implicit-reward, among: actions, samples: 3}"
    with Run(read_recipe(recipe, [*SAMPLED[:3], select])) as run:
        serving = [
            Selection(run, policy, run.recipe.evaluate.select).serving([Job(TASK, 0)])
            for policy in ("sft", "base")
        ]
        answers = [serve(Answers(*actions)).generate([PROMPT], Sampling())[0] for serve in serving]

    assert [one.token_ids for one in answers] == [actions[2].token_ids, actions[0].token_ids]
    assert "policy base was trained from no other; the first action of each turn is taken" in caplog.text


def test_a_selector_reads_its_policy_in_the_data_type_of_the_recipe(recipe, monkeypatch):
    monkeypatch.setattr(quantity_source, "open_reader", lambda *given: given[-1])
    with Run(read_recipe(recipe, [*RERANKED, "model.dtype=bfloat16"])) as run:
        assert Selection(run, "base", run.recipe.evaluate.select)._open("model") == "bfloat16"


@pytest.mark.parametrize("name", ["likelihood", "implicit-reward"])
def test_an_engine_without_log_probabilities_cannot_say_what_is_likely(chosen, name):
    with pytest.raises(EngineFailure, match=f"name={name} reads .* the engine gives none; take another of"):
        chosen(name, said("x"), said("y"))


@pytest.mark.parametrize("name", ["likelihood", "frequency", "implicit-reward"])
def test_what_broken_weights_wrote_goes_to_the_episode(chosen, name):
    """Which refuses it and fails; else the others would hide it."""
    assert chosen(name, said("Action: a", -0.1), said("Action: b", nan)) == 1


@pytest.fixture
def sampled(monkeypatch):
    """Conversation, seed and answer of all that the engine was asked."""
    noted, advance = [], LocalEngine.advance

    def remember(self):
        answered = advance(self)
        noted.extend((prompt.conversation, prompt.seed, answer) for prompt, answer in answered)
        return answered

    monkeypatch.setattr(LocalEngine, "advance", remember)
    return noted


def turns_of(run):
    return [
        (f"{one.task.id}#{one.sample}", turn)
        for one in read_trajectories(run.paths.evaluation("base"))
        for turn in one.turns
    ]


def test_each_turn_has_the_likeliest_of_its_actions(recipe, sampled):
    """The world is stepped with it alone; what was sampled for all is counted."""
    with open_run(recipe, RERANKED, "evaluate") as run:
        run_stages(run, "evaluate")
        turns, counts = turns_of(run), run.manifest["stages"]["evaluate-base"]["counts"]
        stamped = json.loads(run.paths.stamp.read_text())["select"]

    seen = {}
    for conversation, turn in turns:
        number = seen.setdefault(conversation, [])
        number.append(turn)
        names = {conversation, f"{conversation}~1", f"{conversation}~2"}
        of_turn = [each for name in sorted(names) for each in [a for c, _, a in sampled if c == name]]
        asked = [of_turn[k * len(of_turn) // 3 + len(number) - 1] for k in range(3)]
        means = [fmean(each.logprobs) for each in asked]
        assert turn.action.token_ids == asked[means.index(max(means))].token_ids
        assert turn.action.logprobs == asked[means.index(max(means))].logprobs
        assert turn.action.candidates == tuple(len(each.token_ids) for each in asked)
    assert stamped == {"name": "likelihood", "among": "actions", "samples": 3}
    assert counts["candidates"] == 3 * counts["turns"] == len(sampled) == 60
    assert counts["candidate_tokens"] == sum(len(answer.token_ids) for _, _, answer in sampled)
    assert len({seed for _, seed, _ in sampled}) == 60


def test_the_first_candidates_are_those_of_plain_sampling(recipe, sampled, own_environment, monkeypatch):
    """A function that likes all alike leaves the episodes of an evaluation without."""
    monkeypatch.setattr(own_environment, "alike", lambda task, prompt, all_: [0.0] * len(all_), raising=False)
    found = []
    for words in (["name=plain"], ["evaluate.select={name: own_environment:alike, among: actions}"]):
        with open_run(recipe, [*SAMPLED, *words], "evaluate") as run:
            run_stages(run, "evaluate")
            found.append(sorted((name, turn.action.token_ids) for name, turn in turns_of(run)))

    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["likelihood", "frequency"])
def test_what_was_lost_of_it_is_played_again_to_the_same(recipe, name):
    """A kill between two episodes leaves the first ones; the others have the same candidates."""
    words = [*RERANKED, "deterministic=true", f"evaluate.select.name={name}", "evaluate.concurrency=2"]
    with open_run(recipe, words, "evaluate") as run:
        run_stages(run, "evaluate")
        paths = run.paths
    whole = paths.evaluation("base").read_bytes()
    manifest = json.loads(paths.manifest.read_text())
    counts = manifest["stages"]["evaluate-base"]["counts"]
    manifest["stages"]["evaluate-base"]["done"] = False
    manifest["files"] = {
        file: one for file, one in manifest["files"].items() if one["stage"] != "evaluate-base"
    }
    paths.manifest.write_text(json.dumps(manifest))
    paths.evaluation("base").write_bytes(b"".join(whole.splitlines(keepends=True)[:2]))

    with open_run(recipe, words, "evaluate") as run:
        run_stages(run, "evaluate")
        again = run.manifest["stages"]["evaluate-base"]["counts"]

    assert paths.evaluation("base").read_bytes() == whole
    assert again == counts


def test_the_command_says_what_the_score_is_of(recipe):
    """And what it cost; a plain score says nothing of it."""
    shown = CliRunner().invoke(app, ["evaluate", str(recipe), *RERANKED, "evaluate.select.name=frequency"])
    plain = CliRunner().invoke(app, ["evaluate", str(recipe), *SAMPLED, "name=plain"])

    assert shown.exit_code == plain.exit_code == 0, shown.output + plain.output
    assert "the best of 3 actions at each turn by frequency" in shown.output
    (row,) = summarize(recipe.parent / "runs" / "one")["policies"]
    cost = row["candidates"]
    sentence = (
        f"base sampled {cost['actions']} actions with {cost['action_tokens']} tokens; the {cost['turns']} actions that "
        f"were chosen have {cost['taken_tokens']} tokens."
    )
    assert sentence in shown.output
    assert cost["actions"] == 3 * cost["turns"] > 0
    assert cost["action_tokens"] > cost["taken_tokens"] > 0
    assert "actions" not in plain.output
    assert sentence in write_report(recipe.parent / "runs" / "one").read_text()
    assert "candidates" not in summarize(recipe.parent / "runs" / "plain")["policies"][0]


def test_a_stamp_reads_as_one_line():
    stamp = {"name": "p", "select": {"name": "likelihood", "among": "actions", "samples": 4}, "seed": 1}

    assert protocol_line(stamp) == "p; the best of 4 actions at each turn by likelihood; seed 1"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["evaluate.sampling.temperature=0.0"],
            r"evaluate\.sampling\.temperature must be > 0, .* which are all equal at 0, got 0\.0",
        ),
        (
            ["evaluate.select.name=likelyhood"],
            r"unknown evaluate\.select\.name 'likelyhood'\. Did you mean 'likelihood'\?",
        ),
        (["evaluate.select.name=own_environment:nobody"], "cannot be loaded: AttributeError"),
        (
            ["evaluate.select.name=own_environment:__doc__"],
            "must be a function that gives scores, or a selector: a class",
        ),
        (
            ["evaluate.select.name=implicit-reward"],
            "no policy here is trained; score .* Or take .*name=likelihood, frequency or a",
        ),
        (["evaluate.select.samples=1"], r"evaluate\.select\.samples must be >= 2, got 1"),
        (
            ["evaluate.select.name=outcome"],
            r"name=outcome: it chooses among episodes alone, got .*among=actions",
        ),
        (
            ["evaluate.select.name=likelihood", "engine={name: api, base_url: 'http://127.0.0.1:9/v1'}"],
            "which engine 'api' does not give. Or take evaluate.select.name=frequency or a",
        ),
    ],
)
def test_a_choice_that_cannot_be_is_refused_before_work(recipe, words, told):
    with pytest.raises(ConfigError, match=told):
        check(read_recipe(recipe, [*RERANKED, *words]))
