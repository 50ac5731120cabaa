"""Logs whose records differ: in their format, in their task, or in the kind of their scores."""

import json
import weakref

import pytest
from typer.testing import CliRunner

from perturn.cli import app
from perturn.data.records import parse_line
from perturn.errors import DataError
from perturn.formats.logs.log_entries import Fields
from support.call_records import call, chat, said, user

EPISODE = {"messages": [user("q"), said("a")], "reward": 1}


def test_a_record_of_another_format_says_so(bring):
    """The first record chooses the format of a file. The others are not lost without a reason."""
    account, found = bring(call("yes", user("q"), reward=1), EPISODE, {"note": 1})

    assert len(found) == 1
    assert account.calls == {"turns": 1, "no_answer": 1, "no_call": 1}
    account, found = bring(EPISODE, {"session_id": "s", **call("no", user("q")), "reward": 0}, {"note": 1})
    assert len(found) == 1
    assert account.calls == {"rollouts": 1, "unsupported": 1, "no_call": 1}
    (fault,) = account.shown_faults()
    assert "log.jsonl:2: the record has the format requests, but its file is read as conversations" in fault


def test_a_request_among_conversations_is_no_conversation(bring):
    """The messages before a response may hold earlier answers, which the reward is not of."""
    request = {"messages": [user("q"), said("first"), user("more")], "response": said("last"), "reward": 0.5}

    account, found = bring(EPISODE, request, EPISODE | {"response": None})

    assert len(found) == 2
    assert account.calls == {"rollouts": 2, "unsupported": 1}
    assert "the record has response too" in next(account.shown_faults())


@pytest.mark.parametrize(
    ("record", "fault"),
    [
        (
            {"messages": [user("q"), said("a"), user("ok") | {"reward": 1}]},
            "one on a message with the role 'user'",
        ),
        ({**EPISODE, "truncated": "false"}, "truncated: expected true or false, got 'false'"),
    ],
)
def test_values_in_the_wrong_place_are_faults(record, fault, bring):
    account, found = bring(EPISODE, record)

    assert len(found) == 1
    assert account.calls == {"rollouts": 1, "unsupported": 1}
    assert fault in next(account.shown_faults())


def test_a_session_with_several_tasks_is_an_episode_for_each(bring):
    """Pairs never span two tasks. A call without a task has the task of the call before it."""
    first = chat("s", "a", "b", "c", reward=1)
    first[0]["metadata"], first[2]["metadata"] = {"task": "one"}, {"task": "two"}
    first[1]["reward"] = 0.5
    second = chat("z", "a", "b", reward=0)
    second[1]["metadata"] = {"task": "one"}

    account, found = bring(*first, *second, fields=Fields(task="metadata.task"))

    assert [(one.task.id, one.sample, len(one.turns)) for one in found] == [
        ("one", 0, 2),
        ("one", 1, 2),
        ("two", 0, 1),
    ]
    assert account.lacking == {"--task": 2}


def test_a_session_of_whole_episodes_is_an_error(bring):
    with pytest.raises(DataError, match="--session has no effect on conversations"):
        bring(EPISODE, fields=Fields(session="metadata.chat"))


def test_an_empty_file_beside_others_is_no_error(bring, tmp_path):
    """Logs that rotate leave empty files. A log of empty files alone is an error."""
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")

    account, found = bring(empty, EPISODE)

    assert len(found) == 1
    assert account.format == "conversations"
    with pytest.raises(DataError, match=r"empty\.jsonl holds no call with an answer"):
        bring(empty)


@pytest.mark.parametrize("held", [{"value": "much"}, [1], "4/5"])
def test_a_named_score_that_is_no_number_is_counted(held, bring):
    account, _ = bring(
        call("a", user("q"), stars=1), call("b", user("q"), stars=held), fields=Fields(score="stars")
    )

    assert (account.scores["used"], account.scores["unreadable"]) == (1, 1)
    assert "expected a number, true, false, or thumbs such as up" in next(account.shown_faults())


def test_a_comment_beside_a_rating_is_no_score(bring):
    """The comment `good` would be a second score, and the log would have two names of scores."""
    account, (found,) = bring(call("a", user("q"), feedback={"rating": 0, "comment": "good"}))

    assert (account.score, found.total_reward) == ("rating", 0.0)


GENERATION = {"id": "g", "type": "GENERATION", "traceId": "t", "input": [user("q")], "output": said("a")}
CATEGORY = {"name": "quality", "dataType": "CATEGORICAL", "observationId": "g", "value": 0}


