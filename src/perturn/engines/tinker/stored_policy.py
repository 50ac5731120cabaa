"""The file that names a policy's saved state, if a service of the Tinker API stores the weights."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from perturn.errors import ModelError
from perturn.io.atomic_write import write_whole

AT_SERVICE = "tinker.json"
"""Name of this file in the folder of a policy."""


@dataclass(frozen=True)
class StoredPolicy:
    """A saved state at a service: weights and optimizer."""

    path: str
    """Name of the state, such as `tinker://model_1/weights/align-20`."""
    base: str
    """Name of the base model at the service."""
    rank: int
    """Rank of the adapters."""
    service: str
    """Address of the service that stores the state."""

    def write(self, folder: Path) -> None:
        """Write the file into the folder of a policy or checkpoint."""
        write_whole(folder / AT_SERVICE, json.dumps(asdict(self), indent=2) + "\n")


def stored_policy(folder: str | Path) -> StoredPolicy | None:
    """Return the saved state that the folder of a policy names; None if the folder has no such file.

    Args:
        folder: Folder of a policy; the name of a base model gives None.

    Raises:
        ModelError: If the file is damaged.
    """
    file = Path(folder) / AT_SERVICE
    if not file.is_file():
        return None
    try:
        return StoredPolicy(**json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ModelError(f"{file} cannot be read: {error}; restore it from a copy.") from error
