"""Adapters to environments, one file each. Add yours to ENVIRONMENTS."""

from __future__ import annotations

from turnwise.envs.scienceworld import ScienceWorld
from turnwise.types import Environment

ENVIRONMENTS: dict[str, type[Environment]] = {"scienceworld": ScienceWorld}
"""Environments by the name that recipes use."""
