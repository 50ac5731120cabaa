"""Quantity `values`: V of each turn, from a linear head on a policy's hidden states."""

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
    """Return V at the first tokens of each turn, from a head that is fitted on other episodes.

    Args:
        trajectories: Episodes; their order does not matter. An episode without turns has no values.
        targets: Function that returns the regression targets of V, at the tokens where V is needed.
        reader: Loaded policy, whose hidden states the head reads.

    Returns:
        V, in units of reward `[trajectories][turns][tokens]`.
    """
    rows = encoded(trajectories, reader.renderer)
    order = in_order(rows, trajectories)
    sequences = [rows[i].chosen for i in order]
    tokens = [[one.loss_turns.count(turn) for turn in range(one.turns)] for one in sequences]
    aims = targets([trajectories[i] for i in order], tokens)
    with frozen(reader.model, reader.precision):
        values = turn_values(reader.model, sequences, aims, reader.token_budget)
    found = dict(zip(order, values, strict=True))
    return [found.get(i, []) for i in range(len(trajectories))]


class TurnValues(Quantity):
    """V at the first tokens of each turn, from a cross-fitted ridge regression on hidden states.

    The credit gets it as argument `values`, in units of reward `[trajectories][turns][tokens]`. The request says at how
    many tokens.
    """

    traits: ClassVar[QuantityTraits] = QuantityTraits(
        "a pass of the policy that acted over the episodes, and ridge fits",
        passes=1,
        policies=frozenset({ACTED}),
        features_alone=True,
    )
    request: ClassVar[type[Need]] = Values

    def compute(self, request: Values, episodes: Sequence[Trajectory], source: Source) -> Computed:
        """Compute V with heads on the hidden states of the policy that acted."""
        found = values_of(episodes, request.targets, source.policy(ACTED))
        tokens = [[len(turn) for turn in of_one] for of_one in found]
        explained = explained_variance(found, request.targets(episodes, tokens))
        return Computed(found, counts={"explained_variance": explained})

    def exact(self, request: Values, ground: Ground) -> list[Tensor]:
        """Return the exact value of each turn's state, in units of reward, one tensor per episode [turns]."""
        return ground.episodes.values(ground.gamma)
