"""Prompt templates that ask a judge for a rating, with names in braces as placeholders."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

NAME = re.compile(r"\{(\w+)\}")
"""Pattern of a placeholder: a name in braces."""


@dataclass(frozen=True)
class PromptTemplate:
    """System prompt and template of the user message that ask for a rating."""

    system: str
    template: str

    def fill(self, texts: Mapping[str, str]) -> str:
        """Return the template with its placeholders replaced by texts; braces in a text are not changed."""
        return fill(self.template, texts)


def fill(template: str, texts: Mapping[str, str]) -> str:
    """Return a template with its placeholders replaced by texts.

    Placeholders without a text stay as they are, and so do braces in a text.
    """
    return NAME.sub(lambda name: texts.get(name[1], name[0]), template)
