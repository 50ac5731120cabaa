"""Messages of harmony, the format of gpt-oss, and the calls among them."""

import pytest

from perturn.episodes.tool_calls import ToolAction, ToolCall, parse_text


def find(**arguments):
    return ToolCall("find", arguments)


def test_several_messages_of_harmony_are_one_action():
    """Thoughts, words for the user, and the end of an answer without a call."""
    text = (
        "<|channel|>analysis<|message|>Why <tool_call>?<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "I look.<|end|><|start|>assistant<|channel|>commentary to=functions.find <|constrain|>json<|message|>"
        '{"path": "<|call|>"}'
    )
    final = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Done.<|return|>"
    )

    assert parse_text(text) == ToolAction(
        "<think>\nWhy <tool_call>?\n</think>\n\nI look.", (find(path="<|call|>"),)
    )
    assert parse_text(final) == ToolAction("<think>\nHm.\n</think>\n\nDone.")


@pytest.mark.parametrize("other", ["assistant", "functions.drop"])
def test_a_message_of_harmony_to_two_recipients_is_malformed(other):
    """As gpt-oss writes it now and then, with its channel twice; the same recipient twice is one."""
    header = "<|channel|>commentary to={}<|channel|>commentary to=functions.find<|message|>{{}}<|call|>"

    assert parse_text(header.format(other)) is None
    assert parse_text(header.format("functions.find")) == ToolAction("", (find(),))
