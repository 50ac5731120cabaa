"""Engines, which generate the answers to prompts; each engine is a package."""

from perturn.engines.protocol import (
    EngineSettings,
    Loaded,
    ModelTakingEngine,
    Serving,
    SleepingEngine,
    Tokens,
    Updatable,
)
from perturn.table import Table

__all__ = [
    "ENGINES",
    "EngineSettings",
    "Loaded",
    "ModelTakingEngine",
    "Serving",
    "SleepingEngine",
    "Tokens",
    "Updatable",
]

ENGINES: Table[type[EngineSettings]] = Table(
    "perturn.engines",
    {
        "local": "perturn.engines.local.settings:LocalSettings",
        "api": "perturn.engines.api.settings:ApiSettings",
        "vllm": "perturn.engines.vllm.settings:VllmSettings",
        "tinker": "perturn.engines.tinker.settings:TinkerEngineSettings",
    },
)
"""Settings class of each engine by name: a frozen dataclass that reads the section `engine:` of a recipe."""
