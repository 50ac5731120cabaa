import json
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perturn.episodes.episode import understood
from perturn.episodes.formats import FORMATS
from perturn.episodes.tool_calls import parse_text
from perturn.types import Action

LINE = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\n"), max_size=30)
ACTION = LINE.map(str.strip).filter(bool)


@given(thought=LINE, action=ACTION)
def test_a_written_action_is_parsed_back(thought, action):
    """parse(write(thought, action)) = action, for every action of one line; for `tools` see test_tools."""
    for name in ("react", "action"):
        assert FORMATS[name].parse(FORMATS[name].write(thought, action)) == action


@given(thought=LINE, more=LINE, action=ACTION)
def test_a_thought_may_have_lines(thought, more, action):
    """Unless a line of it begins like an action: then it is not clear which one is meant."""
    parsed = FORMATS["react"].parse(f"Thought: {thought}\n{more}\nAction: {action}")

    assert parsed == (None if more.startswith("Action:") else action)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "look",
        "Action: look",
        "Thought: I look.",
        "Thought: a\nAction:",
        "Thought: a\nAction:   ",
        "Thought: a\naction: look",
        "Thought: a Action: look",
        "Thought: a\nAction: look\nAction: take",
        "Thought: a\nAction: look\nand more",
        "Thought: a\nAction: look\nObservation: a door",
        "Sure!\nThought: a\nAction: look",
        "Action: look\nThought: a",
    ],
)
def test_react_takes_one_thought_then_one_action_and_nothing_else(text):
    """An answer that breaks the format is None, never a guess."""
    assert FORMATS["react"].parse(text) is None


@pytest.mark.parametrize(
    "text", ["", "look", "Action:", "Action: ", "Thought: a\nAction: look", "Action: look\nAction: take"]
)
def test_action_takes_one_action_and_nothing_else(text):
    """The same without the thought."""
    assert FORMATS["action"].parse(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "Thought: a\nAction: look at door",
        "  Thought: a\nAction:look at door \n",
        "Thought:\nAction: look at door",
    ],
)
def test_blanks_around_do_not_matter(text):
    """Small policies write them."""
    assert FORMATS["react"].parse(text) == "look at door"


@pytest.mark.parametrize("name", ["react", "action"])
def test_what_the_policy_is_told_shows_the_format(name):
    """The instruction and the reminder name the lines that `write` writes."""
    reader = FORMATS[name]
    keys = [line.split(":")[0] for line in reader.write("a", "b").splitlines()]

    assert all(f"{key}:" in reader.instruction and f"{key}:" in reader.reminder for key in keys)
    assert reader.parse("\n".join(reader.instruction.splitlines()[1:])) == "..."


@given(text=st.text(st.characters(blacklist_categories=["Cs"]), max_size=50))
def test_plain_takes_all_of_a_text(text):
    """Whatever it is; blanks at both ends are left out."""
    assert FORMATS["plain"].parse(text) == text.strip()
    assert FORMATS["plain"].write("a thought", text) == text


OPENED = (
    "<think>\nIt is dark.\n</think>\n\n",
    "\n<think></think>\n",
    "<think>It is dark.</think>\n\n<think>I look.</think>",
    "[THINK]It is dark.[/THINK]",
    "<|channel>thought\nIt is dark.<channel|>",
)
PROMPTED = ("It is dark.\n</think>\n\n", "</think>", "It is dark.</think><think>I look.</think>")


@pytest.mark.parametrize(
    ("name", "thought"),
    [*product(["react", "action", "plain"], OPENED), *product(["react", "action"], PROMPTED)],
)
def test_closed_thoughts_before_an_answer_are_not_sent(name, thought):
    """The prompt may have opened the first; in `plain`, this cannot be told. The record keeps the whole text."""
    said = Action(thought + FORMATS[name].write("I go.", "go north"))

    assert understood(said, FORMATS[name]) == "go north"


@pytest.mark.parametrize("thought", [*OPENED, *PROMPTED])
def test_with_tools_a_thought_is_neither_sent_nor_an_answer(thought):
    """The record keeps the whole text. A call of the engine's own, beside a thought in the text, is sent too."""
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    sent = [
        understood(each, FORMATS["tools"])
        for each in (Action(thought + "Paris"), Action(thought), Action(thought, tool_calls=(call,)))
    ]

    assert sent == [
        '{"text": "Paris", "calls": []}', None, '{"text": "", "calls": [{"name": "look", "arguments": {}}]}',
    ]  # fmt: skip


def test_with_tools_a_later_thought_is_not_sent():
    call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    said = Action(f"<think>a</think>Hi {call}<think>b</think>more [THINK]c[/THINK]")

    assert json.loads(understood(said, FORMATS["tools"]))["text"] == "Hi\nmore"


@pytest.mark.parametrize(
    "text",
    ["Type '</think>' in the box", "go <think> on </think>", "<think>\nIt is dark.", "a</think>b", "go"],
)
def test_a_text_without_a_closed_thought_at_its_beginning_is_sent_whole(text):
    """A mark within the text is a word of it."""
    assert understood(Action(text), FORMATS["plain"]) == text


@pytest.mark.parametrize("thought", ["I close </think>", "<think>I go.</think>"])
def test_an_answer_in_the_format_is_read_as_it_is(thought):
    """A mark of thoughts in it changes nothing."""
    assert understood(Action(f"Thought: {thought}\nAction: go"), FORMATS["react"]) == "go"
    assert understood(Action(f"Action: say {thought}"), FORMATS["action"]) == f"say {thought}"


@pytest.mark.parametrize("thought", ["", "<think>\nI look.\n</think>\n\n"])
def test_a_call_in_a_list_without_marks_is_malformed(thought):
    """Llama writes such calls. Other words in brackets, and names of tools that are not offered, are a message."""
    tools = ({"type": "function", "function": {"name": "look", "parameters": {}}},)

    assert parse_text(f'{thought}[look(at="door")]', tools) is None
    assert parse_text(f'{thought}[take(at="door")]', tools).calls == ()
    assert parse_text(f"{thought}[look] (it)", tools).calls == ()
    assert parse_text(f"{thought}[look(me) says](http://x) hi", tools).calls == ()