@pytest.mark.parametrize(
    ("category", "reward"),
    [
        ({"stringValue": "good"}, 1.0),
        ({"stringValue": "middling", "configId": "c", "value": 0.5}, 0.5),
        ({"stringValue": "middling"}, None),
    ],
)
def test_a_category_is_a_score_if_its_text_or_its_configuration_says_so(category, reward, bring):
    """Langfuse writes the value 0 for a category that no configuration maps to a number."""
    account, (found,) = bring(GENERATION, CATEGORY | category)

    if reward is None:
        assert account.score is None
        assert "quality: expected a number, true, false" in next(account.shown_faults())
    else:
        assert (account.score, found.total_reward) == ("quality", reward)


def test_feedback_of_langsmith_that_is_no_number_is_a_fault(bring):
    run = {"id": "r", "run_type": "llm", "inputs": {"messages": [user("q")]}, "outputs": said("a")}

    account, _ = bring(run, {"run_id": "r", "key": "quality", "score": None, "value": "middling"})

    assert account.calls == {"turns": 1, "no_call": 1}
    assert "quality: expected a number" in next(account.shown_faults())


def test_a_category_in_the_statistics_of_a_run_is_a_fault(bring):
    """Categories have no average. Feedback of comments alone has neither, and is no score."""
    stats = {"quality": {"n": 1, "avg": None, "values": {"middling": 1}}, "note": {"n": 0, "avg": None}}
    run = {"id": "r", "run_type": "llm", "inputs": {"messages": [user("q")]}, "outputs": said("a")}

    account, _ = bring(run | {"feedback_stats": stats})

    assert account.calls == {"turns": 1, "no_call": 1}
    assert "quality: expected a number, true, false" in next(account.shown_faults())


@pytest.mark.parametrize(
    ("values", "reward"), [({"good": 1}, 1.0), ({"good": 3, "bad": 1}, 0.75), ({"good": 1, "so": 2}, None)]
)
def test_categories_in_the_statistics_of_a_run_are_averaged(values, reward, bring):
    """One category that is no score makes the feedback a fault, which names the categories."""
    run = {"id": "r", "run_type": "llm", "inputs": {"messages": [user("q")]}, "outputs": said("a")}

    account, (found,) = bring(run | {"feedback_stats": {"quality": {"avg": None, "values": values}}})

    if reward is None:
        assert "or thumbs such as up, got 'good, so'" in next(account.shown_faults())
    else:
        assert (account.score, found.total_reward) == ("quality", reward)


@pytest.mark.parametrize(("continued", "rewards"), [("a", [1, 0, 0]), ("b", [0, 1, 0]), (None, [1, 0, 0])])
@pytest.mark.parametrize("is_own", [True, False])
def test_the_score_of_a_response_is_of_its_only_continued_choice(continued, rewards, is_own, bring):
    """The score is in the record of the response, or in a record of its own."""
    first = call("a", user("q"), id="r", session_id="s")
    first["response"]["choices"].append({"message": said("b")})
    answered = [] if continued is None else [said(continued)]
    then = call("c", user("q"), *answered, user("more"), session_id="s")
    score = {"response_id": "r", "feedback": "up"}

    _, (found,) = bring(first, then, score) if is_own else bring(first | {"feedback": "up"}, then)

    assert [turn.reward for turn in found.turns] == rewards
    assert found.total_reward == 1


def test_calls_with_traces_of_their_own_are_grouped_by_their_messages(bring):
    """LiteLLM gives each call its own trace. A score of a trace is the reward of its call."""
    records = [each | {"trace_id": f"t{n}"} for n, each in enumerate(chat(None, "a", "b", "c"))]

    account, (found,) = bring(*records, {"trace_id": "t1", "feedback": "up"})

    assert [turn.reward for turn in found.turns] == [0.0, 1.0, 0.0]
    assert (account.sequences, account.scores["used"]) == (1, 1)


