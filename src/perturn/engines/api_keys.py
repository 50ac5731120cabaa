"""API keys of servers, which are read from environment variables and never from a recipe."""

from __future__ import annotations

import os
import re

from perturn.errors import ConfigError


def key_in(variable: str, host: str, begins: str = "") -> str:
    """Return the API key in an environment variable; no error message shows the key.

    Args:
        variable: Name of the environment variable.
        host: Name of the server, for error messages.
        begins: Prefix that every key of the server has.

    Raises:
        ConfigError: If the variable is not set or holds no key.
    """
    key = os.environ.get(variable, "").strip()
    if not re.fullmatch(rf"{begins}[\w.:/+=~@-]+", key, re.ASCII):
        must = f" that begins with {begins}" if begins else ""
        raise ConfigError(
            f"environment variable {variable} must hold a key{must}, and {'does not' if key else 'is not set'}; export "
            f"the key of {host} in it, or name another variable in api_key_env (null if the server asks for no key)."
        )
    return key
