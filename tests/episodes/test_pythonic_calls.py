"""Calls as Python writes them: literals alone, and exactly those."""

import pytest

from perturn.episodes.calls.find_calls import write_calls
from perturn.episodes.tool_calls import ToolAction, ToolCall, parse_text
from perturn.errors import DataError


def marked(text):
    return f"<|tool_call_start|>{text}<|tool_call_end|>"


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("[f(a='it\\'s', b=-1.5)]", {"a": "it's", "b": -1.5}),
        ('[f(a=[1, (2,)], b={"x": true, "y": null})]', {"a": [1, [2]], "b": {"x": True, "y": None}}),
        ("[f(a='x<|tool_call_end|>y')]", {"a": "x<|tool_call_end|>y"}),
        ('[f(a="""x\ny""")]', {"a": "x\ny"}),
        ("[f(a='C:\\\\dir\\n')]", {"a": "C:\\dir\n"}),
        ('[{"name": "f", "arguments": {"a": 1}}]', {"a": 1}),
        ("[f()]", {}),
    ],
)
def test_literals_are_read(text, arguments):
    """JSON's words for them too, which the chat template writes within objects."""
    assert parse_text(f"Go.{marked(text)}Done.") == ToolAction("Go.\nDone.", (ToolCall("f", arguments),))


def test_several_calls_and_names_with_dots():
    assert parse_text(marked("[f(a=1), g.h()]")) == ToolAction("", (ToolCall("f", {"a": 1}), ToolCall("g.h")))


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "[]",
            "f(a=1)",
            "[f(1)]",
            "[f(**{'a': 1})]",
            "[f(*[1])]",
            "[f(a=1, a=2)]",
            "[f(a={'b': 1, 'b': 2})]",
        ),
        *(
            "[f(a={1, 2})]",
            "[f(a=b'x')]",
            "[f(a=f'{1}')]",
            "[f(a=__import__('os'))]",
            "[f(a=1 + 2)]",
            "[f(a=1j)]",
        ),
        *(
            "[f(a=...)]",
            "[f(a=x)]",
            "[f(a=-True)]",
            "[f(a=1e999)]",
            "[look-up(a=1)]",
            "[f(from='x')]",
            "[f(a=1",
        ),
        *(
            "[f(a='C:\\dir')]",
            "[f(a='x\ny')]",
            "[f(a='\x00')]",
            "[g() for g in f]",
            "[f(a=" + "[" * 500,
            "[f()()]",
        ),
        *(
            "[f(a=" + "[" * 200 + "]" * 200 + ")]",
            "[f(a=" + "9" * 5000 + ")]",
            '[{"name": "f", "path": 1}]',
            '[{"name',
        ),
    ],
)
def test_anything_else_is_malformed(text):
    """Nothing is evaluated, and nothing is guessed."""
    assert parse_text(marked(text)) is None


def test_a_mark_without_the_other():
    """The end of the text closes a call that is complete."""
    assert parse_text("<|tool_call_start|>[f(a=1)]") == ToolAction("", (ToolCall("f", {"a": 1}),))
    assert parse_text("<|tool_call_start|>[f(a=1)") is None
    assert parse_text("Done.<|tool_call_end|>") is None


@pytest.mark.parametrize("name", ["look-up", "class"])
def test_a_name_that_is_none_in_python_is_not_written(name):
    with pytest.raises(DataError, match="cannot be written in the format 'pythonic'"):
        write_calls([ToolCall(name)], "pythonic")
