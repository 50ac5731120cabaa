"""A backend that trains as the local one does, and depends on a package more."""

from dataclasses import dataclass
from typing import ClassVar

from perturn.extend import BackendTraits, LocalBackend


@dataclass(frozen=True)
class HereBackend:
    """Train in this process."""

    traits: ClassVar[BackendTraits] = BackendTraits(
        provides=LocalBackend.traits.provides, distributions=("filelock",)
    )

    def check(self, trainings, model, goes_on):
        """Check what the local backend checks."""
        LocalBackend().check(trainings, model, goes_on)

    def open(self, model):
        """Open the local backend."""
        return LocalBackend().open(model)
