"""Adapters to inference engines, one file each. Add yours to ENGINES."""

from perturn.engines._api_settings import ApiSettings
from perturn.engines._vllm_settings import VllmSettings
from perturn.engines.api import ApiEngine
from perturn.engines.local import LocalEngine, LocalSettings
from perturn.engines.vllm import VllmEngine

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
