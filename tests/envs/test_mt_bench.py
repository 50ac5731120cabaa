"""MT-Bench on made-up questions, with a judge that is a server of this machine."""

import json
import time

import pytest
from typer.testing import CliRunner

from engines.api.chat import KEY, Server, completion, heard, refusal
from engines.serving import serve
from perturn.analysis.run_comparison import compare_runs
from perturn.cli import app
from perturn.data.store import read_trajectories
from perturn.engines.api.settings import ApiSettings
from perturn.engines.judging.judge_engine import open_engine
from perturn.envs.environment_check import check_environment
from perturn.envs.mt_bench.environment import MT_BENCH, MTBench, read_tasks
from perturn.envs.mt_bench.examiner import ExaminerSettings
from perturn.envs.mt_bench.judge_prompts import HOLDS, OWN, read_templates
from perturn.episodes.episode import Job, episode
from perturn.errors import ConfigError, DataError, EnvironmentFailure, RunError
from perturn.types import Action, Status
from support.models import make_tiny_model

QUESTIONS = [
    {"question_id": 1, "category": "writing", "turns": ["Write on tin.", "Now shorter."]},
    {"question_id": 2, "category": "math", "turns": ["What is 6 x 7?", "And twice that?"]},
    {"question_id": 3, "category": "writing", "turns": ["Write on wool.", "Now in rhyme."]},
]
REFERENCES = [{"question_id": 2, "choices": [{"index": 0, "turns": ["It is 42.", "It is 84."]}]}]


def write_lines(file, rows):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The files in FastChat's layout, which the variable names."""
    data = tmp_path / "mt_bench"
    write_lines(data / "question.jsonl", QUESTIONS)
    write_lines(data / "reference_answer/gpt-4.jsonl", REFERENCES)
    monkeypatch.setenv("MTBENCH_DATA", str(data))
    return data


@pytest.fixture
def server(monkeypatch):
    """A judge who gives 8 to first answers and 5 to second ones."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    state = Server(reply=lambda body, number: completion(f"Fine. [[{8 - 3 * is_second(body)}]]"))
    with serve(state.answer) as address:
        state.url = f"{address}/v1"
        yield state


def is_second(body):
    """Whether a judge is asked about a second answer."""
    return heard(body).count("=== Answer of the model ===") == 2


@pytest.fixture
def make(folder, server):
    """Make worlds with other settings of the server or the judge; their connections are closed in the end."""
    opened = []

    def world(tries=3, template=None, **settings):
        asked = ApiSettings(**{"base_url": server.url, "max_retries": 0} | settings)
        made = MTBench(ExaminerSettings("gpt-judge", asked, tries, template))
        opened.append(made._judge.judge.engine)
        return made

    yield world
    open_engine.cache_clear()
    for engine in opened:
        engine.close()


def played(world, number=0, answers=("First.", "Second.")):
    """The episode of a question with these answers."""
    steps = episode(world, Job(world.tasks("test")[number], seed=0), protocol=MT_BENCH)
    said = iter(answers)
    try:
        next(steps)
        while True:
            steps.send(Action(next(said)))
    except StopIteration as end:
        return end.value


def test_rewards_are_the_ratings_over_20(make):
    """Ratings 8 and 5: rewards 0.4 and 0.25, in all 0.65, so that MT-Bench's number is 6.5."""
    found = played(make())

    assert [turn.reward for turn in found.turns] == [0.4, 0.25]
    assert found.total_reward == pytest.approx(0.65, abs=1e-12)
    assert (found.status, found.terminated, found.success) == (Status.COMPLETED, True, False)
    assert [turn.observation_text for turn in found.turns] == QUESTIONS[0]["turns"]


def test_the_judge_sees_the_first_answer_alone_then_the_conversation(make, server):
    """At temperature 0, by its model's name, with the key of the environment."""
    played(make(), answers=("Tin is {question_2} a metal.", "Metal."))

    first, second = map(heard, server.bodies)
    assert "Write on tin." in first
    assert "Tin is {question_2} a metal." in first
    assert "Now shorter." not in first
    assert all(
        text in second for text in ("Write on tin.", "Tin is {question_2} a metal.", "Now shorter.", "Metal.")
    )
    assert {(body["model"], body["temperature"]) for body in server.bodies} == {("gpt-judge", 0.0)}
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"


