"""Explorer `file`: episodes that were played elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from perturn.bounds import ROWS
from perturn.config.explorer_settings import ExplorerTraits
from perturn.explore.protocol import Explorer


@dataclass(frozen=True)
class FileEpisodes(Explorer):
    """Take the episodes of a file, such as one of `perturn import-logs`; nothing is played (docs: Logs you have).

    Source: none is needed.
    Differs: nothing.
    """

    path: Annotated[str, ROWS] = field(kw_only=True)
    """A file or folder of trajectories. Episodes of one task are a group."""

    @property
    def traits(self) -> ExplorerTraits:
        """Return a note that the episodes come from the file."""
        return ExplorerTraits(source=self.path)
