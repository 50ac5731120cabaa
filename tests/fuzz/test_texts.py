"""What models write: read in linear time, and as before."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz.mutations import answers, fuzzed, scrambled
from perturn.envs.hotpotqa.fireact import Step, _steps
from perturn.episodes.formats import FORMATS
from perturn.episodes.tool_calls import parse_text, read_action
from perturn.formats.chat_messages import read_answer
from perturn.report.episode_view import split_action

OLD_REACT = re.compile(
    r"Thought:[ \t]*(?P<thought>[^\n]*(?:\n(?!Action:)[^\n]*)*)\nAction:[ \t]*(?P<action>[^\n]+)"
)
OLD_ACTION = re.compile(r"Action:[ \t]*(?P<action>[^\n]+)")
OLD_STEP = re.compile(
    r"\s*Thought:[ \t]*(?P<thought>.*?)\s*\nAction:[ \t]*(?P<action>[^\n]+)"
    r"(?:\nObservation:[ \t]*(?P<observation>.*?))?\s*(?=\nThought:|\Z)",
    re.DOTALL,
)
OLD_SPLITS = (
    re.compile(r"\s*<think>(?P<thought>.*?)</think>\s*(?P<action>.*)", re.DOTALL),
    re.compile(r"\s*Thought:[ \t]*(?P<thought>.*?)\n[ \t]*Action:[ \t]*(?P<action>.*)", re.DOTALL),
    re.compile(r"\s*Action:[ \t]*(?P<action>.*)", re.DOTALL),
)
PARTS = [
    "Thought:", "Action:", "Observation:", "<think>", "</think>", "\n", "\n\n", " ", "\t", "\r", "\u2028", "a", "a b",
    "\nThought: a\nAction: b\nObservation: c",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(PARTS), max_size=14).map("".join)


def old_format(pattern, text):
    match = pattern.fullmatch(text.strip())
    return (match["action"].strip() or None) if match else None


def old_steps(text):
    at = 0
    while match := OLD_STEP.match(text, at):
        yield Step(match["thought"], match["action"].strip(), match["observation"] or "")
        at = match.end()
        if match["observation"] is None:
            return


def old_split(text):
    for pattern in OLD_SPLITS:
        match = pattern.fullmatch(text)
        if match:
            thought, action = match.groupdict().get("thought") or "", match["action"].strip()
            inner = old_split(action) if pattern is OLD_SPLITS[0] else ("", action)
            return "\n".join(part for part in (thought.strip(), inner[0]) if part), inner[1]
    return "", text


@fuzzed
@given(text=TEXTS)
def test_texts_mean_what_they_meant(text):
    """The patterns that were replaced, which were quadratic or cubic, as the reference."""
    assert FORMATS["react"].parse(text) == old_format(OLD_REACT, text)
    assert FORMATS["action"].parse(text) == old_format(OLD_ACTION, text)
    assert list(_steps(text)) == list(old_steps(text))
    assert split_action(text) == old_split(text)


LONG = [
    "Thought:" + " " * 200_000,
    "Thought:" + "\n" * 200_000 + "x",
    "Action:" + " " * 200_000 + "\nx",
    "Thought: a" + "\n \t" * 70_000 + "x",
    "Thought:\nAction: a\n" * 20_000,
    "Thought: a\nAction: b" + " \n" * 90_000 + "x",
    "<think>" * 30_000,
    "<think>" + "</think>" * 2000,
    "\nAction: x" * 20_000,
    "Thought:" + "\n    " * 50_000 + "Action",
    "<tool_call>\n{" * 20_000,
    "<tool_call>" + "[" * 100_000,
    "<tool_call>" * 20_000,
]


@pytest.mark.parametrize("text", LONG, ids=lambda text: repr(text[:20]))
def test_long_texts_are_read_in_linear_time(text):
    """200,000 characters in less than a second of the processor; what was quadratic took minutes."""
    start = time.process_time()

    for name in FORMATS:
        FORMATS[name].parse(text)
    list(_steps(text))
    split_action(text)
    read_action(text)
    assert time.process_time() - start < 3


CALLS = b'Text.\n<tool_call>\n{"name": "f", "arguments": {"a": [1, 2.5, null]}}\n</tool_call>'


@fuzzed
@given(text=scrambled(CALLS), action=scrambled(b'{"text": "a", "calls": [{"name": "f", "arguments": {}}]}'))
def test_tool_calls(text, action):
    with answers():
        parse_text(text.decode("utf-8", "surrogateescape"))
        read_action(action.decode("utf-8", "surrogateescape"))
        arguments = text[30:].decode("utf-8", "surrogateescape")
        read_answer(
            {"tool_calls": [{"id": "a", "function": {"name": "f", "arguments": arguments}}]}, "answer"
        )
