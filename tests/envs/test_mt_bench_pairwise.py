"""Pairwise MT-Bench on made-up answers, with a judge that is a server of this machine."""

import json
import re

import pytest
from typer.testing import CliRunner

from engines.api.chat import KEY, Server, completion, heard, refusal
from engines.serving import serve
from perturn.analysis.pairwise_answers import by_judge
from perturn.analysis.run_comparison import compare_runs
from perturn.cli import app
from perturn.data.run_paths import RunPaths
from perturn.data.store import TrajectoryStore
from perturn.envs.mt_bench.judge_prompts import OWN_PAIRS, PAIR_HOLDS, read_templates
from perturn.errors import DataError, RunError
from perturn.types import Action, Status, Task, Trajectory, Turn

_SHOWN = re.compile(r"=== (?:Second answer|Answer) of model ([AB]) ===\n(.*?)(?=\n\n===)", re.DOTALL)
WORTH = {"good": 2, "fair": 1, "poor": 0}


def verdict(body):
    """The better word of A's and B's last answer; `first` makes the judge prefer A, and `mute` makes it say nothing."""
    shown = dict(_SHOWN.findall(heard(body)))
    words = [shown[side].split()[0] for side in "AB"]
    if "mute" in words:
        return "I cannot say: [[A]] or [[B]]."
    if "first" in words:
        return "[[A]]"
    a, b = (WORTH[word] for word in words)
    return "Because. [[C]]" if a == b else f"Because. [[{'A' if a > b else 'B'}]]"


