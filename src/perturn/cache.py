"""Where things are kept that can be made again: converted models, reference log-probabilities, indexes."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """The user's cache folder; `PERTURN_CACHE` overrides it."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "perturn"
    return Path(os.environ.get("PERTURN_CACHE", default))
