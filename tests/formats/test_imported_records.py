"""Records that an import must read whole: nulls of Parquet, other roles, a success, and calls that cannot be read."""

import base64
import json

import pyarrow
import pyarrow.parquet
import pytest

from perturn.data.store import read_trajectories
from perturn.formats.chat_messages import read_messages
from perturn.formats.logs.read_logs import format_of
from perturn.run.log_import.import_logs import LogSettings, import_logs
from support.call_records import call, said, user


@pytest.fixture
def bring(tmp_path):
    """Import records that are written to a file, as JSON lines or Parquet; (account, trajectories)."""

    def bring(*records, name="log.jsonl", **settings):
        file = tmp_path / name
        if name.endswith(".parquet"):
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(records)), file)
        else:
            file.write_text("".join(json.dumps(each) + "\n" for each in records))
        account = import_logs([file], tmp_path / "out.jsonl", LogSettings(**settings))
        return account, list(read_trajectories(tmp_path / "out.jsonl"))

    return bring


def calling(*names, arguments=None):
    """An assistant message that calls tools; the id of each call begins with the name of its tool."""
    calls = [
        {"id": f"{name}-7f3a", "type": "function", "function": {"name": name, "arguments": arguments or {}}}
        for name in names
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def result(text, call=None):
    return {"role": "tool", "content": text} | ({"tool_call_id": call} if call else {})


def test_nulls_that_parquet_fills_in_are_absent(bring, tmp_path):
    """A null among `rewards` belongs to its message. A null reward in the first row does not change the format."""
    schemas = [
        {
            "type": "function",
            "function": {"name": name, "parameters": {"properties": {key: {"type": "string"}}}},
        }
        for name, key in (("weather", "city"), ("events", "date"))
    ]
    asked = {
        "messages": [user("a"), calling("weather", arguments={"city": "Oslo"})],
        "tools": schemas,
        "rewards": None,
    }
    also = {"messages": [user("b"), calling("events", arguments={"date": "May"}), result("x"), said("y")]}
    records = asked | {"reward": None}, asked | {"reward": 1.0}, also | {"rewards": [None, 1.0]}

    account, found = bring(*records, name="log.parquet")

    assert format_of(tmp_path / "log.parquet") == "conversations"
    assert account.calls == {"rollouts": 2, "unscored": 1}
    assert found[0].turns[0].action.tool_calls[0]["function"]["arguments"] == {"city": "Oslo"}
    assert found[0].tools[0]["function"]["parameters"] == {"properties": {"city": {"type": "string"}}}
    assert [turn.reward for turn in found[1].turns] == [0.0, 1.0]


def test_answers_are_stored_without_ids_of_calls(bring):
    """Ids are random, so that equal episodes would seem to differ. A call of a log has no id either."""
    messages = [user("q"), calling("look"), result("x", "look-7f3a"), said("a")]
    logged = call("", user("q"), session_id="s")
    logged["response"]["choices"][0]["message"] = messages[1]

    _, (rollout,) = bring({"messages": messages, "reward": 1})
    _, (episode,) = bring(logged)

    assert ["id" in one.turns[0].action.tool_calls[0] for one in (rollout, episode)] == [False, False]
    assert rollout.is_one_sequence


def test_the_success_and_the_id_of_the_task_of_a_record_are_read(bring):
    """`success` counts before the sign of the reward, and the threshold of the user before `success`."""
    messages = [user("Continue."), said("a")]
    records = [
        {"messages": messages, "reward": -1, "success": True, "task_id": 0},
        {"messages": messages, "reward": 0.5, "success": False, "task_id": 1, "plan": "slow", "id": 4},
        {"messages": messages, "reward": 0.5, "task_id": 2, "task": "b", "plan": None},
    ]

    account, found = bring(*records)

    assert [(one.task.id, one.success) for one in found] == [("0", True), ("1", False), ("b", True)]
    assert account.to_dict()["unread"] == {"plan": 1}
    _, found = bring(*records, success_at=0.25)
    assert [one.success for one in found] == [False, True, True]


def test_the_command_prints_the_keys_that_it_ignores(bring, tmp_path):
    account, _ = bring({"messages": [user("q"), said("a")], "reward": 1, "plan": "slow"})

    from perturn.cli.log_commands import _summary

    assert "keys that nothing reads: plan (1 rows)" in _summary(account)


def test_an_episode_may_begin_with_a_greeting(bring):
    """The greeting is a turn without an observation, as in rows of conversations. It does not name the task."""
    greeted = [said("Hello!"), user("q"), said("a")]

    _, (found,) = bring({"messages": greeted, "rewards": [0.25, 0.5]})

    assert found.task.id == "q"
    assert [(turn.observation, turn.action.text, turn.reward) for turn in found.turns] == [
        ((), "Hello!", 0.25),
        ((user("q"),), "a", 0.5),
    ]
    assert found.is_one_sequence


def test_a_call_with_broken_arguments_becomes_text_without_loss(bring):
    """The later requests hold it as text too, so the episode stays one sequence."""
    broken = calling("look", arguments='{"at":')
    messages = [user("q"), broken, result("error", "look-7f3a"), said("a")]
    logged = [call("", user("q"), session_id="s", time=1), call("a", *messages[:3], session_id="s", time=2)]
    logged[0]["response"]["choices"][0]["message"] = broken

    for account, (found,) in (bring({"messages": messages, "reward": 1}), bring(*logged)):
        assert [turn.trained for turn in found.turns] == [False, True]
        assert found.turns[0].action.tool_calls == ()
        assert found.turns[0].action.text.startswith('[{"type": "function", "function": {"name": "look"')
        assert found.is_one_sequence
        (fault,) = account.shown_faults()
        assert fault.startswith("without loss: ")
        assert "log.jsonl:1: " in fault


@pytest.mark.parametrize("role", ["Assistant", "gpt", "model"])
def test_every_name_of_the_assistant_is_a_turn(role, bring):
    messages = [{"role": "Human", "content": "q"}, {"role": role, "content": "a"}, user("x"), said("b")]
    logged = call("c", *messages, user("y"))

    _, (found,) = bring({"messages": messages, "rewards": [0.25, 0.5]})
    _, (episode,) = bring(logged)

    assert [(turn.action.text, turn.reward) for turn in found.turns] == [("a", 0.25), ("b", 0.5)]
    assert [each["role"] for each in episode.messages] == ["user", "assistant"] * 3


def test_conversations_of_sharegpt_are_read(bring, tmp_path):
    messages = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]

    _, (found,) = bring({"conversations": messages, "reward": 1})

    assert format_of(tmp_path / "log.jsonl") == "conversations"
    assert found.messages == [user("q"), said("a")]


