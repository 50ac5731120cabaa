import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perturn.errors import DataError
from perturn.formats.trl_rows import from_trl, to_trl
from perturn.types import Action, Task, Trajectory, Turn

CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "door"}}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def system(content):
    return {"role": "system", "content": content}


def user(content):
    return {"role": "user", "content": content}


def said(content, **rest):
    return {"role": "assistant", "content": content, **rest}


def turn(observation, text, *calls):
    messages = (user(observation),) if isinstance(observation, str) else tuple(observation)
    return Turn(messages, Action(text, tool_calls=calls))


def trajectory(*turns, prompt=(), **changes):
    return Trajectory(Task("t"), tuple(turns), prompt=tuple(prompt), **changes)


WORDS = st.text(min_size=1, max_size=4)
SAID = WORDS.filter(str.strip)  # an answer of white space alone carries no loss
OBSERVATION = st.lists(
    st.builds(user, WORDS)
    | st.builds(lambda text: {"role": "tool", "content": text, "tool_call_id": "1", "name": "f"}, WORDS),
    max_size=2,
).map(tuple)
TURNS = st.lists(
    st.builds(Turn, OBSERVATION, st.builds(Action, SAID, tool_calls=st.sampled_from([(), (CALL,)]))),
    min_size=1,
    max_size=4,
)
PROMPT = st.lists(st.builds(system, WORDS), max_size=1).map(tuple)
EXAMPLES = st.lists(st.tuples(st.builds(user, WORDS), st.builds(said, WORDS)), max_size=2)
TOOLS = st.sampled_from([(), (TOOL,)])


def test_messages_become_turns():
    """System text is prompt; what stands between two answers is an observation, kept as it is."""
    tool = {"role": "tool", "content": "a door", "tool_call_id": "7", "name": "look"}
    row = {"messages": [system("s"), user("u"), said(None, tool_calls=[CALL]), tool, user("go"), said("go")]}

    read = from_trl(row | {"tools": [TOOL], "source": 3}, task_id="t")

    assert read == trajectory(
        turn("u", "", CALL), turn([tool, user("go")], "go"), prompt=[system("s")], tools=(TOOL,)
    )


def test_answers_in_an_explicit_prompt_are_no_turns():
    """The prompt goes in up to its last answer; the question after it is the first observation."""
    row = {
        "prompt": [system("s"), user("example"), said("answer"), user("u")],
        "completion": [said("a"), user("v"), said("b")],
    }

    read = from_trl(row, task_id="t")

    assert read.prompt == (system("s"), user("example"), said("answer"))
    assert read.turns == (turn("u", "a"), turn("v", "b"))


def test_an_explicit_pair_shares_its_prompt():
    """The first observation comes from the prompt, on both sides; the sides are samples 0 and 1."""
    row = {
        "prompt": [system("s"), user("u")],
        "chosen": [said("a"), user("v"), said("b")],
        "rejected": [said("c")],
    }

    pair = from_trl(row, task_id="t")

    assert pair.chosen == trajectory(turn("u", "a"), turn("v", "b"), prompt=[system("s")])
    assert pair.rejected == trajectory(turn("u", "c"), prompt=[system("s")], sample=1)


def test_an_implicit_prompt_is_what_both_sides_begin_with():
    """As TRL cuts it, so that shared turns carry no loss; a text prompt beside it is ignored."""
    shared = [system("s"), user("u"), said("a"), user("v")]
    row = {"prompt": "u", "chosen": [*shared, said("b")], "rejected": [*shared, said("c")], "messages": []}

    pair = from_trl(row, task_id="t")

    assert pair.chosen.prompt == pair.rejected.prompt == (system("s"), user("u"), said("a"))
    assert pair.chosen.turns == (turn("v", "b"),)
    assert pair.rejected.turns == (turn("v", "c"),)
    assert pair == from_trl({"prompt": shared, "chosen": [said("b")], "rejected": [said("c")]}, task_id="t")