@pytest.fixture
def server(monkeypatch):
    """A judge that follows `verdict`."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    state = Server(reply=lambda body, number: completion(verdict(body)))
    with serve(state.answer) as address:
        state.url = f"{address}/v1"
        yield state


def episode(number, answers, reference=None):
    """The recorded episode of a question: a question without an answer failed."""
    turns = [f"Question {number}.", f"Follow-up {number}."]
    said = zip(turns, answers, strict=False)
    ended = len(answers) == len(turns)
    return Trajectory(
        Task(
            f"{'math' if reference else 'writing'}/{number}",
            "",
            "test",
            {"turns": turns, "reference": reference},
        ),
        tuple(Turn(({"role": "user", "content": asked},), Action(answer)) for asked, answer in said),
        environment="mt-bench-1-gpt-judge-0",
        protocol="mt-bench-plain",
        terminated=ended,
        status=Status.COMPLETED if ended else Status.FAILED,
        error=None if ended else "EnvironmentFailure: no rating",
    )


@pytest.fixture
def record(tmp_path, server):
    """Write a run folder with these episodes, as `perturn evaluate` records it."""

    def run(name, episodes, environment="mt-bench", **judge):
        paths = RunPaths(tmp_path / name)
        with TrajectoryStore(paths.evaluation("base")) as store:
            for one in episodes:
                store.append(one)
        stamp = {
            "environment": "mt-bench-1-gpt-judge-0",
            "split": "test",
            "panel_sha256": "a",
            "n": len(episodes),
        }
        paths.stamp.write_text(json.dumps(stamp))
        reached = {"base_url": server.url, "max_retries": 0, "concurrency": 1}
        section = {"name": environment} | (
            {"judge": {"model": "gpt-judge", "server": reached} | judge} if environment == "mt-bench" else {}
        )
        recipe = {"model": {"name": "m"}, "environment": section, "evaluate": {}}
        paths.recipe.write_text(json.dumps(recipe))
        return paths.folder

    return run


def runs_of(record, theirs, ours, **judge):
    """Two runs whose answers to both questions of task i are theirs[i] and ours[i]."""
    return [
        record(name, [episode(number, (word, word)) for number, word in enumerate(words)], **judge)
        for name, words in (("sft", theirs), ("aligned", ours))
    ]


def compared(folders, *words):
    (found,) = compare_runs(folders, by_judge(words))
    return found.row


def counts(row):
    return [row[name] for name in ("n", "wins", "ties", "losses", "errors")]


def test_a_win_counts_only_if_both_orders_agree(record):
    """Task by task: win, win, a judge that prefers A in both orders, [[C]] twice, loss. (2 + 2/2) / 5 = 0.6."""
    folders = runs_of(
        record, ("poor", "fair", "first", "good", "good"), ("good", "good", "good", "good", "poor")
    )

    turns = compared(folders)["turns"]

    assert counts(turns["first"]) == [5, 2, 2, 1, 0]
    assert counts(turns["both"]) == [10, 4, 4, 2, 0]
    assert {row["win_rate"]["mean"] for row in turns.values()} == {0.6}
    assert turns["both"]["error_bounds"] == [0.6, 0.6]


def test_the_interval_treats_both_answers_of_a_task_as_one_cluster(record):
    """If they always agree, the interval of 10 outcomes is as wide as the interval of 5."""
    folders = runs_of(record, ("poor",) * 3 + ("good",) * 2, ("fair",) * 5)

    turns = compared(folders)["turns"]

    assert (turns["both"]["n"], turns["both"]["win_rate"]["n"]) == (10, 5)
    assert turns["both"]["win_rate"]["interval"] == pytest.approx(
        turns["first"]["win_rate"]["interval"], abs=1e-12
    )


def test_the_judge_sees_both_conversations_in_both_orders(record, server):
    """First the first answers, then the whole conversations; the reference answers in mathematics alone."""
    answers = {"sft": ("poor one", "fair two"), "aligned": ("good {answer_b}", "good four")}
    folders = [
        record(name, [episode(1, said), episode(2, said, ["Ref 1", "Ref 2"])])
        for name, said in answers.items()
    ]

    row = compared(folders)

    asked = [heard(body) for body in server.bodies]
    ours, theirs = ("good {answer_b}", "poor one"), ("poor one", "good {answer_b}")
    assert row["turns"]["both"]["wins"] == 4
    assert len(asked) == 8
    for text, (a, b), second, reference in zip(
        asked, (ours, theirs) * 4, (False, False, True, True) * 2, (True,) * 4 + (False,) * 4, strict=True
    ):
        assert text.index(a) < text.index(b)
        assert ("Follow-up" in text, "fair two" in text, "good four" in text) == (second,) * 3
        assert ("Ref 1" in text, "Ref 2" in text) == (reference, reference and second)
    assert {(body["model"], body["temperature"]) for body in server.bodies} == {("gpt-judge", 0.0)}


def test_a_judgment_without_a_single_verdict_is_an_error_that_is_counted(record, server):
    """Two tasks won, one without a verdict in both turns: it counts as a tie, (2 + 1/2) / 3, between 2/3 and 1."""
    row = compared(runs_of(record, ("poor", "poor", "poor"), ("good", "good", "mute"), tries=2))

    first = row["turns"]["first"]
    assert counts(first) == [3, 2, 0, 0, 1]
    assert first["win_rate"]["mean"] == pytest.approx(2.5 / 3, abs=1e-12)
    assert first["error_bounds"] == pytest.approx([2 / 3, 1], abs=1e-12)
    assert [(one["task"], one["turn"]) for one in row["problems"]] == [("writing/2", 1), ("writing/2", 2)]
    assert "no single verdict of [[A]], [[B]], [[C]], in 2 judgments" in row["problems"][0]["problem"]
    assert [body["seed"] for body in server.bodies] == [0] * 12 + [1] * 4


def test_a_missing_answer_is_an_error_that_is_counted(record, server):
    """The episode failed at its second answer, so the judge sees the first answers alone."""
    folders = [record("sft", [episode(0, ("poor",))]), record("aligned", [episode(0, ("good", "good"))])]

    row = compared(folders)

    assert (counts(row["turns"]["first"]), counts(row["turns"]["second"])) == (
        [1, 1, 0, 0, 0],
        [1, 0, 0, 0, 1],
    )
    assert row["problems"][0]["problem"] == "no answer of the second policy is recorded"
    assert len(server.bodies) == 2


def test_a_stopped_comparison_resumes_with_the_stored_judgments(record, server):
    """The account has no credit after 5 of 12 judgments; then the other 7 are asked, and after them none."""
    folders = runs_of(record, ("poor", "good", "fair"), ("good", "poor", "fair too"))
    server.reply = lambda body, number: completion(verdict(body)) if number < 5 else refusal(402)
    with pytest.raises(RunError, match=r"the judge cannot be asked.*no credit.*environment\.judge"):
        compared(folders)
    asked = len(server.bodies)
    server.reply = lambda body, number: completion(verdict(body))

    rows = [compared(folders), compared(folders)]

    assert asked == 6
    assert len(server.bodies) == 6 + 7
    assert rows[0] == rows[1]
    assert counts(rows[0]["turns"]["both"]) == [6, 2, 2, 2, 0]
    assert len((folders[1] / "judge/pairwise.jsonl").read_text().splitlines()) == 12


def test_equal_answers_tie_whatever_the_judge_prefers(record, server):
    """Both orders are one question, which is asked once: 2 judgments for 2 answers."""
    row = compared(runs_of(record, ("first",), ("first",)))

    assert counts(row["turns"]["both"]) == [2, 0, 2, 0, 0]
    assert len(server.bodies) == 2


def test_the_command_prints_win_rates_and_errors(record, server):
    """With another model for the judge; JSON has the numbers, and the scores are not compared."""
    folders = runs_of(record, ("poor", "poor"), ("good", "mute"))
    words = ["compare", *map(str, folders), "--pairwise", "environment.judge.model=other"]

    shown, rows = (CliRunner().invoke(app, [*words, *more]) for more in ([], ["--json"]))

    assert (shown.exit_code, rows.exit_code) == (0, 0)
    assert "aligned / base against sft / base, by other-" in shown.stdout
    assert "2 of 4 comparisons have no verdict and count as ties." in shown.stdout
    assert "would be 50.0\u00a0%; if all were won, 100.0\u00a0%" in shown.stdout
    assert {body["model"] for body in server.bodies} == {"other"}
    assert json.loads(rows.stdout)[0]["row"]["turns"]["both"]["wins"] == 2


def test_policies_of_one_run_are_compared_too(record):
    """The later policy with the earlier one."""
    folder = record("run", [episode(0, ("poor", "poor"))])
    with TrajectoryStore(RunPaths(folder).evaluation("sft")) as store:
        store.append(episode(0, ("good", "good")))

    (found,) = compare_runs([folder], by_judge([]))

    assert (found.a, found.b, found.row["turns"]["both"]["wins"]) == ("sft", "base", 2)


def test_runs_on_another_environment_are_refused(record):
    folders = [
        record(name, [episode(0, ("good", "good"))], environment="alfworld-like") for name in ("a", "b")
    ]

    with pytest.raises(
        RunError, match=r"--pairwise compares answers to mt-bench.*was scored on alfworld-like"
    ):
        compare_runs(folders, by_judge([]))


def test_our_templates_hold_what_they_must(tmp_path):
    """They are read back from a file of FastChat's layout; a template that lacks a placeholder is rejected."""
    rows = [
        {"name": name, "system_prompt": template.system, "prompt_template": template.template}
        for name, template in OWN_PAIRS.items()
    ]
    file = tmp_path / "templates.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_templates(file, PAIR_HOLDS) == OWN_PAIRS
    file.write_text("".join(json.dumps(row).replace("{answer_b_2}", "") + "\n" for row in rows))

    with pytest.raises(DataError, match=r"pair-v2-multi-turn'.*answer_b_2"):
        read_templates(file, PAIR_HOLDS)


def test_templates_of_a_file_are_what_the_judge_is_asked(record, server, tmp_path):
    """And the name of the judge says that the win rate is another."""
    rows = [
        {"name": name, "system_prompt": "S", "prompt_template": " ".join(f"{{{each}}}" for each in names)}
        for name, names in PAIR_HOLDS.items()
    ]
    file = tmp_path / "templates.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    server.reply = lambda body, number: completion("[[A]]")
    folders = runs_of(record, ("poor",), ("good",))

    own = compared(folders)
    theirs = compared(folders, f"environment.judge.template={file}")

    assert heard(server.bodies[-2]) == "Question 0. good poor Follow-up 0. good poor"
    assert heard(server.bodies[-1]) == "Question 0. poor good Follow-up 0. poor good"
    assert own["judge"] != theirs["judge"]
