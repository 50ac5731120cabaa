"""Distributions of scipy, imported when the first is asked for: that takes a second, and many runs need none."""

from __future__ import annotations

import importlib
from typing import Any


class _Module:
    """A module of scipy that is imported at its first use."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)


stats: Any = _Module("scipy.stats")
"""`scipy.stats`."""
optimize: Any = _Module("scipy.optimize")
"""`scipy.optimize`."""
