"""A judge in the loop: rewards that replace the environment's or are added to them, and what it leaves unrated."""

import json
from dataclasses import replace

import pytest

from engines.api.chat import KEY, Server, completion, heard
from engines.serving import serve
from perturn.config.parsing import parse
from perturn.config.recipe import read_recipe
from perturn.config.reward_settings import JudgeSettings
from perturn.data.store import read_trajectories
from perturn.engines.judging.judge import Judge
from perturn.episodes.episode import Job, episode
from perturn.errors import ConfigError, EngineFailure
from perturn.run.execute import open_run, run_stages
from perturn.run.judging.judged_rewards import own_rewards, rate
from perturn.types import Action, EpisodeProtocol, Status, Task, Trajectory, Turn, score, unjudged
from support.examiner import Examiner

from .online import LETTERS, recipe_of

RECIPE = """
name: judged
model: {name: policy}
environment: {name: "letters.py:Letters"}
worlds: {processes: 0}
protocol: {name: tiny, format: action, system: Talk., max_turns: 3}
engine: &server {name: api, base_url: URL, max_retries: 3}
explore: {per_iteration: 3, samples: 2, sampling: {temperature: 1.0, max_new_tokens: 4}}
evaluate: {tasks: {split: test, n: 2}}
reward:
  judge: {model: judge, rubric: Say a letter., engine: *server, scale: [0, 4]}
"""


def judge_of(say, **settings):
    """The settings of a judge of the scale 0 to 4, and the judge."""
    found = parse(JudgeSettings, {"model": "m", "rubric": "r", "scale": [0, 4], **settings})
    engine = Examiner(say)
    return found, Judge(engine, found.sampling, found.scale, "s", found.samples, found.tries)


def turn(text, reward=0.0):
    return Turn(({"role": "user", "content": "Go on."},), Action(text), reward)


def played(*turns, **changes):
    total = sum(each.reward for each in turns)
    ended = {"terminated": True, "total_reward": total} | changes
    return Trajectory(Task("t/0"), turns, environment="letters-1.0", **ended)


EPISODE = played(turn("a", 0.5), turn("z", 0.0), turn("b", 0.5))


def rated(episodes, say, **settings):
    """Episodes that a judge rated, and the counts."""
    found, judge = judge_of(say, **settings)
    counts = {"judged": 0, "judgments": 0, "unreadable": 0, "unjudged": 0}
    return rate(episodes, found, judge, counts), counts


def rewards(episode):
    return [each.reward for each in episode.turns], episode.total_reward


def test_an_episodes_rating_rewards_its_last_turn():
    """3 of 0 to 4, weight 2: 1.5, in place of the environment's 1.0, which stays in the record."""
    (found,), counts = rated([EPISODE], lambda text, seed: "[[3]]", weight=2.0)

    assert rewards(found) == ([0.0, 0.0, 1.5], 1.5)
    assert [each.own_reward for each in found.turns] == [0.5, 0.0, 0.5]
    assert counts == {"judged": 1, "judgments": 1, "unreadable": 0, "unjudged": 0}


def test_a_turns_rating_is_added_to_its_reward():
    """Ratings 4, 0 and 4 by the newest action: 1, 0 and 1 beside 0.5, 0 and 0.5."""
    good = '"content": "z"}\n\n=== End'
    (found,), counts = rated(
        [EPISODE], lambda text, seed: "[[0]]" if good in text else "[[4]]", of="turn", rewards="add"
    )

    assert rewards(found) == ([1.5, 0.0, 1.5], 3.0)
    assert counts["judgments"] == 3


def test_several_ratings_are_averaged():
    """0, 4 and none: 2 of 4."""
    says = {0: "[[0]]", 3: "[[4]]"}
    sampling = {"temperature": 1.0}
    (found,), counts = rated(
        [EPISODE], lambda text, seed: says.get(seed, "Hm."), samples=3, sampling=sampling
    )

    assert found.total_reward == 0.5
    assert (counts["judgments"], counts["unreadable"]) == (3, 1)


def test_an_episode_without_a_rating_fails_and_the_others_do_not():
    """It keeps its turns and the environment's rewards, from which another judge can rate it."""
    other = replace(EPISODE, task=Task("t/1"), turns=(turn("c"),), total_reward=0.0)
    found, counts = rated([EPISODE, other], lambda text, seed: "[[4]]" if '"c"' in text else "Hm.")

    assert [one.status for one in found] == [Status.FAILED, Status.COMPLETED]
    assert unjudged(found[0])
    assert not unjudged(replace(EPISODE, status=Status.FAILED, error="WorldLost: it died."))
    assert "no rating from 0 to 4" in found[0].error
    assert (score(found[0]), score(found[1])) == (0.0, 1.0)
    assert (counts["judged"], counts["unjudged"]) == (1, 1)
    assert [own_rewards(one) for one in found] == [EPISODE, own_rewards(other)]


