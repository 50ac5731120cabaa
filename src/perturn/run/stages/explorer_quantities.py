"""Quantities that an explorer or a row maker reads of explored episodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perturn.config.stages import Stage
from perturn.needs import Distance, Need, name_of
from perturn.quantities import compute
from perturn.run.session import Session
from perturn.run.stages.quantity_source import RunSource
from perturn.types import Trajectory


def read_needs(
    session: Session,
    stage: Stage,
    episodes: Sequence[Trajectory],
    needs: Sequence[str | Need],
    reader: str = "the explorer",
) -> dict[str, Sequence[Any]]:
    """Return the requested quantities by name, an entry for each episode.

    Args:
        session: The run.
        stage: The stage that plays branches, or makes rows.
        episodes: Explored ones that did not FAIL, by task and sample.
        needs: Requests; the distance to a success is measured into the episodes instead.
        reader: Who needs them, for messages.
    """
    wanted = [need for need in needs if name_of(need) != Distance.name]
    source = RunSource(session.run.paths, session.recipe, stage.iteration)
    return {name: one.entries for name, one in compute(wanted, episodes, source, reader).items()}
