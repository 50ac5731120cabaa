"""Forms that ask a judge for a rating: texts with names in braces."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

NAME = re.compile(r"\{(\w+)\}")
"""A name in braces."""


@dataclass(frozen=True)
class Form:
    """One way to ask for a rating."""

    system: str
    template: str

    def fill(self, texts: Mapping[str, str]) -> str:
        """Return the template with texts for its names; braces in a text are not changed."""
        return fill(self.template, texts)


def fill(template: str, texts: Mapping[str, str]) -> str:
    """Return a template with texts for its names; other names in braces, and braces in a text, are not changed."""
    return NAME.sub(lambda name: texts.get(name[1], name[0]), template)
