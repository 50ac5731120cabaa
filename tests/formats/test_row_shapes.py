"""Shapes of rows of other trainers: what each becomes, and the name that it is recognised by."""

import json
from collections import Counter

import numpy as np
import pytest

from perturn.errors import DataError
from perturn.formats.read_rows import Tally, notes_on, read_row
from perturn.formats.trl_rows import from_trl
from perturn.types import PreferencePair, WeightedTrajectory

SYSTEM, USER = {"role": "system", "content": "s"}, {"role": "user", "content": "u"}
GOOD, BAD = ({"role": "assistant", "content": content} for content in ("good", "bad"))
TOOL = {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}}


def human(value):
    return {"from": "human", "value": value}


def gpt(value):
    return {"from": "gpt", "value": value}


ONE = from_trl({"messages": [USER, GOOD]}, task_id="row-1")
PAIR = from_trl({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, task_id="row-1")
WITH_SYSTEM = from_trl({"messages": [SYSTEM, USER, GOOD]}, task_id="row-1")

SAME = {
    "conversations (from and value, as in ShareGPT)": (ONE, {"conversations": [human("u"), gpt("good")]}),
    "messages (from and value, as in ShareGPT)": (ONE, {"messages": [human("u"), gpt("good")]}),
    "conversations": (ONE, {"conversations": [USER, GOOD]}),
    "conversation": (ONE, {"conversation": [USER, GOOD]}),
    "conversation of human and assistant, as in ms-swift": (
        ONE,
        {"conversation": [{"human": "u", "assistant": "good"}]},
    ),
    "messages": (ONE, {"messages": json.dumps([USER, GOOD]), "tools": [], "parallel_tool_calls": False}),
    "prompt and completion": (ONE, {"prompt": [USER], "completion": GOOD}),
    "prompt and completion as text": (ONE, {"prompt": "u", "completion": "good"}),
    "prompt and response as text": (ONE, {"prompt": "u", "response": "good"}),
    "input, instruction and output as text": (ONE, {"instruction": "u", "input": "", "output": "good"}),
    "query and response as text": (ONE, {"query": "u", "response": "good"}),
    "prompt, chosen and rejected as text": (PAIR, {"prompt": "u", "chosen": "good", "rejected": "bad"}),
    "question, chosen and rejected as text": (PAIR, {"question": "u", "chosen": "good", "rejected": "bad"}),
    "input, chosen and rejected as text": (PAIR, {"input": "u", "chosen": "good", "rejected": "bad"}),
    "prompt as text, chosen and rejected": (PAIR, {"prompt": "u", "chosen": [GOOD], "rejected": [BAD]}),
    "prompt, chosen and rejected": (PAIR, {"prompt": [USER], "chosen": GOOD, "rejected": BAD}),
    "chosen and rejected (from and value, as in ShareGPT)": (
        PAIR,
        {"chosen": [human("u"), gpt("good")], "rejected": [human("u"), gpt("bad")]},
    ),
    "conversations, chosen and rejected, as in LLaMA-Factory": (
        PAIR,
        {"conversations": [human("u")], "chosen": gpt("good"), "rejected": gpt("bad")},
    ),
    "conversations, chosen and rejected as text, as in LLaMA-Factory": (
        PAIR,
        {"conversations": [human("u")], "chosen": "good", "rejected": "bad"},
    ),
    "messages and rejected_response, as in ms-swift": (
        PAIR,
        {"messages": [USER, GOOD], "rejected_response": "bad"},
    ),
    "input, preferred_output and non_preferred_output, as OpenAI's preferences": (
        PAIR,
        {
            "input": {"messages": [USER], "tools": [], "parallel_tool_calls": True},
            "preferred_output": [GOOD],
            "non_preferred_output": [BAD],
        },
    ),
    "chosen and rejected, transcripts of Human and Assistant": (
        PAIR,
        {"chosen": "\n\nHuman: u\n\nAssistant: good", "rejected": "\n\nHuman: u\n\nAssistant: bad"},
    ),
    "prompt, chosen and rejected as text, transcripts of Human and Assistant": (
        PAIR,
        {"prompt": "\n\nHuman: u\n\nAssistant:", "chosen": "good", "rejected": "bad"},
    ),
    "instruction and output as text": (ONE, {"instruction": "u", "output": "good", "turns": 1}),
    "prompt and completion as text, with a label": (
        WeightedTrajectory(ONE, (1.0,)),
        {"prompt": "u", "completion": "good", "label": np.True_},
    ),
    "conversations (from and value, as in ShareGPT), with a label": (
        WeightedTrajectory(ONE, (-1.0,)),
        {"conversations": [human("u"), gpt("good")], "kto_tag": False},
    ),
}


@pytest.mark.parametrize(
    ("shape", "read", "row"), [(shape, *each) for shape, each in SAME.items()], ids=SAME.keys()
)
def test_rows_of_others_are_ours(shape, read, row):
    """Each is read as TRL's row is, is known by its name, and leaves nothing unread."""
    tally = Tally()

    assert read_row(row, 1, tally) == read
    assert tally.shapes == {shape: 1}
    assert not +tally.unread


def test_calls_and_results_of_llama_factory():
    """A thought before the calls; tools that are the schema of the function alone; roles with a hyphen."""
    call = json.dumps({"name": "look", "arguments": {"at": "box"}})
    row = {
        "conversations": [
            human("u"),
            {"from": "function_call", "value": f"<think>Hm.</think>\n{call}"},
            {"from": "observation", "value": '{"red": 1}'},
            {"from": "function-call", "value": f"[{call}, {call}]"},
            {"from": "function-response", "value": "none"},
            gpt("Red."),
        ],
        "system": "s",
        "tools": json.dumps([TOOL]),
    }

    read = read_row(row, 1)

    first, second, last = read.turns
    assert read.prompt == (SYSTEM,)
    assert read.tools == ({"type": "function", "function": TOOL},)
    assert (first.action.reasoning, len(first.action.tool_calls), len(second.action.tool_calls)) == (
        "Hm.",
        1,
        2,
    )
    assert second.observation == ({"role": "tool", "content": '{"red": 1}'},)
    assert last.action.text == "Red."


def test_a_thought_before_calls_joins_the_message_before_them():
    call = {"role": "tool_call", "content": '<think>Now.</think>{"name": "look", "arguments": {}}'}
    row = {
        "messages": [
            USER,
            GOOD | {"reasoning_content": "First."},
            call,
            {"role": "tool", "content": "x"},
            GOOD,
        ]
    }

    assert read_row(row, 1).turns[0].action.reasoning == "First.\nNow."


def test_a_list_for_each_key_is_messages():
    """As older data sets of the Hub hold a sequence of objects."""
    assert read_row({"conversations": {"from": ["human", "gpt"], "value": ["u", "good"]}}, 1) == ONE


def test_the_history_of_alpaca_is_learned_too():
    row = {"instruction": "u", "input": "more", "output": "good", "history": [["q", "r"]], "system": "s"}
    read = read_row(row, 1)

    assert [turn.action.text for turn in read.turns] == ["r", "good"]
    assert read.turns[1].observation == ({"role": "user", "content": "u\nmore"},)
    assert read.prompt == (SYSTEM,)


def test_a_text_alone_is_an_answer_to_nothing():
    (turn,) = read_row({"text": "Once upon a time."}, 1).turns

    assert (turn.observation, turn.action.text) == ((), "Once upon a time.")


def test_the_prompt_of_two_texts_is_trls():
    """All that both begin with, without a space at its end (TRL's `extract_prompt`)."""
    pair = read_row({"chosen": "The sky is blue.", "rejected": "The sky is green."}, 1)

    assert isinstance(pair, PreferencePair)
    assert pair.chosen.turns[0].observation == ({"role": "user", "content": "The sky is"},)
    assert (pair.chosen.turns[0].action.text, pair.rejected.turns[0].action.text) == (" blue.", " green.")


def test_texts_that_become_messages_are_told():
    tally = Tally()
    read_row({"prompt": "u", "completion": "good"}, 1, tally)
    read_row({"messages": [USER, GOOD]}, 1, tally)

    (said,) = notes_on(tally)
    assert said.startswith("1 rows of prompt and completion as text: plain text is read as a user message")


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            {"messages": [USER], "chosen": [USER, GOOD], "rejected": [GOOD]},
            "has messages beside chosen and rejected",
        ),
        ({"instruction": "u", "output": "a", "response": "b"}, "has several answers, in output and response"),
        (
            {"text": "<|im_start|>user\nu<|im_end|>"},
            r"text: expected plain text, got a conversation .*im_start",
        ),
        (
            {"prompt": "[INST] u [/INST]", "completion": "a"},
            "prompt: expected plain text, got a conversation",
        ),
        ({"prompt": "u" * 60, "completion": "u" * 60 + "a"}, "completion: repeats the prompt"),
        ({"prompt": "u", "completion": ""}, "completion: expected an assistant message that carries loss"),
        (
            {"instruction": "u", "output": "a", "history": ["q"]},
            r"history\[0\]: expected a question and its answer",
        ),
        ({"prompt": "u"}, "A prompt alone has no answer"),
        ({"turns": [USER, GOOD]}, r"expected one of the forms messages .*; got turns\. Rename the columns"),
    ],
)
def test_rows_of_several_meanings_are_refused(row, says):
    with pytest.raises(DataError, match=says):
        read_row(row, 1)


