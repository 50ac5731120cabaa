"""Texts that an import must not misread: long prompts, answers that are JSON or cut, and thoughts that are empty."""

import json

import pytest

from perturn.data.store import read_trajectories
from perturn.formats.logs.log_entries import Fields
from perturn.formats.logs.log_values import text_id
from perturn.formats.logs.provider_messages import without_billing_line
from perturn.formats.rollouts.chat_markup import conversation_of, response_of
from perturn.run.log_import.import_logs import LogSettings, import_logs
from perturn.run.log_import.log_spool import LogSpool
from support.call_records import call, said, user


@pytest.fixture
def bring(tmp_path):
    """Import records that are written to a file; (account, trajectories)."""

    def bring(*records, **settings):
        file = tmp_path / "log.jsonl"
        file.write_text("".join(json.dumps(each) + "\n" for each in records))
        account = import_logs([file], tmp_path / "out.jsonl", LogSettings(**settings))
        return account, list(read_trajectories(tmp_path / "out.jsonl"))

    return bring


def streamed(*chunks, **more):
    """A logged call whose answer is a list of chunks."""
    parts = [{"object": "chat.completion.chunk", "choices": [each]} for each in chunks]
    return {**call("x", user("q")), "response": parts, "session_id": "s", **more}


def test_prompts_that_begin_alike_are_different_tasks(bring):
    """The first 1000 characters do not identify a prompt: many share a system text or examples."""
    prompts = ["example " * 200 + f"Task {number}" for number in (1, 2, 1)]

    _, found = bring(*({"messages": [user(each), said("a")], "reward": 1} for each in prompts))

    assert len({one.task.id for one in found}) == 2
    assert len(text_id("x" * 5000)) == 1000


@pytest.mark.parametrize(("value", "expected"), [(2.0, "2"), (2.5, None), (float("nan"), None), (True, None)])
def test_whole_floats_are_ids(value, expected):
    assert text_id(value) == expected


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("cc_version=2.1.37; cc-name=a b; cch=fa690;\n\nmode=fast; be brief.", "mode=fast; be brief."),
        ("cc_version=2.1.37; cch=fa690;mode=fast; be brief.\nNow.", "mode=fast; be brief.\nNow."),
        ("cc_version=2.1.37; cch=fa690\nBe brief.", "Be brief."),
        ("another form\nBe brief.", "Be brief."),
    ],
)
def test_the_billing_line_ends_before_the_instructions(given, kept):
    message = {"role": "system", "content": f"x-anthropic-billing-header: {given}"}

    assert without_billing_line([message, user("q")]) == [{"role": "system", "content": kept}, user("q")]


@pytest.mark.parametrize("opened", ["", "<think>\n", "<think>\n\n</think>\n\n"])
def test_a_generation_prompt_is_no_message(opened):
    """Qwen3 closes an empty thought in it, and thinking models open one."""
    text = f"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n{opened}"

    assert conversation_of(text) == [user("hi")]


def test_a_stream_that_breaks_off_is_cut(bring):
    deltas = [{"delta": {"content": part}} for part in ("Hel", "lo wor")]
    blocks = [
        {"type": "message_start", "message": {"role": "assistant", "content": []}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hello wor"}},
    ]

    _, found = bring(streamed(*deltas), streamed(session_id="t") | {"response": blocks})

    assert [one.turns[0].action.text for one in found] == ["Hello wor", "Hello wor"]
    assert [one.truncated for one in found] == [True, True]


def test_an_odd_chunk_does_not_end_the_import(bring):
    """An index may be null, and a server may stream what it likes."""
    calls = {"tool_calls": [{"index": None, "id": "c", "function": {"name": "look", "arguments": "{}"}}, 3]}
    odd = {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": 5}}]}, "index": None}

    _, found = bring(streamed({"delta": calls, "finish_reason": "stop"}), streamed(odd, session_id="t"))

    assert found[0].turns[0].action.tool_calls[0]["function"]["name"] == "look"


@pytest.mark.parametrize("text", ["Here is the data: 5 rows", "data: 5 rows\n\nand more"])
def test_an_answer_about_data_is_no_stream(text, bring):
    _, (found,) = bring({**call("x", user("q")), "response": text})

    assert found.turns[0].action.text == text


def test_a_stream_may_hold_any_line_separator(bring):
    """U+2028 ends a line for Python, and does not in server-sent events."""
    chunk = {"object": "chat.completion.chunk", "choices": [{"delta": {"content": "a\u2028b"}}]}
    text = (
        "\ufeff: keep-alive\r\n\r\n"
        + f"data: {json.dumps(chunk, ensure_ascii=False)}\r\n\r\ndata: [DONE]\r\n"
    )

    _, (found,) = bring({**call("x", user("q")), "response": text})

    assert found.turns[0].action.text == "a\u2028b"


@pytest.mark.parametrize("answer", ['{"answer": 0}', "[1, 2]"])
def test_an_answer_may_be_json(answer, bring):
    rows = {"step": 1, "prompt": "q", "completion": answer, "accuracy_reward": 1.0, "advantage": 0.5}

    _, (found,) = bring(rows)

    assert found.turns[0].action.text == answer


def test_an_episode_may_hold_a_list_of_its_own(bring):
    """A list under `logs` is an API's envelope only if the record is no record itself."""
    episode = {"messages": [user("q"), said("a")], "reward": 1}

    account, found = bring(episode, episode | {"logs": [{"t": 1}]})

    assert (len(found), account.calls) == (2, {"rollouts": 2})


def test_marks_and_tasks_of_conversations_are_read_or_rejected(bring):
    """Every mark of rows counts. A task that is no id must not merge tasks of equal questions."""
    marked = {"messages": [user("q"), said("a") | {"train": False}], "reward": 1, "task": 1.0}
    nested = {"messages": [user("q"), said("a")], "reward": 1, "task": {"id": "a"}}

    account, (found,) = bring(marked, nested)

    assert (found.turns[0].trained, found.task.id) == (False, "1")
    assert "task: expected a text or a whole number" in next(account.shown_faults())
    _, (found,) = bring(nested, fields=Fields(task="task.id"))
    assert found.task.id == "a"


def test_the_number_of_a_rollout_costs_no_look_at_the_others(tmp_path):
    spool, seen = LogSpool(tmp_path / "spool"), []
    spool._db.set_trace_callback(seen.append)

    for _ in range(3):
        spool.add_rollout(b"{}", ())

    assert [n for n, *_ in spool.rollouts(None)] == [-1, -2, -3]
    assert not any("count" in each for each in seen)


def test_only_the_ends_of_a_text_hold_the_tokens_of_its_beginning_and_end():
    """`<s>` in the middle is HTML of a text that is struck through."""
    text = "Use <s>old</s> new"

    assert response_of(f"<s>{text}</s>\n") == [{"role": "assistant", "content": text}]
    assert conversation_of(f"<s>{text}</s>") == [{"role": "user", "content": text}]