def test_an_implicit_prompt_leaves_each_side_an_answer():
    """One side is the beginning of the other, with and without a message after its last answer."""
    short = [user("u"), said("a")]
    for chosen in (short, [*short, user("v")]):
        pair = from_trl({"chosen": chosen, "rejected": [*short, user("v"), said("b")]}, task_id="t")

        assert pair.chosen == trajectory(turn("u", "a"))
        assert pair.rejected.turns == (turn("u", "a"), turn("v", "b"))


def called(name):
    """The beginning of a side, whose ids and date contain a name."""
    result = {"role": "tool", "content": "a door", "tool_call_id": name, "timestamp": name}
    return [user("u"), said("", tool_calls=[CALL | {"id": name}]), result]


def test_an_implicit_prompt_may_differ_in_ids_and_dates():
    """Each side keeps its own ids, so that each result belongs to its call."""
    pair = from_trl({"chosen": [*called("1"), said("b")], "rejected": [*called("2"), said("c")]}, task_id="t")

    for side, name, answer in ((pair.chosen, "1", "b"), (pair.rejected, "2", "c")):
        assert side.prompt[1]["tool_calls"][0]["id"] == side.turns[0].observation[0]["tool_call_id"] == name
        assert [turn.action.text for turn in side.turns] == [answer]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": called("1")[:2], "rejected": called("2")[:2]}, "expected another text than in chosen"),
        ({"prompt": called("1"), "completion": [*called("2"), said("b")]}, "repeats the prompt"),
    ],
)
def test_equal_messages_with_other_ids_are_refused(row, message):
    with pytest.raises(DataError, match=message):
        from_trl(row, task_id="t")


def test_the_flat_schema_of_the_responses_api_is_wrapped():
    """`type` moves to the outer object."""
    row = {"messages": [user("u"), said("a")], "tools": [{"type": "function", **TOOL["function"]}]}

    assert from_trl(row, task_id="t").tools == (TOOL,)


@given(TURNS, TURNS, TURNS, PROMPT)
def test_the_implicit_prompt_is_trls(shared, chosen, rejected, prompt):
    """Of sides that differ in their first answers after a common beginning."""
    beginning = trajectory(*shared, prompt=prompt).messages
    row = {
        "chosen": [*beginning, said("yes"), *trajectory(*chosen).messages],
        "rejected": [*beginning, said("no"), *trajectory(*rejected).messages],
    }
    prompted = pytest.importorskip("trl.data_utils").extract_prompt(row)

    assert from_trl(row, task_id="t") == from_trl(prompted, task_id="t")


def test_an_answer_after_an_answer_has_an_empty_observation():
    """Also where the prompt ends with one."""
    read = from_trl({"prompt": [user("u"), said("a")], "completion": [said("b"), said("c")]}, task_id="t")

    assert read == trajectory(turn([], "b"), turn([], "c"), prompt=[user("u"), said("a")])


def test_messages_after_the_last_answer_are_dropped_and_counted():
    """One after chosen, two after rejected: three."""
    counts = Counter(trailing_messages=1)
    row = {
        "chosen": [user("u"), said("a"), user("x")],
        "rejected": [user("u"), said("b"), user("x"), user("y")],
    }

    pair = from_trl(row, task_id="t", counts=counts)

    assert counts == {"trailing_messages": 4}
    assert pair.chosen.messages == [user("u"), said("a")]


def test_tools_may_be_json_text():
    """As TRL takes them."""
    row = {"messages": [user("u"), said("a")]}

    assert from_trl(row | {"tools": json.dumps([TOOL])}, task_id="t").tools == (TOOL,)
    assert from_trl(row | {"tools": "null"}, task_id="t").tools == ()


def test_keys_that_arrow_filled_with_none_are_absent():
    """A data set of two rows: each gets the keys of both, with None where it had none."""
    datasets = pytest.importorskip("datasets")
    other = {"type": "function", "function": {"name": "go", "arguments": {"to": "hall"}}}
    rows = [
        {"messages": [system("s"), user("u"), said("", tool_calls=[CALL])], "tools": [TOOL]},
        {
            "messages": [
                user("u"),
                said("", tool_calls=[other]),
                {"role": "tool", "content": "x", "name": "go"},
                said("b"),
            ]
        },
    ]
    filled = datasets.Dataset.from_list(rows)

    assert filled[0]["messages"][0]["tool_calls"] is None
    assert [from_trl(row, task_id="t") for row in filled] == [from_trl(row, task_id="t") for row in rows]