def test_a_separate_message_of_calls_is_no_context(bring):
    calls = {"from": "function_call", "value": '{"name": "look", "arguments": {}}'}
    messages = [{"from": "human", "value": "q"}, calls, {"from": "gpt", "value": "a"}]

    account, _ = bring(
        {"conversations": messages, "reward": 1}, {"messages": [user("q"), said("a")], "reward": 1}
    )

    assert account.calls == {"rollouts": 1, "unsupported": 1}
    assert "Put its calls under tool_calls" in next(account.shown_faults())


@pytest.mark.parametrize("answer", ['{"action": "click"}', '{"id": 1, "data": {"x": 1}}', "[1, 2]"])
def test_a_response_that_is_json_text_is_an_answer(answer, bring):
    """The account counts such answers, since the body of an unknown API looks the same."""
    account, (found,) = bring(call("", user("q")) | {"response": answer})

    assert found.turns[0].action.text == answer
    assert "JSON text without the keys of a body" in next(account.shown_faults())


def test_equal_answers_that_are_json_are_two_calls(bring):
    """The `id` in an answer is no id of the call."""
    record = {"request": {"messages": [user("q")]}, "response": '{"id": 1, "action": "open"}'}

    account, found = bring(record, record)

    assert (account.calls, len(found)) == ({"turns": 2}, 2)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"choices": [{"message": said("a")}]}, "turns"),
        ({"status_code": 200, "body": {"choices": [{"message": said("a")}]}}, "turns"),
        ({"error": {"message": "overloaded"}}, "no_answer"),
        ({"object": "list", "data": [{"embedding": [0.5]}]}, "unsupported"),
        ({"detail": "Not Found"}, "unsupported"),
        ({"message": "Internal server error", "code": 500}, "unsupported"),
        ({"errors": [{"title": "overloaded"}]}, "unsupported"),
        ([{"generated_text": "hi"}], "unsupported"),
        ({"text": "hi", "generation_id": "g"}, "unsupported"),
    ],
)
def test_the_body_of_an_api_is_no_answer(body, why, bring):
    account, _ = bring(call("b", user("x")), call("", user("q")) | {"response": json.dumps(body)})

    assert account.calls[why] == 1 + (why == "turns")


def test_optional_values_that_cannot_be_read_are_ignored(bring):
    """The reward alone decides whether the episode counts."""
    episode = {"messages": [user("q"), said("a")], "reward": 1}

    account, found = bring(*({**episode, "success": each, "task_id": [1]} for each in ("true", 0.7)))

    assert [(one.task.id, one.success) for one in found] == [("q", True)] * 2
    assert account.unread == {"success": 2, "task_id": 2}


def test_conversations_may_be_json_text(bring, tmp_path):
    messages = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]

    _, (found,) = bring({"conversations": json.dumps(messages), "reward": 1})

    assert format_of(tmp_path / "log.jsonl") == "conversations"
    assert found.messages == [user("q"), said("a")]


def test_the_mark_of_a_cut_answer_is_read(bring):
    _, (found,) = bring({"messages": [user("q"), said("a cu") | {"ended": False}], "reward": 1})

    assert not found.turns[0].action.ended


def test_a_scored_row_of_parquet_without_messages_says_so(bring):
    episode = {"messages": [user("q"), said("a")], "reward": 1.0, "id": 1}

    account, _ = bring(episode, episode | {"messages": None}, name="log.parquet")

    assert "messages: expected a list, got none" in next(account.shown_faults())


