"""The least a recipe must say, and the line with which a wrong one is refused."""

import pytest

from perturn.errors import ConfigError


def small(**changes):
    """The least a recipe must say."""
    return {
        "name": "small",
        "model": {"name": "smollm2-135m"},
        "environment": {"name": "scienceworld"},
        "protocol": {"name": "scienceworld-eto"},
        "sft": {"loss": {"name": "sft"}},
        "align": {"loss": {"name": "tlm-dre"}},
    } | changes


def refusal(call, *arguments):
    """The one line a wrong recipe is refused with."""
    with pytest.raises(ConfigError) as caught:
        call(*arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message
