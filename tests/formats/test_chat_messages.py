"""The keys of the public chat formats, each in a row and, where servers write it, in an answer."""

import json
from collections import Counter

import numpy as np
import pytest
from datasets import Dataset

from perturn.data.records import trajectory_from_dict
from perturn.errors import DataError
from perturn.formats.chat_messages import read_answer
from perturn.formats.trl_rows import describe_unread, from_trl, to_trl

USER = {"role": "user", "content": "u"}
LOOK = {"type": "function", "function": {"name": "look", "arguments": {"at": "door"}}}


def said(content="", **more):
    return {"role": "assistant", "content": content, **more}


def call(arguments, **more):
    return {"type": "function", "function": {"name": "look", "arguments": arguments}, **more}


def turns(*messages, **columns):
    return from_trl({"messages": [USER, *messages], **columns}, task_id="t").turns


CALLS = {
    "text": {"tool_calls": [call('{"at": "door"}')]},
    "text after a space": {"tool_calls": [call(' {"at": "door"}\n')]},
    "flat": {"tool_calls": [{"name": "look", "arguments": '{"at": "door"}'}]},
    "parameters": {"tool_calls": [{"name": "look", "parameters": {"at": "door"}}]},
    "older": {"function_call": {"name": "look", "arguments": '{"at": "door"}'}},
    "both": {"function_call": LOOK["function"], "tool_calls": [LOOK]},
}


@pytest.mark.parametrize("text", ["", "I look."])
@pytest.mark.parametrize("keys", CALLS.values(), ids=CALLS.keys())
def test_calls_of_every_form_are_objects(keys, text):
    """Beside a text and alone, in rows and in answers of servers."""
    assert turns(said(text, **keys))[0].action.tool_calls == (LOOK,)
    assert turns(said(text, **keys))[0].action.text == text
    assert read_answer(said(text, **keys), "answer") == turns(said(text, **keys))[0].action


@pytest.mark.parametrize("given", ["", None, "{}", {}])
def test_a_call_without_arguments_has_an_empty_object(given):
    assert turns(said(tool_calls=[call(given)]))[0].action.tool_calls == (call({}),)


def test_ids_of_calls_are_kept():
    assert turns(said(tool_calls=[call("{}", id="a", index=0)]))[0].action.tool_calls == (call({}, id="a"),)


@pytest.mark.parametrize("given", ["door", "[1]", "3", '"{}"', '{"at": ', '{"at": NaN}', [1], 3])
def test_arguments_that_are_no_object_are_refused_in_rows_and_kept_in_answers(given):
    """A server's answer with them is an invalid turn, which the world is told of."""
    with pytest.raises(
        DataError, match=r"row: messages\[1\]\.tool_calls\[0\]\.arguments: expected an object"
    ):
        turns(said(tool_calls=[call(given)]))

    answer = read_answer(said(tool_calls=[call(given)]), "answer")
    assert isinstance(answer.tool_calls[0]["function"]["arguments"], str)


def test_nulls_of_a_plain_row_are_kept_in_arguments_and_defaults():
    """Other keys that hold None are absent, as in the rows of data sets."""
    schema = {"type": "object", "properties": {"at": {"type": "string", "default": None, "enum": None}}}
    tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
    given = {"at": None, "deep": [{"in": None}]}
    row = {"messages": [USER, said(None, tool_calls=[call(given)], refusal=None)], "tools": [tool]}
    read = from_trl(row, task_id="t")

    assert read.turns[0].action.tool_calls == (call(given),)
    assert read.tools[0]["function"]["parameters"]["properties"] == {
        "at": {"type": "string", "default": None}
    }
    assert from_trl(to_trl(read), task_id="t") == read


def test_nulls_that_arrow_filled_in_are_left_out():
    """The keys of one row's arguments stand in the other's; as JSON text, an intended null stays."""
    other = {"type": "function", "function": {"name": "go", "arguments": {"to": "hall"}}}
    rows = [
        {"messages": [USER, said(tool_calls=[LOOK])]},
        {
            "messages": [
                USER,
                said(tool_calls=[other]),
                {"role": "tool", "content": "x", "name": "go"},
                said("b"),
            ]
        },
    ]
    texts = [{"messages": [USER, said(tool_calls=[call(json.dumps({"at": at}))])]} for at in (None, "door")]

    filled = Dataset.from_list(rows)[0]
    assert filled["messages"][0]["tool_calls"] is None
    assert from_trl(filled, task_id="t").turns[0].action.tool_calls == (LOOK,)
    read = from_trl(Dataset.from_list(texts)[0], task_id="t")
    assert read.turns[0].action.tool_calls == (call({"at": None}),)