def test_reference_answers_are_shown_where_there_are_some(make, server):
    """The first one with the first answer, both with the second; none of a question about writing."""
    world = make()
    for number in (0, 1):
        played(world, number)

    said = [heard(body) for body in server.bodies]
    assert ["It is 42." in text for text in said] == [False, False, True, True]
    assert ["It is 84." in text for text in said] == [False, False, False, True]
    assert ["Correct answer" in text for text in said] == [False, False, True, True]


def test_an_empty_answer_is_rated_too(make, server):
    """It is an answer like any other, which takes its turn."""
    found = played(make(), answers=("", " \n"))

    assert (len(found.turns), len(server.bodies), found.status) == (2, 2, Status.COMPLETED)


def test_it_keeps_the_contract_of_environments(make):
    """As `perturn check-env` looks at it."""
    assert check_environment(make, split="test") == []


def test_a_judgment_without_a_rating_is_asked_for_again(make, server):
    """With another seed; the third one has a rating."""
    server.reply = lambda body, number: completion("[[6]]" if number >= 2 else "Hm.")

    found = played(make())

    assert found.turns[0].reward == 0.3
    assert [body["seed"] for body in server.bodies] == [0, 1, 2, 0]


def test_an_episode_without_a_rating_fails(make, server):
    """After `tries` judgments; the first answer's rating stays on its turn, and no score is made of it."""
    server.reply = lambda body, number: completion("No grade." if is_second(body) else "[[9]]")

    found = played(make(tries=2))

    assert found.status is Status.FAILED
    assert "no rating from 1 to 10" in found.error
    assert "'No grade.'" in found.error
    assert len(server.bodies) == 3


def slow(body, number):
    time.sleep(5.0)
    return completion("[[9]]")


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (lambda body, number: refusal(500, "broken"), "broken"),
        (lambda body, number: (200, "{half of"), "no chat completion"),
        (lambda body, number: (200, {"choices": []}), "no chat completion"),
        (slow, "timed out"),
    ],
    ids=["500", "garbage", "no choices", "slow"],
)
def test_a_judge_that_does_not_answer_fails_the_episode(make, server, reply, said):
    """With the server's own words; the next episode is played."""
    server.reply = reply
    world = make(timeout=2.0)
    found = played(world)
    server.reply = lambda body, number: completion("[[9]]")

    after = played(world, 2)

    assert found.status is Status.FAILED
    assert "the judge gave no judgment" in found.error
    assert said in found.error
    assert after.total_reward == pytest.approx(0.9, abs=1e-12)


@pytest.mark.parametrize(
    "refused", [refusal(401, "no such key"), refusal(402, "no credit"), refusal(404, "gone")]
)
def test_a_judge_that_nobody_can_ask_ends_the_run(make, server, refused):
    """It would fail all episodes, so none is recorded as failed."""
    server.reply = lambda body, number: refused

    with pytest.raises(RunError, match=r"the judge cannot be asked.*environment\.judge"):
        played(make())


def test_worlds_share_the_budget_of_their_judge(make, server):
    """15 tokens a judgment: the fourth, of the second world, would begin beyond 40."""
    worlds = [make(max_tokens_total=40), make(max_tokens_total=40)]
    played(worlds[0])

    with pytest.raises(RunError, match="budget"):
        played(worlds[1], 1)
    assert len(server.bodies) == 3


def test_a_key_that_is_missing_shows_at_once(make, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY")

    with pytest.raises(ConfigError, match="OPENAI_API_KEY must hold a key, and is not set"):
        make()


def test_tasks_are_the_questions_by_category(folder):
    """In the order of the file, each with its reference answers if it has some."""
    tasks = read_tasks(str(folder))

    assert [(task.id, task.kind, task.split) for task in tasks] == [
        ("writing/1", "writing", "test"),
        ("math/2", "math", "test"),
        ("writing/3", "writing", "test"),
    ]
    assert [task.data["reference"] for task in tasks] == [None, ["It is 42.", "It is 84."], None]


@pytest.mark.parametrize("missing", ["question.jsonl", "reference_answer/gpt-4.jsonl"])
def test_files_that_are_missing_are_told_with_where_to_get_them(folder, monkeypatch, missing):
    (folder / missing).unlink()
    with pytest.raises(EnvironmentFailure, match=f"{missing}.*FastChat.*MTBENCH_DATA"):
        read_tasks(None)

    monkeypatch.delenv("MTBENCH_DATA")
    with pytest.raises(EnvironmentFailure, match=r"FastChat.*environment\.data or \$MTBENCH_DATA"):
        read_tasks(None)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"question_id": 4, "category": "writing", "turns": ["one"]}, "turns"),
        ({"question_id": 4, "turns": ["one", "two"]}, "category"),
        ({"question_id": "4", "category": "writing", "turns": ["one", "two"]}, "question_id"),
        (
            {"question_id": 4, "category": "coding", "turns": ["one", "two"]},
            "has no answer in reference_answer",
        ),
    ],
)
def test_a_malformed_question_is_told_with_its_line(folder, row, said):
    write_lines(folder / "question.jsonl", [*QUESTIONS, row])

    with pytest.raises(DataError, match=rf"question\.jsonl:4.*{said}"):
        read_tasks(str(folder))


