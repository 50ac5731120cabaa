"""The table of formats in which models write tool calls.

A format is recognised by the text at the start of a call, so users need not set it. Formats with the same opening tag
differ in the text after the tag.
"""

from perturn.episodes.calls.call import CallFormat, Found, ToolCall, Tools
from perturn.table import Table

CALL_FORMATS: Table[CallFormat] = Table(
    "perturn.call_formats",
    {
        "qwen-xml": "perturn.episodes.calls.qwen_xml:QWEN_XML",
        "glm": "perturn.episodes.calls.glm:GLM",
        "hermes": "perturn.episodes.calls.hermes:HERMES",
        "llama": "perturn.episodes.calls.llama:LLAMA",
        "mistral": "perturn.episodes.calls.mistral:MISTRAL",
        "deepseek": "perturn.episodes.calls.deepseek:DEEPSEEK",
        "gemma": "perturn.episodes.calls.gemma:GEMMA",
        "harmony": "perturn.episodes.calls.harmony:HARMONY",
        "pythonic": "perturn.episodes.calls.pythonic:PYTHONIC",
    },
)
"""Formats of calls by name. If the openings of two formats match at the same position, the first format reads the
call."""

__all__ = ["CALL_FORMATS", "CallFormat", "Found", "ToolCall", "Tools"]
