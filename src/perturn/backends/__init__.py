"""Backends, which determine where a policy is trained and how its weights are stored."""

from perturn.backends.protocol import Backend, BackendTraits, Training
from perturn.table import Table

__all__ = ["BACKENDS", "Backend", "BackendTraits", "Training"]

BACKENDS: Table[type[Backend]] = Table(
    "perturn.backends",
    {
        "local": "perturn.backends.local_backend:LocalBackend",
        "tinker": "perturn.backends.tinker.settings:TinkerSettings",
    },
)
"""Settings class of each backend by name: a frozen dataclass that reads the section `backend:` of a recipe."""
