"""Adapters to inference engines, one file each. Add yours to ENGINES."""

from perturn.engines.api.engine import ApiEngine
from perturn.engines.api.settings import ApiSettings
from perturn.engines.local.engine import LocalEngine, LocalSettings
from perturn.engines.vllm.engine import VllmEngine
from perturn.engines.vllm.settings import VllmSettings

__all__ = [
    "ENGINES",
    "ApiEngine",
    "ApiSettings",
    "EngineSettings",
    "LocalEngine",
    "LocalSettings",
    "VllmEngine",
    "VllmSettings",
]

EngineSettings = LocalSettings | ApiSettings | VllmSettings

ENGINES: dict[str, type[EngineSettings]] = {
    "local": LocalSettings,
    "api": ApiSettings,
    "vllm": VllmSettings,
}
"""Engine by name: the frozen dataclass that is the section `engine:` of a recipe; `stage.open_engine` makes it."""
