"""The smallest valid recipe, and the error for an invalid one."""

import pytest

from perturn.errors import ConfigError


def small(**changes):
    """Return the smallest valid recipe, with some changes."""
    return {
        "name": "small",
        "model": {"name": "smollm2-135m"},
        "environment": {"name": "scienceworld"},
        "protocol": {"name": "scienceworld-eto"},
        "sft": {"loss": {"name": "sft"}},
        "align": {"loss": {"name": "tlm-dre"}},
    } | changes


def refusal(call, *arguments):
    """Return the one-line error for an invalid recipe."""
    with pytest.raises(ConfigError) as caught:
        call(*arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message
