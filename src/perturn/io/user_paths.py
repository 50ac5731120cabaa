"""Paths from users, on the command line or in a recipe."""

from __future__ import annotations

import os
from pathlib import Path

from perturn.errors import ConfigError, check_fit
from perturn.io.plain_data import short


def user_path(text: str | os.PathLike[str], where: str) -> Path:
    """Return a user's path with `~` expanded. The file need not exist.

    Args:
        text: The path.
        where: Setting or argument that names the path, such as `environment.corpus`, for messages.

    Raises:
        ConfigError: If the text cannot be a path.
    """
    try:
        path = Path(text).expanduser()
        path.exists()
        os.fsencode(path)
    except (OSError, ValueError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{where} is not a path: {short(str(text), 500)}: {reason}. Correct it.") from error
    check_fit("\0" not in str(path), where, "be a path without NUL characters", short(str(text), 500))
    return path