@pytest.mark.parametrize("rewards", ["replace", "add"])
def test_an_episode_that_is_rated_again_is_unchanged(rewards):
    """All rewards are 0 then: 1 is replaced by 0, and 1 is added to -1. The total is not the environment's."""
    episode, rating = {
        "replace": (played(turn("a"), turn("b", 1.0)), "[[0]]"),
        "add": (played(turn("a"), turn("b", -1.0)), "[[4]]"),
    }[rewards]
    (once,), _ = rated([episode], lambda text, seed: rating, rewards=rewards)
    (again,), _ = rated([own_rewards(once)], lambda text, seed: rating, rewards=rewards)

    assert [each.reward for each in once.turns] == [0.0, 0.0]
    assert again == once
    assert own_rewards(again) == episode


@pytest.mark.parametrize("of", ["turn", "episode"])
def test_what_goes_on_has_no_outcome_yet(of):
    """Its turns are rated all the same; an episode that failed, or has no turn, is not."""
    begun = played(turn("a"), status=Status.UNFINISHED, terminated=False)
    broken = played(turn("a"), status=Status.FAILED, error="WorldLost: it died.")
    found, counts = rated([begun, broken, played()], lambda text, seed: "[[4]]", of=of)

    assert [one.total_reward for one in found] == [1.0 if of == "turn" else 0.0, 0.0, 0.0]
    assert counts["judged"] == (of == "turn")


def test_an_unjudged_episode_keeps_the_error_that_truncated_it():
    """A judge that is back finds the episode as it was played."""
    full = replace(EPISODE, terminated=False, truncated=True, error="ContextFull: 9 tokens\nand more")
    (found,), _ = rated([full], lambda text, seed: EngineFailure("no\nanswer"))

    assert unjudged(found)
    assert (
        found.error == "JudgeFailure: the judge gave no judgment: no answer\nContextFull: 9 tokens\nand more"
    )
    assert own_rewards(found) == full


def test_an_outcome_that_no_turn_has_is_added_to_the_judges_rewards():
    """A user's file may give the total reward alone; a second rating starts from the same outcome."""
    brought = played(turn("a"), turn("z"), total_reward=1.0)
    for _ in range(2):
        (found,), _counts = rated([own_rewards(brought)], lambda text, seed: "[[2]]", rewards="add")
        assert rewards(found) == ([0.0, 1.5], 1.5)
        brought = found
    given = played(
        turn("a", reward=0.25), turn("z", reward=0.75), total_reward=0.0
    )  # the file gives no total
    assert own_rewards(given).total_reward == 1.0


def test_an_unjudged_episode_that_goes_on_goes_on():
    begun = played(turn("a"), status=Status.UNFINISHED, terminated=False)
    (found,), _ = rated([begun], lambda text, seed: EngineFailure("no"), of="turn")

    assert own_rewards(found) == begun


def test_a_rated_episode_is_resumed_by_the_environments_rewards(letters):
    """The world pays 0.5 for `a`, and the judge's 1.0 does not keep it from coming back to its second turn."""
    protocol = EpisodeProtocol("p", format="action", max_turns=3)
    task = letters.tasks("train")[0]

    def play(job, *actions):
        steps = episode(letters, job, protocol=protocol)
        said = iter(actions)
        try:
            next(steps)
            while True:
                steps.send(Action(f"Action: {next(said)}"))
        except StopIteration as end:
            return end.value

    (found,), _ = rated([play(Job(task, 0), "a", "z")], lambda text, seed: "[[4]]", of="turn")

    again = play(Job(task, 0, sample=1, begun=found, kept=1), "b")

    assert [each.reward for each in found.turns] == [1.0, 1.0]
    assert (again.status, again.total_reward) == (Status.COMPLETED, 1.0)


@pytest.fixture
def letters(tmp_path, monkeypatch):
    namespace = {}
    exec(LETTERS, namespace)
    return namespace["Letters"]()


@pytest.fixture
def server(monkeypatch):
    """A policy that says `a`, and a judge that gives 3."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    state = Server(
        reply=lambda body, number: completion("[[3]]" if body["model"] == "judge" else "Action: a")
    )
    with serve(state.answer) as address:
        state.url = f"{address}/v1"
        yield state


@pytest.fixture
def collect(server, tmp_path, monkeypatch):
    """Do a stage of the recipe in this process; the run's folder, and the judge's questions."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "letters.py").write_text(LETTERS)
    (tmp_path / "judged.yaml").write_text(RECIPE.replace("URL", server.url))

    def collect(*words, command="collect"):
        server.bodies.clear()
        with open_run(tmp_path / "judged.yaml", words, command) as run:
            run_stages(run, command)
        return tmp_path / "runs/judged", [body for body in server.bodies if body["model"] == "judge"]

    return collect