def test_numpy_arrays_count_as_lists():
    """What data sets in numpy format hand out."""
    row = {
        "messages": np.array([user("u"), said("a")], dtype=object),
        "tools": np.array([TOOL], dtype=object),
    }

    assert from_trl(row, task_id="t") == trajectory(turn("u", "a"), tools=(TOOL,))


def test_parts_of_text_are_joined():
    """In every role, since many chat templates take text alone."""
    blocks = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]

    read = from_trl({"messages": [user(blocks), said(blocks)]}, task_id="t")

    assert read == trajectory(turn("ab", "ab"))


U, A = user("u"), said("a")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([U, A], r"row 3: expected a mapping"),
        ({"said": "x"}, r"row 3: expected one of the forms messages .*; got said\. Rename the columns\."),
        ({}, r"row 3: expected one of the forms messages .*; got no keys\."),
        ({"chosen": [U, A]}, r"row 3: expected one of the forms .*; got chosen\."),
        ({"prompt": [U], "completion": None}, r"row 3: expected one of the forms .*; got prompt\."),
        (
            {"conversations": [{"from": "human", "value": "x"}]},
            r"row 3: messages: expected an assistant message, got none",
        ),
        ({"messages": "u"}, r"row 3: messages: expected messages, got text.*Wrap it"),
        ({"prompt": "u", "chosen": "a", "rejected": [A]}, r"row 3: one of chosen and rejected is text"),
        (
            {"prompt": "<|im_start|>user", "completion": "a"},
            r"row 3: prompt: expected plain text, got a conv",
        ),
        ({"text": "### Human: a"}, r"row 3: text: expected plain text, got a conversation"),
        ({"prompt": "u", "completions": ["a"], "labels": [True]}, r"row 3: .* Stepwise supervision"),
        ({"prompt": [U], "completion": [A], "label": False}, r"row 3: label: unpaired preferences"),
        ({"messages": {"role": "user"}}, r"row 3: messages: expected a list of messages"),
        ({"messages": [U]}, r"row 3: messages: expected an assistant message, got none\. Drop"),
        ({"messages": []}, r"row 3: messages: expected an assistant message, got none"),
        ({"chosen": [U, A], "rejected": [U]}, r"row 3: rejected: expected an assistant message"),
        (
            {"prompt": [U, A], "chosen": [A], "rejected": [U]},
            r"row 3: rejected: expected an assistant message",
        ),
        ({"chosen": [U, A], "rejected": [U, A, U]}, r"row 3: rejected: expected another text than in chosen"),
        ({"prompt": [U], "completion": [U, A]}, r"row 3: completion: repeats the prompt\."),
        ({"messages": [U, said("")]}, r"row 3: messages: .*carries loss, but all of them are empty"),
        (
            {"messages": [U, said(None, tool_calls=[])]},
            r"row 3: messages: .*carries loss, but all of them are empty",
        ),
        ({"messages": [U, "a"]}, r"row 3: messages\[1\]: expected a message object, got 'a'"),
        ({"messages": [U, None]}, r"row 3: messages\[1\]: expected a message object, got None"),
        ({"messages": [{"content": "x"}, A]}, r"row 3: messages\[0\]: expected a message with a role"),
        (
            {"messages": [U, {"role": "asistant", "content": "a"}]},
            r"messages\[1\]\.role: .*Did you mean 'assistant'",
        ),
        ({"messages": [U, said(3)]}, r"messages\[1\]\.content: expected text, got 3"),
        ({"messages": [user([{"type": "image"}]), A]}, r"messages\[0\]\.content\[0\]: expected a text part"),
        (
            {"messages": [user([{"type": "image", "text": "a door"}]), A]},
            r"content\[0\]: expected a text part \(images .* Drop the row",
        ),
        (
            {"messages": [U, said("a", tool_calls="f()")]},
            r"messages\[1\]\.tool_calls: expected a list of objects",
        ),
        (
            {"messages": [U, said("a", reasoning_content=["hm"])]},
            r"messages\[1\]\.reasoning_content: expected text",
        ),
        ({"messages": [U, A], "tools": "[{"}, r"row 3: tools: expected "),
        ({"messages": [U, A], "tools": ["look"]}, r"row 3: tools: expected "),
    ],
)
def test_a_row_that_cannot_be_read_is_refused(row, message):
    """Each message says which row, where in it, and what to do; nothing is counted."""
    counts = Counter()

    with pytest.raises(DataError, match=message):
        from_trl(row, task_id="t", index=3, counts=counts)

    assert not counts


