"""Where things are kept that can be made again: converted models, reference log-probabilities, indexes."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """The user's cache folder; `TURNWISE_CACHE` overrides it."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "turnwise"
    return Path(os.environ.get("TURNWISE_CACHE", default))
