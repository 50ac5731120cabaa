"""Quantities that an explorer reads of the policy that explored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perturn.needs import Need, SuccessChance
from perturn.policy.entropies import turn_entropies
from perturn.policy.logprobs import prepare
from perturn.policy.reference import frozen
from perturn.run.prospects import chances_of
from perturn.run.quantities import open_policy
from perturn.run.readings import Reader, encoded
from perturn.run.session import Session
from perturn.settings.stages import Stage, policy_of
from perturn.types import Trajectory


def read_needs(
    session: Session, stage: Stage, episodes: Sequence[Trajectory], needs: Sequence[str | Need]
) -> dict[str, Sequence[Any]]:
    """Return the requested quantities by name, an entry for each episode.

    Args:
        session: The run.
        stage: The stage that plays branches.
        episodes: Explored ones that did not FAIL, by task and sample.
        needs: Requests for `entropy` and `success-chance`; the distance to a success is none of the policy's.
    """
    reader = open_policy(session.run.paths, session.recipe, policy_of(session.recipe, stage.iteration - 1))
    found: dict[str, Sequence[Any]] = {}
    for need in needs:
        if need == "entropy":
            found["entropy"] = _entropies(episodes, reader)
        elif isinstance(need, SuccessChance):
            found[need.name] = chances_of(episodes, need.others, reader)
    return found


def _entropies(episodes: Sequence[Trajectory], reader: Reader) -> list[list[float]]:
    """Entropy of the first token of each turn, without unit `[episodes][turns]`."""
    rows = encoded(episodes, reader.renderer)
    prepare(reader.model)
    with frozen(reader.model):
        entropies = turn_entropies(reader.model, [row.chosen for row in rows.values()], reader.token_budget)
    by_index = dict(zip(rows, entropies, strict=True))
    return [by_index.get(index, []) for index in range(len(episodes))]
