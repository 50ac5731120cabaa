"""The chat template that a recipe names."""

from __future__ import annotations

from perturn.errors import ConfigError
from perturn.io.reading import read_text, user_path
from perturn.policy.tokens import TOOLS_TEMPLATE
from perturn.settings.recipe import ModelSettings


def chat_template(settings: ModelSettings) -> str | None:
    """Text of the chat template the recipe names, if any."""
    if settings.chat_template is None:
        return None
    if settings.chat_template == "tools":
        return TOOLS_TEMPLATE.read_text(encoding="utf-8")
    file = user_path(settings.chat_template, "model.chat_template")
    return read_text(file, ConfigError, "Correct model.chat_template.", longest=1 << 20)
