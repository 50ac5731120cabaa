"""Logs of model calls: each format is told and read; what gives no call is named with its place and reason."""

import json
from pathlib import Path

import pytest

from perturn.errors import DataError
from perturn.formats.logs.log_entries import Call, Fields, LostEntry, Score
from perturn.formats.logs.log_values import at_path, score_value, seconds
from perturn.formats.logs.read_logs import FORMATS, format_of, read_log

SAMPLES = Path(__file__).parent / "logs"
"""One conversation, as each producer logs it. Recorded from the clients themselves, with a local server: openinference
0.1.66, opentelemetry-instrumentation-openai-v2 2.2b0, langsmith 0.15.1, langchain-openai 1.7.4, litellm 1.110.2, openai
3.57.0 and anthropic 2.14.0. Written from the documentation: `langfuse_*`, `otel_spans`, `stored` and `proxy.har`."""

USER = {"role": "user", "content": "hello"}


@pytest.fixture
def entries(tmp_path):
    """The entries of a log of these records."""

    def entries(*records, fields=None, format_name=None):
        file = tmp_path / "log.jsonl"
        file.write_text(
            "".join(each if isinstance(each, str) else json.dumps(each) + "\n" for each in records)
        )
        return list(read_log(file, format_name, fields))

    return entries


def chat(answer, *messages, **others):
    """A record of a request and a response of chat completions."""
    message = answer if isinstance(answer, dict) else {"role": "assistant", "content": answer}
    response = {"id": "chatcmpl-1", "choices": [{"message": message, "finish_reason": "stop"}]}
    return {"request": {"model": "m", "messages": list(messages) or [USER]}, "response": response} | others


def calls(found):
    return [each for each in found if isinstance(each, Call)]


@pytest.mark.parametrize(
    ("start", "name"),
    [
        ("otel", "otel"),
        ("openinference", "otel"),
        ("langsmith", "langsmith"),
        ("langfuse", "langfuse"),
        ("litellm", "requests"),
        ("proxy", "requests"),
        ("stored", "requests"),
    ],
)
def test_the_records_tell_the_format(start, name):
    files = [file for file in SAMPLES.iterdir() if file.name.startswith(start)]

    assert files
    assert {format_of(file) for file in files} == {name}


def test_an_unknown_layout_is_refused_with_its_keys_and_the_known_formats(entries):
    with pytest.raises(DataError) as refused:
        entries({"question": "hello", "reply": "hi"})

    said = str(refused.value)
    assert "log.jsonl:1: expected a record of a log, got one with the keys question, reply." in said
    assert all(name in said for name in FORMATS)


def test_an_unknown_format_is_told_what_was_meant(tmp_path):
    with pytest.raises(DataError, match=r"unknown format of logs 'langfus'. Did you mean 'langfuse'\?"):
        format_of(tmp_path, "langfus")


def test_a_log_is_read_as_it_is_needed(entries, tmp_path):
    """The first entry comes before the end of the file is read, which is broken."""
    file = tmp_path / "log.jsonl"
    file.write_text(json.dumps(chat("hi")) + "\n" + (json.dumps(chat("hi")) + "\n") * 200 + "{")

    stream = read_log(file)

    assert isinstance(next(stream), Call)
    assert [type(each) for each in stream][-1] is LostEntry


def test_lines_that_are_broken_or_hold_no_answer_are_named_with_their_place(entries):
    found = entries(
        chat("hi"),
        "{ broken\n",
        chat("hi", response={"error": {"message": "overloaded"}}),
        chat({"role": "assistant", "content": ""}),
        chat("hi", {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}),
        {"request": {"input": "go on", "previous_response_id": "resp_1"}, "response": {"output": []}},
        {"level": "info", "message": "started"},
    )

    lost = [
        (each.where.rpartition(":")[2], each.why, each.reason)
        for each in found
        if isinstance(each, LostEntry)
    ]
    assert [(line, why) for line, why, _ in lost] == [
        ("2", "broken"),
        ("3", "no_answer"),
        ("4", "no_answer"),
        ("5", "unsupported"),
        ("6", "unsupported"),
        ("7", "no_call"),
    ]
    assert "overloaded" in lost[1][2]
    assert "images and the like are not supported" in lost[3][2]
    assert "continues resp_1, which the provider stores" in lost[4][2]


def test_each_choice_of_a_response_is_a_call(entries):
    choices = [{"message": {"role": "assistant", "content": text}} for text in ("a", "b")]

    found = calls(entries(chat("a", response={"id": "r", "choices": choices})))

    assert [(each.answer.text, each.choice) for each in found] == [("a", 0), ("b", 1)]


@pytest.mark.parametrize(
    ("session", "scored"), [({"session_id": "s"}, [1, 0]), ({"trace_id": "t"}, [1, 0]), ({}, [1, 1])]
)
def test_the_score_of_a_response_counts_once_in_a_session(entries, session, scored):
    """Choices of a session are turns of one episode, whose rewards are added; other choices are episodes."""
    choices = [{"message": {"role": "assistant", "content": text}} for text in ("a", "b")]

    found = calls(entries(chat("a", response={"id": "r", "choices": choices}, reward=0.5, **session)))

    assert [len(each.scores) for each in found] == scored