def test_without_an_index_the_message_says_row():
    """The index is for those who have one."""
    with pytest.raises(DataError, match=r"^row: messages: "):
        from_trl({"messages": [U]}, task_id="t")


def row_of(trajectory):
    """A trajectory as TRL's SFT takes it: what carries no loss is the prompt."""
    opening = len(trajectory.prompt) + len(trajectory.turns[0].observation)
    messages = trajectory.messages
    if any(message["role"] == "assistant" for message in trajectory.prompt):
        row = {"prompt": messages[:opening], "completion": messages[opening:]}
    else:
        row = {"messages": messages}
    return {**row, "tools": list(trajectory.tools)}


@given(TURNS, PROMPT, EXAMPLES, TOOLS)
def test_a_trajectory_round_trips(turns, prompt, examples, tools):
    """Messages, prompt, turns and tools: with worked examples and without them."""
    original = trajectory(
        *turns, prompt=[*prompt, *(each for pair in examples for each in pair)], tools=tools
    )

    assert from_trl(row_of(original), task_id="t") == original


def test_a_prompt_that_ends_with_a_question_moves_to_the_first_observation():
    """The messages are the same; TRL's rows have no mark between the two."""
    original = trajectory(turn("u", "a"), prompt=[system("s"), user("rules")])

    read = from_trl(row_of(original), task_id="t")

    assert read == trajectory(turn([user("rules"), user("u")], "a"), prompt=[system("s")])


def test_an_answer_given_twice_is_no_repeated_prompt():
    """Only a prompt that opens with a question can be told from one."""
    original = trajectory(turn([], "a"), prompt=[said("a")])

    assert from_trl(row_of(original), task_id="t") == original


@given(TURNS, TURNS, TURNS, PROMPT, TOOLS)
def test_a_pair_round_trips(shared, chosen, rejected, prompt, tools):
    """Turns that both sides share stay in both sides."""
    opening = Turn((user("u"),), shared[0].action)
    sides = [
        trajectory(opening, *shared[1:], *rest, prompt=prompt, tools=tools) for rest in (chosen, rejected)
    ]
    opened = len(prompt) + 1
    row = {
        "prompt": sides[0].messages[:opened],
        "chosen": sides[0].messages[opened:],
        "rejected": sides[1].messages[opened:],
        "tools": list(tools),
    }

    if sides[0] != sides[1]:
        read = from_trl(row, task_id="t")
        assert (read.chosen.turns, read.rejected.turns) == (sides[0].turns, sides[1].turns)
        assert read.chosen.prompt == read.rejected.prompt == prompt
        assert read.chosen.tools == tools


def test_an_episode_of_a_shortened_history_is_no_row_of_trl():
    """Three turns with sight of one are not one conversation; two of them are."""
    turns = [turn(f"room {i}", "north") for i in range(3)]

    assert to_trl(trajectory(*turns[:2], history=1))["prompt"] == [user("room 0")]
    with pytest.raises(
        DataError, match=r"3 turns are not one conversation.*only the last 1 at each.*history=full"
    ):
        to_trl(trajectory(*turns, history=1))
