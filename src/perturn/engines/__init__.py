"""Engines, which answer prompts: one package each."""

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
"""Engine by name: the frozen dataclass that is the section `engine:` of a recipe, and that checks and opens it."""