def test_columns_of_a_form_beside_another_are_counted():
    """Numbers in them are not refused: nobody reads them."""
    counts = Counter()
    row = {
        "messages": [USER, GOOD],
        "text": "x",
        "answer": "y",
        "context": float("nan"),
        "input": "z",
        "label": 1,
    }

    assert from_trl(row, task_id="row-1", counts=counts) == ONE
    counts.pop("column label")
    assert {key for key in counts if counts[key]} == {
        "column text",
        "column answer",
        "column context",
        "column input",
    }


@pytest.mark.parametrize(
    ("label", "weight"), [(1, 1.0), (0, -1.0), (1.0, 1.0), (np.int64(0), -1.0), (np.float32(0), -1.0)]
)
def test_a_tag_for_kto_may_be_the_number_1_or_0(label, weight):
    """As pandas writes a column with gaps. A number under `label` may be a class, so it is no label."""
    assert read_row({"messages": [USER, GOOD], "kto_tag": label}, 1) == WeightedTrajectory(ONE, (weight,))
    assert read_row({"messages": [USER, GOOD], "label": label}, 1) == ONE


@pytest.mark.parametrize("role", ["System", "developer"])
def test_a_system_text_is_not_added_to_its_own_message(role):
    """The column `system` repeats the first message."""
    first = {"role": role, "content": "s"}

    (message,) = read_row({"system": "s", "messages": [first, USER, GOOD]}, 1).prompt

    assert message == first | {"role": role.lower()}