def test_an_answer_that_a_limit_cut_has_not_ended(entries):
    cut = chat("hi")
    cut["response"]["choices"][0]["finish_reason"] = "length"
    blocks = {"type": "message", "role": "assistant", "content": [{"type": "text", "text": "hi"}]}
    also = chat("hi", response=blocks | {"stop_reason": "max_tokens"})

    assert [each.answer.ended for each in calls(entries(chat("hi"), cut, also))] == [True, False, False]


def test_an_answer_in_json_stays_text(entries):
    """A policy that answers with an object is not taken for a message, nor for a list of messages."""
    texts = ['{"city": "Paris"}', '{"type": "object"}', '[{"city": "Paris"}]', "[1, 2]", "{not json"]
    observations = [
        {"id": str(number), "traceId": "t", "type": "GENERATION", "input": [USER], "output": text}
        for number, text in enumerate(texts)
    ]

    found = calls(entries(*(chat(text) for text in texts))) + calls(entries(*observations))

    assert [each.answer.text for each in found] == texts * 2


def test_thoughts_of_all_providers_are_the_reasoning(entries):
    thinking = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "hi"}]
    summary = [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hi"}]},
    ]
    found = entries(
        chat({"role": "assistant", "content": "hi", "reasoning_content": "hm"}),
        chat("", response={"role": "assistant", "content": thinking}),
        {"request": {"input": "hello"}, "response": {"output": summary}},
    )

    assert [(each.answer.text, each.answer.reasoning) for each in calls(found)] == [("hi", "hm")] * 3


def test_streamed_answers_are_joined(entries):
    """Chunks of a call with its arguments in pieces; and Anthropic's events, as text."""
    pieces = [{"index": 0, "id": "c", "function": {"name": "look", "arguments": '{"at"'}}]
    more = [{"index": 0, "function": {"arguments": ': "hall"}'}}]
    chunks = [
        {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"tool_calls": each}}]}
        for each in (pieces, more)
    ]
    events = [
        {
            "type": "message_start",
            "message": {"id": "msg", "role": "assistant", "content": [], "model": "claude"},
        },
        {
            "type": "content_block_start",
            "index": 0,
            "content_block": {"type": "tool_use", "id": "c", "name": "look"},
        },
        *(
            {
                "type": "content_block_delta",
                "index": 0,
                "delta": {"type": "input_json_delta", "partial_json": part},
            }
            for part in ('{"at"', ': "hall"}')
        ),
        {"type": "message_delta", "delta": {"stop_reason": "tool_use"}},
    ]
    text = "".join(f"event: {each['type']}\ndata: {json.dumps(each)}\n\n" for each in events)

    found = calls(entries(chat("", response=chunks), chat("", response=text)))

    expected = {"id": "c", "type": "function", "function": {"name": "look", "arguments": {"at": "hall"}}}
    assert [each.answer.tool_calls for each in found] == [(expected,), (expected,)]


def test_events_of_calls_that_overlap_are_told_apart(entries):
    """In the older conventions each message is a log record of its own."""

    def event(span, name, body):
        values = [{"key": key, "value": {"stringValue": value}} for key, value in body.items()]
        record = {
            "traceId": "aa",
            "spanId": span,
            "eventName": name,
            "body": {"kvlistValue": {"values": values}},
        }
        return {"resourceLogs": [{"scopeLogs": [{"logRecords": [record]}]}]}

    def choice(span, text):
        message = {"kvlistValue": {"values": [{"key": "content", "value": {"stringValue": text}}]}}
        made = event(span, "gen_ai.choice", {})
        values = made["resourceLogs"][0]["scopeLogs"][0]["logRecords"][0]["body"]["kvlistValue"]["values"]
        values.append({"key": "message", "value": message})
        return made

    found = entries(
        event("01", "gen_ai.user.message", {"content": "one"}),
        event("02", "gen_ai.user.message", {"content": "two"}),
        event("03", "gen_ai.user.message", {"content": "three"}),
        choice("02", "2"),
        choice("01", "1"),
    )

    said = [(each.messages[0]["content"], each.answer.text) for each in calls(found)]
    assert said == [("two", "2"), ("one", "1")]
    assert [each.why for each in found if isinstance(each, LostEntry)] == ["no_answer"]  # of span 03