@pytest.mark.parametrize("name", ["requests", "otel", "langfuse"])
def test_the_field_of_the_trace_keeps_calls_apart(name, bring):
    records = [each | {"trace_id": f"t{n}"} for n, each in enumerate(chat(None, "a", "b"))]
    asked = [each["request"]["messages"] for each in records]
    if name == "otel":
        keys = ("gen_ai.input.messages", "gen_ai.output.messages")
        pairs = [zip(keys, (each, [said("ab"[n])]), strict=True) for n, each in enumerate(asked)]
        held = [[{"key": key, "value": {"stringValue": json.dumps(x)}} for key, x in pair] for pair in pairs]
        spans = [{"traceId": f"{n + 1:032x}", "attributes": each} for n, each in enumerate(held)]
        records = [{"resourceSpans": [{"scopeSpans": [{"spans": [each]}]}]} for each in spans]
    elif name == "langfuse":
        records = [
            GENERATION | {"id": f"g{n}", "traceId": f"t{n}", "input": each, "output": said("ab"[n])}
            for n, each in enumerate(asked)
        ]

    _, together = bring(*records)
    _, apart = bring(*records, fields=Fields(session="trace_id" if name == "requests" else "traceId"))

    assert (len(together), len(apart)) == (1, 2)


def test_tasks_of_one_call_keep_their_traces_and_scores(bring):
    """Equal calls do not extend each other, and the answer `x` is not in the log."""
    records = [call("a", user("q"), trace_id=f"t{n}", id=f"r{n}") for n in range(2)]
    other = call("b", user("q"), said("x"), user("more"), trace_id="t2")
    scores = [{"trace_id": f"t{n}", "feedback": value} for n, value in enumerate([1, 0.5, 0.25])]

    _, found = bring(*records, other, *scores)

    assert [(len(one.turns), one.total_reward) for one in found] == [(1, 1.0), (1, 0.5), (1, 0.25)]


@pytest.mark.parametrize("text", ["redacted-by-litellm", "a... (litellm_truncated skipped 12982 chars) ...b"])
def test_calls_whose_texts_litellm_cut_or_removed_have_no_answer(text, bring):
    """Their scores belong to the last whole call. LiteLLM sends such texts to tracing services too."""
    cut = call("a", user(text), session_id="s", feedback="up")
    traced = {**GENERATION, "output": said(text)}

    account, (found,) = bring(call("a", user("q"), session_id="s"), cut)
    also, _ = bring(GENERATION | {"id": "h"}, traced)

    assert account.calls == also.calls == {"turns": 1, "no_answer": 1}
    assert found.total_reward == 1
    assert "LiteLLM cut or removed a text of the call, or a text quotes its mark" in next(
        account.shown_faults()
    )


def test_the_episodes_of_a_task_are_not_in_memory_at_once(bring, monkeypatch):
    held, most = [], []

    def parse(*given):
        one = parse_line(*given)
        held.append(weakref.ref(one))
        most.append(sum(each() is not None for each in held))
        return one

    monkeypatch.setattr("perturn.run.log_import.import_logs.parse_line", parse)
    calls = [call("yes", user("q"), session_id=f"s{number}") for number in range(10)]
    bring(*calls)

    assert len(most) == 10
    assert max(most) <= 3


@pytest.mark.parametrize(
    ("score", "reward"), [({"label": "good"}, 1.0), ({"label": "middling"}, None), ({"value": 2}, 2.0)]
)
def test_a_label_of_an_evaluation_is_a_score_or_a_fault(score, reward, bring):
    def attributes(held):
        return [{"key": key, "value": {"stringValue": str(value)}} for key, value in held.items()]

    evaluation = {"gen_ai.evaluation.name": "judge"} | {
        f"gen_ai.evaluation.score.{key}": each for key, each in score.items()
    }
    held = {
        "gen_ai.prompt.0.role": "user",
        "gen_ai.prompt.0.content": "q",
        "gen_ai.completion.0.content": "a",
    }
    span = {"spanId": "01", "attributes": attributes(held | {"gen_ai.completion.0.role": "assistant"})}
    span["events"] = [{"name": "gen_ai.evaluation.result", "attributes": attributes(evaluation)}]

    account, (found,) = bring({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]})

    if reward is None:
        assert "judge: expected a number, true, false" in next(account.shown_faults())
    else:
        assert (account.score, found.total_reward) == ("judge", reward)


def test_the_command_shows_few_kinds_of_faults_and_says_where_all_are(tmp_path, monkeypatch):
    monkeypatch.setattr("perturn.cli.log_commands._SHOWN", 1)
    monkeypatch.chdir(tmp_path)
    broken = json.dumps({**EPISODE, "truncated": "no"})
    (tmp_path / "log.jsonl").write_text(f"{json.dumps(EPISODE)}\n{{ broken\n{broken}\n{broken}\n")

    printed = CliRunner().invoke(app, ["import-logs", "log.jsonl"]).output

    assert "broken: log.jsonl:2" in printed
    assert "unsupported: log.jsonl:3" not in printed
    assert "1 other kinds of faults; --json lists them" in printed