@pytest.mark.parametrize("sides", [[USER, GOOD], [SYSTEM, GOOD]])
def test_a_text_beside_whole_conversations_is_counted(sides):
    """A text `prompt` is not read there, and the column `system` still opens both sides."""
    counts = Counter()
    row = {"system": "s", "prompt": "Q", "chosen": sides, "rejected": [*sides[:-1], BAD]}

    pair = from_trl(row, task_id="row-1", counts=counts)

    assert pair.chosen.prompt == pair.rejected.prompt == (SYSTEM,)
    assert counts["column prompt"] == 1


def test_a_conversation_of_another_shape_is_left_out():
    counts = Counter()
    row = {"chosen": [USER, GOOD], "rejected": [USER, BAD], "conversation": [{"input": "u", "output": "g"}]}

    assert isinstance(from_trl(row, task_id="row-1", counts=counts), PreferencePair)
    assert counts["column conversation"] == 1
    with pytest.raises(DataError, match="has conversations beside chosen and rejected"):
        read_row({"conversations": [USER], "chosen": [SYSTEM, GOOD], "rejected": [SYSTEM, BAD]}, 1)


def test_keys_beside_the_messages_of_openai_are_counted():
    counts = Counter()
    row = {
        "input": {"messages": [USER], "mood": "glad"},
        "preferred_output": [GOOD],
        "non_preferred_output": [BAD],
    }

    from_trl(row, task_id="row-1", counts=counts)

    assert counts["column input.mood"] == 1
