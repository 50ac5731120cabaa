"""Quantity `contributions`: contribution of each turn to its episode's score, from a linear head on hidden states.

The head is fitted so that the sum of the contributions is the score. It reads the hidden state at the last token of the
turn's action, so it depends on the action and not on the reply. Heads are cross-fitted like the heads of
`perturn.policy.value_heads`: the head for an episode is fitted on other episodes. So the contributions of earlier turns
depend on the past alone, and a baseline may contain them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum
from typing import ClassVar

import torch

from perturn.extend import Need, Returns, Trajectory
from perturn.extend.quantity_tools import (
    ACTED,
    TOKEN_BUDGET,
    Computed,
    Encoded,
    Ground,
    Quantity,
    QuantityTraits,
    Reader,
    Source,
    Step,
    action_features,
    cross_fit_sums,
    encoded,
    explained_variance,
    frozen,
    in_order,
)
from perturn.extend.tensors import Return
from perturn.methods.spa.spa_credit import Contributions, Shares


def turn_contributions(
    model: object, sequences: Sequence[Encoded], scores: Sequence[float], token_budget: int = TOKEN_BUDGET
) -> list[Shares]:
    """Return the contribution of each turn to the score of its episode, from cross-fitted heads.

    Args:
        model: Causal language model on the device to compute on.
        sequences: Episodes as tokens, with all of their turns. The fold of an episode depends on its index.
        scores: Score S of each episode, in units of reward.
        token_budget: Maximum number of tokens of one pass.

    Returns:
        Contributions from each head, and the head that was not fitted on the episode. With a single episode, all
        contributions are 0.
    """
    features = action_features(model, sequences, token_budget)
    found = cross_fit_sums(features, scores)
    return [Shares(heads.tolist(), index % len(heads)) for index, heads in enumerate(found)]


def contributions_of(trajectories: Sequence[Trajectory], returns: Returns, reader: Reader) -> list[Shares]:
    """Return `turn_contributions` of trajectories under a loaded policy.

    Args:
        trajectories: Episodes; their order does not matter. An episode without turns has no contributions.
        returns: Function from trajectories to the rewards to count.
        reader: Loaded policy, whose hidden states the heads read.

    Returns:
        Contributions from each head, in units of reward, one `Shares` per trajectory.
    """
    rows = encoded(trajectories, reader.renderer)
    order, scores = in_order(rows, trajectories), scores_of(trajectories, returns)
    sequences, own = [rows[i].chosen for i in order], [scores[i] for i in order]
    with frozen(reader.model, reader.precision):
        shares = turn_contributions(reader.model, sequences, own, reader.token_budget)
    found = dict(zip(order, shares, strict=True))
    return [found.get(i, Shares([[]])) for i in range(len(trajectories))]


def scores_of(trajectories: Sequence[Trajectory], returns: Returns) -> list[float]:
    """Return the score of each episode: the sum of its rewards from `returns`, in units of reward [trajectories]."""
    return [fsum(rewards) for rewards in returns(trajectories)]


def explained_scores(found: Sequence[Shares], scores: Sequence[float]) -> float | None:
    """Return the share of the variance of scores that the summed contributions explain, over episodes with turns."""
    pairs = [(fsum(own.own), score) for own, score in zip(found, scores, strict=True) if own.own]
    sums, ends = ([[[pair[side]]] for pair in pairs] for side in (0, 1))
    return explained_variance(sums, ends)


class TurnContributions(Quantity):
    """Contribution of each turn to the score of its episode; see `turn_contributions`.

    The credit gets them as argument `contributions`: one `Shares` per trajectory, in units of reward. `own` [turns] has
    the contributions from the head that was not fitted on this episode, and `by(head)` [turns] from another head.
    """

    traits: ClassVar[QuantityTraits] = QuantityTraits(
        "a pass of the policy that acted over the episodes, and ridge fits",
        passes=1,
        policies=frozenset({ACTED}),
    )
    request: ClassVar[type[Need]] = Contributions

    def compute(self, request: Contributions, episodes: Sequence[Trajectory], source: Source) -> Computed:
        """Compute the contributions with heads on the hidden states of the policy that acted."""
        returns = request.returns or Return()
        found = contributions_of(episodes, returns, source.policy(ACTED))
        explained = explained_scores(found, scores_of(episodes, returns))
        return Computed(found, counts={"explained_variance": explained})

    def exact(self, request: Contributions, ground: Ground) -> list[list[float]]:
        """Return the contributions from an imperfect head, in units of reward `[episodes][turns]`.

        A contribution is the mean of the action's expected reward and an equal share of the expected score. The sum
        over an episode equals its score only in expectation.
        """
        every = ground.episodes
        lengths = torch.tensor([len(steps) for steps in every.steps], dtype=torch.float64)
        share = every.value(0, 0, 1.0) / float(every.probability @ lengths)

        def earned(step: Step) -> float:
            outcomes = list(every.process.actions[step.state].values())[step.action]
            return fsum(outcome.probability * outcome.reward for outcome in outcomes)

        return [[(earned(step) + share) / 2 for step in steps] for steps in every.steps]
