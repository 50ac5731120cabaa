"""Quantity `contributions`: a linear head on a policy's last hidden states that adds up to the score of an episode.

The state is that at the last token of the turn's action, so it has seen the action, and not yet the reply. Heads are
cross-fitted like the heads of `perturn.policy.value_heads`: an episode's head learns from other episodes alone. So what
the turns before a turn contributed depends on the past alone, and may stand in a baseline.
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
    """Return contributions of each turn to the score of its episode, by heads that are each fitted on other episodes.

    Args:
        model: A causal language model on the device to compute on.
        sequences: Episodes as tokens, with all of their turns; an episode's part depends on its index.
        scores: S of each episode, in units of reward.
        token_budget: Tokens of one pass.

    Returns:
        By each head, and which one has not learned from the episode; 0 for an episode that is the only one.
    """
    features = action_features(model, sequences, token_budget)
    found = cross_fit_sums(features, scores)
    return [Shares(heads.tolist(), index % len(heads)) for index, heads in enumerate(found)]


def contributions_of(trajectories: Sequence[Trajectory], returns: Returns, reader: Reader) -> list[Shares]:
    """Return each turn's contribution to its episode's score, by heads that learned from other episodes.

    Args:
        trajectories: Episodes, in any order, which changes nothing; one without turns has no contributions.
        returns: Rewards that count.
        reader: The policy.

    Returns:
        In units of reward, by each head; see `turn_contributions`.
    """
    rows = encoded(trajectories, reader.renderer)
    order, scores = in_order(rows, trajectories), scores_of(trajectories, returns)
    sequences, own = [rows[i].chosen for i in order], [scores[i] for i in order]
    with frozen(reader.model):
        shares = turn_contributions(reader.model, sequences, own, reader.token_budget)
    found = dict(zip(order, shares, strict=True))
    return [found.get(i, Shares([[]])) for i in range(len(trajectories))]


def scores_of(trajectories: Sequence[Trajectory], returns: Returns) -> list[float]:
    """Return the sum of the rewards of each episode that count, in units of reward [trajectories]."""
    return [fsum(rewards) for rewards in returns(trajectories)]


def explained_scores(found: Sequence[Shares], scores: Sequence[float]) -> float | None:
    """Return the share of the variance of scores that the sums of contributions explain; of episodes with turns."""
    pairs = [(fsum(own.own), score) for own, score in zip(found, scores, strict=True) if own.own]
    sums, ends = ([[[pair[side]]] for pair in pairs] for side in (0, 1))
    return explained_variance(sums, ends)


class TurnContributions(Quantity):
    """Contribution of each turn to the score of its episode: `turn_contributions`.

    Given as `contributions`, in units of reward, a `Shares` a trajectory: `own [turns]` by a head that has
    learned from other episodes and knows the action of the turn, and `by(head) [turns]` by another's head.
    """

    traits: ClassVar[QuantityTraits] = QuantityTraits(
        "a pass of the policy that acted over the episodes, and ridge fits",
        passes=1,
        policies=frozenset({ACTED}),
    )
    request: ClassVar[type[Need]] = Contributions

    def compute(self, request: Contributions, episodes: Sequence[Trajectory], source: Source) -> Computed:
        """Compute the contributions, by heads on the policy that acted."""
        returns = request.returns or Return()
        found = contributions_of(episodes, returns, source.policy(ACTED))
        explained = explained_scores(found, scores_of(episodes, returns))
        return Computed(found, counts={"explained_variance": explained})

    def exact(self, request: Contributions, ground: Ground) -> list[list[float]]:
        """Return the contributions by a head which has learned half, in units of reward `[episodes][turns]`.

        Half is the expected reward of the action, and half an even share of the mean score. Over an episode they add up
        to its score in expectation alone.
        """
        every = ground.episodes
        lengths = torch.tensor([len(steps) for steps in every.steps], dtype=torch.float64)
        share = every.value(0, 0, 1.0) / float(every.probability @ lengths)

        def earned(step: Step) -> float:
            outcomes = list(every.process.actions[step.state].values())[step.action]
            return fsum(outcome.probability * outcome.reward for outcome in outcomes)

        return [[(earned(step) + share) / 2 for step in steps] for steps in every.steps]