def test_a_run_has_the_judges_rewards_and_keeps_the_environments(collect):
    """Six episodes of two rewarded turns; the last one of each has 3 of 4 instead."""
    run, asked = collect()

    episodes = list(read_trajectories(run / "trajectories/explore.jsonl"))
    counts = json.loads((run / "manifest.json").read_text())["stages"]["explore"]["counts"]
    assert [rewards(one) for one in episodes] == [([0.0, 0.75], 0.75)] * 6
    assert {each.own_reward for one in episodes for each in one.turns} == {0.5}
    assert (counts["judged"], counts["judgments"], counts["failed"]) == (6, 6, 0)
    assert {body["temperature"] for body in asked} == {0.0}
    assert "Say a letter." in heard(asked[0])
    assert len((run / "judge/api.jsonl").read_text().splitlines()) == len(asked)


def test_a_run_that_stopped_asks_its_judge_nothing_twice(collect, server):
    """The account is empty at the third question; the same command goes on, and asks what is left."""
    asked = []

    def empty(body, number):
        if body["model"] == "judge":
            asked.append(body)
            if len(asked) > 2:
                return 402, {"error": {"message": "no credit", "type": "t", "code": None}}
        return completion("[[3]]" if body["model"] == "judge" else f"Action: a{number}")

    server.reply = empty
    with pytest.raises(Exception, match=r"the judge cannot be asked.*no credit.*reward\.judge"):
        collect("reward.judge.engine.concurrency=1")
    server.reply = lambda body, number: completion("[[3]]")

    run, again = collect("reward.judge.engine.concurrency=1")

    assert len(again) == 4
    assert all(one.total_reward == 0.75 for one in read_trajectories(run / "trajectories/explore.jsonl"))


def test_a_judge_that_nobody_can_read_does_not_stop_the_run(collect, server):
    """All episodes are played, counted and FAILED. Equal episodes of a task are asked about once, at each try."""
    server.reply = lambda body, number: completion("Fine." if body["model"] == "judge" else "Action: a")

    run, asked = collect("reward.judge.tries=2")

    counts = json.loads((run / "manifest.json").read_text())["stages"]["explore"]["counts"]
    assert (counts["episodes"], counts["failed"], counts["unjudged"], counts["unreadable"]) == (6, 6, 6, 6)
    assert len(asked) == 3 * 2


def test_evaluations_have_the_environments_score_unless_the_recipe_says_otherwise(collect):
    """1.0 by the environment; 0.75 by the judge, whom the stamp of the score then names."""
    run, asked = collect(command="evaluate")
    assert [one.total_reward for one in read_trajectories(run / "evaluation/base.jsonl")] == [1.0] * 2
    assert not asked
    assert "judge" not in json.loads((run / "evaluation/protocol.json").read_text())

    words = ("reward.judge.evaluates=true", "output=other")
    collect(*words, command="evaluate")
    other = run.parents[1] / "other/judged"
    assert [one.total_reward for one in read_trajectories(other / "evaluation/base.jsonl")] == [0.75] * 2
    assert json.loads((other / "evaluation/protocol.json").read_text())["judge"]["model"] == "judge"


def test_an_expert_that_rows_compare_is_rated_too(collect):
    """`left` and `right` have 0.75 from the judge, as the explored episodes have, and not the environment's reward."""
    run, asked = collect("rows.name=expert-pairs")

    episodes = list(read_trajectories(run / "trajectories/expert.jsonl"))
    assert {one.total_reward for one in episodes} == {0.75}
    assert {one.success for one in episodes} == {True, False}
    assert len(asked) == len(episodes) + 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["reward={}"], "reward.judge or model must be set; without both, leave reward out"),
        (["reward.judge.rubric=' '"], "rubric must say what is rated"),
        (["reward.judge.scale=[4, 0]"], "scale must be .lowest, highest., got .4, 0."),
        (["reward.judge.scale=[1]"], r"reward\.judge\.scale must be"),
        (["reward.judge.samples=3"], "samples > 1 at temperature 0 are one judgment"),
        (["reward.judge.of=step"], r"reward\.judge\.of must be 'episode' or 'turn'"),
        (
            ["reward.judge.learning_rate=1e-4"],
            "unknown key 'reward.judge.learning_rate'",
        ),
        (["reward.model.rubric=x"], r"unknown key 'reward.model.rubric'"),
        (["reward.judge.engine={}"], r"engine\.name is missing"),
        (["reward.judge.weight=0"], "weight must be > 0"),
        (["explore=null"], "the recipe explores nothing"),
    ],
)
def test_a_judge_that_could_not_work_is_refused(collect, tmp_path, words, said):
    with pytest.raises(ConfigError, match=said):
        read_recipe(tmp_path / "judged.yaml", words)


def test_a_judge_beside_corrections_is_refused(tmp_path):
    judge = "reward.judge={model: m, rubric: r}"
    with pytest.raises(ConfigError, match=r"reward\.judge rates no corrections"):
        recipe_of(tmp_path, "rows={name: corrections}", "align.minibatches=null", judge)


def test_a_judges_missing_key_shows_before_work(collect, monkeypatch):
    monkeypatch.delenv("OTHER_KEY", raising=False)
    with pytest.raises(ConfigError, match="OTHER_KEY must hold a key, and is not set"):
        collect("reward.judge.engine.api_key_env=OTHER_KEY")