@pytest.mark.parametrize("given", [{"at": None}, {"at": "door", "to": None}])
def test_only_the_caller_knows_where_arrow_leaves_no_trace(given):
    """Of a column of answers alone, all messages have the same keys anyway."""
    row = {"prompt": [USER], "completion": [said(tool_calls=[call(given)])]}

    assert from_trl(row, task_id="t").turns[0].action.tool_calls == (call(given),)
    kept = {key: value for key, value in given.items() if value is not None}
    assert from_trl(row, task_id="t", filled=True).turns[0].action.tool_calls == (call(kept),)


MARKS = [
    ("weight", 0),
    ("weight", 0.0),
    ("train", False),
    ("training", False),
    ("loss", False),
    ("loss_mask", 0),
]
MARKS += [("loss_scale", 0), ("trainable", False)]


@pytest.mark.parametrize(("key", "value"), MARKS)
def test_a_marked_answer_is_no_trained_turn(key, value):
    """It stays in the conversation; an answer that is marked as trained is as one without a mark."""
    off, on = turns(said("bad", **{key: value}), USER, said("good", **{key: type(value)(1)}))

    assert (off.trained, on.trained) == (False, True)
    assert off.action.message() == said("bad")
    assert not off.carries_loss


@pytest.mark.parametrize("nothing", ["", None, " \n", []])
def test_an_empty_answer_carries_no_loss(nothing):
    empty, good = turns(said(nothing), USER, said("good"))

    assert empty.trained
    assert (empty.carries_loss, good.carries_loss) == (False, True)


@pytest.mark.parametrize("key", ["weight", "loss", "loss_scale", "loss_mask", "train"])
@pytest.mark.parametrize("value", [0.5, 2, -1, "false", [0, 1]])
def test_other_marks_are_refused(key, value):
    with pytest.raises(DataError, match=rf"messages\[1\]\.{key}: expected 0 or 1.*carries loss as a whole"):
        turns(said("a", **{key: value}))


REFUSED = {
    "marks disagree": (said("a", weight=1, train=False), "weight=1 and train=False disagree"),
    "spans": (said("a", train_detail=[{"begin_offset": 0}]), "train_detail: a turn carries loss as a whole"),
    "marked part": (said([{"type": "text", "text": "a", "weight": 0}]), "Mark the message instead"),
    "thoughts differ": (
        said("a", reasoning="x", thinking="y"),
        "two different thoughts, in reasoning, thinking",
    ),
    "calls differ": (
        said("", tool_calls=[LOOK], function_call={"name": "go", "arguments": "{}"}),
        "differs from",
    ),
    "no arguments": (said("", tool_calls=[{"name": "look"}]), "expected arguments, got none. Write {}"),
    "custom call": (
        said("", tool_calls=[{"type": "custom", "custom": {"name": "f"}}]),
        "the name of its function",
    ),
    "images": (said("a", images=["a.png"]), "images, sound and the like are not supported"),
    "details alone": (said("a", reasoning_details=[{"text": "x"}]), "write the thought as text"),
}


