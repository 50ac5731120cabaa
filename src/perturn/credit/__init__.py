"""Turn-level credit: pure mathematics from trajectories to a number per turn. Add yours to CREDITS."""

from collections.abc import Callable
from typing import Any

CREDITS: dict[str, Callable[..., Any]] = {}
"""Credit method by name: settings -> (trajectories of one task -> a number per turn of each)."""
