"""Backends: where a policy is trained and in which form it is kept, one package or module each."""

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
"""Backend by name: the frozen dataclass that is the section `backend:` of a recipe, and that checks and opens it."""
