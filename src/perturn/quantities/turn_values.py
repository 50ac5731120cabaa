"""Quantity `values`: V of turns, by a linear head on a policy's hidden states that is fitted on other episodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from perturn.needs import Need, Targets, Values
from perturn.policy.reference import frozen
from perturn.policy.value_heads import explained_variance, turn_values
from perturn.quantities.protocol import ACTED, Computed, Ground, Quantity, QuantityTraits, Source
from perturn.quantities.readers import Reader, encoded, in_order
from perturn.types import Trajectory


def values_of(
    trajectories: Sequence[Trajectory], targets: Targets, reader: Reader
) -> list[list[list[float]]]:
    """Return V at the turns of each episode, by a head on a policy's hidden states that is fitted on other episodes.

    Args:
        trajectories: Episodes, in any order, which changes nothing; one without turns has no values.
        targets: Where V is wanted, and for what return it stands.
        reader: The policy.

    Returns:
        V, in units of reward `[trajectories][turns][tokens]`.
    """
    rows = encoded(trajectories, reader.renderer)
    order = in_order(rows, trajectories)
    sequences = [rows[i].chosen for i in order]
    tokens = [[one.loss_turns.count(turn) for turn in range(one.turns)] for one in sequences]
    aims = targets([trajectories[i] for i in order], tokens)
    with frozen(reader.model):
        values = turn_values(reader.model, sequences, aims, reader.token_budget)
    found = dict(zip(order, values, strict=True))
    return [found.get(i, []) for i in range(len(trajectories))]


class TurnValues(Quantity):
    """V at the first tokens of each turn, by a cross-fitted ridge regression on hidden states.

    Given as `values`, in units of reward, at as many tokens as are asked for `[trajectories][turns][tokens]`.
    """

    traits: ClassVar[QuantityTraits] = QuantityTraits(
        "a pass of the policy that acted over the episodes, and ridge fits",
        passes=1,
        policies=frozenset({ACTED}),
        features_alone=True,
    )
    request: ClassVar[type[Need]] = Values

    def compute(self, request: Values, episodes: Sequence[Trajectory], source: Source) -> Computed:
        """Compute V, by heads on the policy that acted."""
        found = values_of(episodes, request.targets, source.policy(ACTED))
        tokens = [[len(turn) for turn in of_one] for of_one in found]
        explained = explained_variance(found, request.targets(episodes, tokens))
        return Computed(found, counts={"explained_variance": explained})

    def exact(self, request: Values, ground: Ground) -> list[Tensor]:
        """Return the exact value of the state of each turn [turns]."""
        return ground.episodes.values(ground.gamma)