@pytest.mark.parametrize(
    ("run", "feedback"),
    [
        (
            {"id": "r", "run_type": "llm", "inputs": {"messages": [user("q")]}, "outputs": said("a")},
            {"run_id": "r", "key": None, "score": 1.0},
        ),
        (
            {"id": "r", "type": "GENERATION", "input": [user("q")], "output": said("a")},
            {"name": None, "dataType": "NUMERIC", "observationId": "r", "value": 1.0},
        ),
    ],
    ids=["langsmith", "langfuse"],
)
def test_feedback_of_parquet_may_have_no_name(run, feedback, bring):
    keys = dict.fromkeys([*run, *feedback])

    _, (found,) = bring(keys | run, keys | feedback, name="log.parquet")

    assert found.total_reward == 1.0


def test_completions_that_pandas_writes_hold_no_nulls(bring):
    """The nulls come from a Parquet file that pandas read."""
    calls = [{"function": {"name": "look", "arguments": {"at": "box", "far": None}}}]
    row = {"step": 1, "prompt": "q", "completion": [said("") | {"tool_calls": calls}], "advantage": 0.5}

    _, (found,) = bring(row | {"reward": 1.0})

    assert found.turns[0].action.tool_calls[0]["function"]["arguments"] == {"at": "box"}


def test_a_call_after_its_answer_may_be_cut():
    """In either of the two messages, which become one turn."""
    call = {"from": "function_call", "value": '{"name": "look", "arguments": {}}'}
    cut = {"ended": False}
    answer = {"from": "gpt", "value": "I look."}
    sides = [[call | cut], [answer | cut, call], [answer, call | cut], [call | cut, call]]

    for side in sides:
        (read,) = read_messages(side, "row", unread := set())
        assert (read.ended, unread) == (False, set())


def har(text, *messages, **response):
    """An entry of a HAR file, with the body of its response as text."""
    request = {"postData": {"text": json.dumps({"messages": messages})}}
    return {"request": request, "response": {"status": 200, "content": {"text": text}} | response}


@pytest.mark.parametrize("role", [None, "system", "developer"])
def test_the_billing_line_of_claude_code_is_no_instruction(role, bring):
    """The line differs in each request, so that no request would extend an earlier request."""
    records, messages = [], [user("q")]
    for number in range(2):
        parts = [f"x-anthropic-billing-header: cc_version=2.1.37; cch=fa{number};", "Be brief."]
        system = [{"type": "text", "text": part} for part in parts]
        record = call("a", *messages)
        if role is not None:
            record["request"]["messages"].insert(0, {"role": role, "content": system})
        else:
            record["request"]["system"] = system
        records.append(record)
        messages += [said("a"), user("more")]

    _, (found,) = bring(*records)

    assert found.prompt == ({"role": role or "system", "content": "Be brief."},)
    assert len(found.turns) == 2


@pytest.mark.parametrize("is_har", [True, False])
def test_the_duration_of_a_call_is_not_its_time(is_har, bring):
    """A HAR file holds the duration under `time`. Another log may hold the seconds since it began."""
    first = {"time": 900.0 if is_har else 0.0} | har("a", user("q"))
    second = {"time": 100.0} | har("b", user("q"), said("a"), user("more"))
    if is_har:
        second["startedDateTime"], first["startedDateTime"] = "2026-01-01T00:00:02Z", "2026-01-01T00:00:00Z"

    _, (found,) = bring(second, first)

    assert [turn.action.text for turn in found.turns] == ["a", "b"]


@pytest.mark.parametrize(
    "failed", [{"status": 502}, {"status_code": 429}, {"statusCode": 500}, {"status": "503"}]
)
def test_a_page_of_an_error_is_no_answer(failed, bring):
    page = {"request": {"messages": [user("q")]}, "response": {"body": "<html>Bad gateway</html>"} | failed}

    account, _ = bring(call("a", user("q")), page)

    assert account.calls == {"turns": 1, "no_answer": 1}


def test_an_unread_response_does_not_say_that_a_call_failed(bring):
    _, (found,) = bring(call("a", user("q")) | {"completion": '{"status": "failed"}'})

    assert found.turns[0].action.text == "a"


def test_a_body_in_base64_is_decoded(bring):
    """A body that is no text, such as a compressed one, cannot be used. The score of a failed call stays."""
    body = json.dumps({"choices": [{"message": said("a")}]}).encode()
    contents = [
        {"encoding": "base64", "text": base64.b64encode(each).decode()} for each in (body, b"\x1f\x8b\xff")
    ]
    records = [har("", user("q"), content=each) for each in contents]
    failed = har("", user("q"), content=contents[1], status=429) | {"feedback": "up"}

    account, (found,) = bring(*({"session_id": "s"} | each for each in (*records, failed)))

    assert (found.turns[0].action.text, found.total_reward) == ("a", 1.0)
    assert account.calls == {"turns": 1, "unsupported": 1, "no_answer": 1}
    assert "response.content.text: expected a text in base64" in next(account.shown_faults())
