"""Formats in which models write tool calls, one entry each, and a search for any of them in a text.

A format is recognised by the text that a call begins with, so that it need not be set. Formats with the same opening
tag differ in the text after it.
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
"""Formats of calls by name. Where the openings of two match at one place, the first one reads the call."""

__all__ = ["CALL_FORMATS", "CallFormat", "Found", "ToolCall", "Tools"]