@pytest.mark.parametrize(("message", "says"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_done_is_refused(message, says):
    with pytest.raises(DataError) as caught:
        turns(message)

    assert str(caught.value).startswith("row: messages[1]")
    assert says in str(caught.value)


def test_a_row_without_a_trained_answer_is_refused():
    """On one side of a pair, too, with its name."""
    with pytest.raises(DataError, match=r"messages: .*carries loss, but all of them are marked"):
        turns(said("a", weight=0))
    pair = {"prompt": [USER], "chosen": [said("a")], "rejected": [said("b", loss=False)]}
    with pytest.raises(DataError, match=r"row 3: rejected: .*carries loss, but all"):
        from_trl(pair, task_id="t", index=3)


THOUGHTS = [{"reasoning_content": "hm"}, {"reasoning": "hm"}, {"thinking": "hm"}]
THOUGHTS += [
    {"reasoning": "hm", "reasoning_content": "hm"},
    {"content": [{"type": "thinking", "thinking": "hm"}]},
]


@pytest.mark.parametrize("keys", THOUGHTS)
def test_thoughts_are_a_field(keys):
    """In rows and in answers of servers."""
    message = said("", tool_calls=[LOOK], **{"reasoning": None}) | keys

    assert turns(message)[0].action.reasoning == "hm"
    assert turns(message)[0].action.message()["reasoning_content"] == "hm"
    assert read_answer(message, "answer").reasoning == "hm"
    assert read_answer({"reasoning_content": "", **message}, "answer").reasoning == "hm"


RESULTS = [
    ({"temp": 3}, '{"temp": 3}'),
    ([{"id": 1}, {"type": "sofa"}], '[{"id": 1}, {"type": "sofa"}]'),
    (["a"], '["a"]'),
    ({"found": None, "name": "Ø"}, '{"found": null, "name": "Ø"}'),
    (3, "3"),
    ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
    ("a", "a"),
    (None, ""),
]


@pytest.mark.parametrize(("content", "text"), RESULTS)
def test_results_of_tools_are_text(content, text):
    result = {"role": "tool", "content": content}

    assert turns(said(tool_calls=[LOOK]), result, said("b"))[1].observation == (
        {"role": "tool", "content": text},
    )


def test_sharegpt_and_older_roles_are_read():
    """LLaMA-Factory's function_call and observation, OpenAI's function, and keys from and value."""
    found = turns(
        {"from": "function_call", "value": '{"name": "look", "arguments": {"at": "door"}}'},
        {"from": "observation", "value": "red"},
        {"from": "gpt", "value": "It is red."},
        {"from": "human", "value": "more"},
        said(function_call={"name": "look", "arguments": '{"at": "door"}'}),
        {"role": "function", "name": "look", "content": "red"},
        said("b"),
    )

    assert [turn.action.tool_calls for turn in found] == [(LOOK,), (), (LOOK,), ()]
    assert found[1].observation == ({"role": "tool", "content": "red"},)
    assert found[2].observation == ({"role": "user", "content": "more"},)
    assert found[3].observation == ({"role": "tool", "name": "look", "content": "red"},)


def test_calls_of_ms_swift_belong_to_the_answer_before_them():
    """Parallel calls are messages of their own; one mark on the first of them would be half a turn."""
    one = {"role": "tool_call", "content": json.dumps(LOOK["function"])}
    first, last = turns(said("I look."), one, one, {"role": "tool_response", "content": "red"}, said("Red."))

    assert (first.action.text, first.action.tool_calls) == ("I look.", (LOOK, LOOK))
    assert last.observation == ({"role": "tool", "content": "red"},)
    with pytest.raises(DataError, match=r"messages\[2\]: the call and the message before it are one turn"):
        turns(said("I look."), one | {"loss": False}, said("Red."))


def test_pairs_of_other_trainers_are_read():
    """OpenAI's preferences, ms-swift's rejected answers, LLaMA-Factory's ranking: all as TRL's."""
    known = from_trl({"prompt": [USER], "chosen": [said("a")], "rejected": [said("b")]}, task_id="t")
    rows = [
        {"input": {"messages": [USER]}, "preferred_output": [said("a")], "non_preferred_output": [said("b")]},
        {"messages": [USER, said("a")], "rejected_response": "b"},
        {"messages": [USER, said("a")], "rejected_messages": [USER, said("b")]},
        {"messages": [USER], "chosen": {"role": "assistant", "content": "a"}, "rejected": said("b")},
    ]

    assert [from_trl(row, task_id="t") for row in rows] == [known] * 4


def test_functions_and_a_system_text_are_read():
    """OpenAI's older tools, and LLaMA-Factory's system column."""
    row = {"messages": [USER, said("a")], "functions": [{"name": "look"}], "system": "Play well."}
    read = from_trl(row, task_id="t")

    assert read.tools == ({"type": "function", "function": {"name": "look"}},)
    assert read.prompt == ({"role": "system", "content": "Play well."},)


def test_variables_of_the_template_are_kept():
    """As an object and as JSON text, and back in a row of TRL's."""
    row = {"messages": [USER, said("a")], "chat_template_kwargs": {"enable_thinking": False}}
    read = from_trl(row, task_id="t")

    assert read.template_kwargs == {"enable_thinking": False}
    assert from_trl(row | {"chat_template_kwargs": '{"enable_thinking": false}'}, task_id="t") == read
    assert from_trl(to_trl(read), task_id="t") == read
    with pytest.raises(
        DataError, match=r"chat_template_kwargs\.tokenize: expected variables of the chat template"
    ):
        from_trl(row | {"chat_template_kwargs": {"tokenize": True}}, task_id="t")


def test_a_turn_without_loss_is_marked_in_a_row_of_trls():
    read = from_trl({"messages": [USER, said("a", train=False), USER, said("b")]}, task_id="t")

    assert [each.get("weight") for each in to_trl(read)["completion"]] == [0, None, None]
    assert from_trl(to_trl(read), task_id="t") == read


def test_unknown_keys_are_counted_and_metadata_is_not():
    """A row each, however many of its messages have the key; defaults are as good as absent."""
    message = said("a", id="1", name="x", refusal=None, annotations=[], mood="glad", prefix=False)
    row = {
        "messages": [USER | {"weight": 1}, message, USER, message],
        "score_chosen": 3,
        "source": "web",
        "extra_turns": 1,
    }
    counts = Counter()
    from_trl(row | {"reward_model": {}, "plan": "x", "messages_id": 3}, task_id="t", counts=counts)
    from_trl({"messages": [USER, message]}, task_id="t", counts=counts)

    assert counts["mood"] == 2
    assert counts["column plan"] == 1
    assert describe_unread(counts) == (
        "keys that nothing reads: a mark that asks for loss on a message of another than the assistant (1 rows), "
        "column plan (1 rows), mood (2 rows)"
    )


@pytest.mark.parametrize(
    "mark",
    [{"mask": 0}, {"loss_weight": 0.0}, {"train_on_turn": False}, {"enable_loss": False}, {"masked": True}],
)
def test_an_unknown_key_that_is_false_or_0_is_counted(mark):
    """It may ask for no loss; null, and an empty text, list or object, say nothing."""
    counts = Counter()
    empty = {"a": None, "b": "", "c": [], "d": {}}
    row = {"messages": [USER, said("bad", **mark), USER, said("good", **empty)], **empty}
    from_trl(row | {"keep": False}, task_id="t", counts=counts)

    assert {key for key in counts if counts[key]} == {*mark, "column keep"}


def test_the_column_of_sharegpt_holds_messages():
    """With LLaMA-Factory's single answers beside it, a pair. Tools may be an empty text."""
    asked = [{"from": "human", "value": "u"}]
    good, bad = ({"from": "gpt", "value": value} for value in ("good", "bad"))

    assert from_trl({"conversations": [*asked, good], "tools": "", "system": ""}, task_id="t") == from_trl(
        {"messages": [USER, said("good")]}, task_id="t"
    )
    assert from_trl({"conversations": asked, "chosen": good, "rejected": bad}, task_id="t") == from_trl(
        {"prompt": [USER], "chosen": [said("good")], "rejected": [said("bad")]}, task_id="t"
    )


@pytest.mark.parametrize(
    "column",
    [
        {"images": ["a.png"]},
        {"weight": 0.5},
        {"loss_scale": 0},
        {"label": False},
        {"train": False},
        {"loss_mask": [0, 1]},
        {"loss_mask": np.array([0, 1])},
    ],
)
def test_columns_that_ask_for_what_is_not_done_are_refused(column):
    with pytest.raises(DataError, match=rf"row: {next(iter(column))}: "):
        from_trl({"messages": [USER, said("a")], **column}, task_id="t")


@pytest.mark.parametrize(("content", "text"), RESULTS[:-1])
def test_results_in_records_of_ours_are_text_too(content, text):
    turn = {"observation": [{"role": "tool", "content": content}], "action": {"text": "b"}}
    read = trajectory_from_dict({"version": 1, "task": {"id": "t"}, "turns": [turn]})

    assert read.turns[0].observation == ({"role": "tool", "content": text},)
