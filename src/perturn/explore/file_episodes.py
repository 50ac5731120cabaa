"""Explorer `file`: read episodes from a file instead of playing them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from perturn.bounds import ROWS
from perturn.config.explorer_settings import ExplorerTraits
from perturn.explore.protocol import Explorer


@dataclass(frozen=True)
class FileEpisodes(Explorer):
    """Read the episodes of a file, such as the output of `perturn import-logs`, and play none (docs: Import logs).

    Source: none is needed.
    Differs: nothing.
    """

    path: Annotated[str, ROWS] = field(kw_only=True)
    """File or folder of trajectories. The episodes of a task are a group."""

    @property
    def traits(self) -> ExplorerTraits:
        """Traits of the explorer: `source` names the file of its episodes."""
        return ExplorerTraits(source=self.path)