def test_our_templates_hold_what_they_must(tmp_path):
    """They are read back from a file of the same layout, in which further templates are ignored."""
    rows = [
        {"name": name, "system_prompt": template.system, "prompt_template": template.template}
        for name, template in OWN.items()
    ]

    assert (
        read_templates(write_lines(tmp_path / "templates.jsonl", [rows[0] | {"name": "pair-v2"}, *rows]))
        == OWN
    )


@pytest.mark.parametrize("name", HOLDS)
def test_a_template_that_lacks_a_name_is_refused(tmp_path, name):
    rows = [
        {"name": each, "system_prompt": "", "prompt_template": " ".join(f"{{{held}}}" for held in names)}
        for each, names in HOLDS.items()
    ]
    for row in rows:
        if row["name"] == name:
            row["prompt_template"] = row["prompt_template"].rpartition(" ")[0]

    with pytest.raises(DataError, match=f"{name}'.*{HOLDS[name][-1]}"):
        read_templates(write_lines(tmp_path / "templates.jsonl", rows))


def test_templates_of_a_file_are_what_the_judge_is_asked(make, server, tmp_path):
    """And the name of the environment says that scores are others."""
    rows = [
        {"name": name, "system_prompt": "S", "prompt_template": " ".join(f"{{{each}}}" for each in names)}
        for name, names in HOLDS.items()
    ]
    server.reply = lambda body, number: completion("[[2]]")
    world = make(template=str(write_lines(tmp_path / "templates.jsonl", rows)))

    played(world, 1, ("42", "84"))

    assert [heard(body) for body in server.bodies] == [
        "What is 6 x 7? 42 It is 42.",
        "What is 6 x 7? 42 And twice that? 84 It is 42. It is 84.",
    ]
    assert world.name != make().name
    assert world.name.startswith("mt-bench-1-gpt-judge-")


@pytest.mark.slow
def test_policies_are_scored_and_compared_by_one_command_each(make, server, tmp_path, tokenizer):
    """Two tiny policies on the three questions; the second one's second answers get 2 more: 0.1 in all."""
    better = []
    server.reply = lambda body, number: completion(f"[[{6 + 2 * (bool(better) and is_second(body))}]]")
    for name in ("sft", "aligned"):
        model = make_tiny_model(len(better) + 1)
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        words = ["evaluate", "--model", str(tmp_path / name), "--environment", "mt-bench", f"name={name}"]
        words += ["environment.judge.model=gpt-judge", f"environment.judge.server.base_url={server.url}"]
        words += ["evaluate.sampling={max_new_tokens: 4}", f"output={tmp_path / 'runs'}", "--json"]
        result = CliRunner().invoke(app, words, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        better.append(json.loads(result.stdout)["policies"][0])

    runs = [tmp_path / "runs" / name for name in ("sft", "aligned")]
    (found,) = compare_runs(runs)
    episodes = list(read_trajectories(runs[1] / "evaluation/base.jsonl"))
    assert [row["mean_score"] for row in better] == pytest.approx([0.6, 0.7])
    assert [(row["n"], row["failed"], row["mean_turns"]) for row in better] == [(3, 0, 2.0)] * 2
    assert found.row["mean_difference"] == pytest.approx(0.1)
    assert {tuple(round(20 * turn.reward) for turn in one.turns) for one in episodes} == {(6, 8)}
    assert not any("Thought" in str(one.prompt) for one in episodes)