@pytest.mark.parametrize(
    ("attributes", "answers"),
    [
        (
            {
                "gen_ai.prompt.0.role": "user",
                "gen_ai.prompt.0.content": "q",
                "gen_ai.completion.0.content": "A",
                "gen_ai.completion.0.finish_reason": "length",
                "gen_ai.completion.1.content": "B",
                "gen_ai.completion.1.finish_reason": "stop",
            },
            [("A", False, 0), ("B", True, 1)],
        ),
        (
            {
                "llm.input_messages.0.message.role": "user",
                "llm.input_messages.0.message.content": "q",
                "llm.output_messages.0.message.content": "A",
                "llm.output_messages.1.message.content": "B",
                "llm.finish_reason": "length",
            },
            [("A", False, 0), ("B", True, 1)],
        ),
        (
            {
                "gen_ai.prompt.0.content": "q",
                "gen_ai.completion.0.content": "A",
                "gen_ai.completion.0.finish_reason": "max_tokens",
                "gen_ai.completion.1.content": "B",
            },
            [("AB", False, 0)],
        ),
    ],
    ids=["OpenLLMetry", "OpenInference", "content blocks"],
)
def test_each_choice_in_flat_attributes_is_a_call_with_its_cut(attributes, answers, entries):
    """OpenInference has the finish reason of the first choice alone. A block without a reason continues its answer."""
    roles = {
        key.replace("content", "role"): "assistant"
        for key in attributes
        if "output" in key or "pletion" in key
    }
    roles |= {key.replace("content", "role"): "user" for key in attributes if "prompt" in key}

    found = calls(entries(span(roles | attributes)))

    assert [(each.answer.text, each.answer.ended, each.choice) for each in found] == answers


def span(attributes):
    """A line with a span of these attributes."""
    held = [{"key": key, "value": {"stringValue": value}} for key, value in attributes.items()]
    spans = [{"traceId": "aa", "spanId": "01", "attributes": held}]
    return {"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}


def test_streamed_blocks_of_anthropic_are_one_answer(entries):
    """OpenLLMetry gives each block the stop reason, and a thought a role of its own."""
    blocks = [("thinking", "hm"), ("assistant", "A"), ("assistant", "B")]
    attributes = {"gen_ai.prompt.0.role": "user", "gen_ai.prompt.0.content": "q"}
    for number, (role, text) in enumerate(blocks):
        block = {"role": role, "content": text, "finish_reason": "max_tokens"}
        attributes |= {f"gen_ai.completion.{number}.{key}": value for key, value in block.items()}

    (found,) = calls(entries(span(attributes)))

    assert (found.answer.text, found.answer.reasoning, found.answer.ended) == ("AB", "hm", False)


@pytest.mark.parametrize("name", ["llm.finish_reason", "gen_ai.response.finish_reasons"])
def test_a_stop_reason_in_capital_letters_is_read(name, entries):
    held = {"gen_ai.prompt.0.role": "user", "gen_ai.prompt.0.content": "q"}
    held |= {"gen_ai.completion.0.role": "assistant", "gen_ai.completion.0.content": "a"}
    line = span(held | {name: "MAX_TOKENS"})
    value = line["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["attributes"][-1]["value"]
    if name.endswith("s"):
        value["arrayValue"] = {"values": [{"stringValue": value.pop("stringValue")}]}

    (found,) = calls(entries(line))

    assert not found.answer.ended


def test_spans_without_contents_are_counted_and_say_why(entries):
    attributes = [{"key": "gen_ai.operation.name", "value": {"stringValue": "chat"}}]
    span = {"traceId": "aa", "spanId": "01", "attributes": attributes}

    (found,) = entries({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]})

    assert found.why == "no_answer"
    assert "the capture of contents was off" in found.reason


def test_fields_name_the_session_the_task_and_the_score(entries):
    meta = {"chat": "c1", "case": "t1", "stars": "4"}
    fields = Fields(session="metadata.chat", task="metadata.case", score="metadata.stars")

    (found,) = entries(chat("hi", metadata=meta, session_id="other"), fields=fields)

    assert (found.session, found.task, found.scores) == ("c1", "t1", (Score("metadata.stars", 4.0, ""),))


def test_scores_of_their_own_records_name_what_they_are_of(entries):
    found = entries(chat("hi"), {"response_id": "chatcmpl-1", "feedback": "thumbs_up"})

    assert found[1] == Score("feedback", 1.0, "chatcmpl-1")


@pytest.mark.parametrize(
    ("given", "value"),
    [
        *[(True, 1.0), (False, 0.0), ("UP", 1.0), ("👎", 0.0), (0.5, 0.5), ("4", 4.0), (10**400, None)],
        *[(float("nan"), None), ("great", None), (None, None), ([], None), (1e200, None)],
    ],
)
def test_scores_are_numbers_or_thumbs(given, value):
    assert score_value(given) == value


@pytest.mark.parametrize(
    "given",
    [
        *[1700000000, 1700000000000, 1700000000000000, 1700000000000000000, "1700000000"],
        *["2023-11-14T22:13:20Z", "2023-11-14 22:13:20.000000", "2023-11-14T23:13:20+01:00"],
    ],
)
def test_times_of_all_units_are_the_same_second(given):
    assert seconds(given) == 1700000000


def test_paths_go_through_json_text_and_keys_with_dots():
    record = {"a.b": {"c": 1}, "meta": '{"chat": {"id": "x"}}'}

    assert at_path(record, "a.b.c") == 1
    assert at_path(record, "meta.chat.id") == "x"
    assert at_path(record, "meta.nothing.id") is None
