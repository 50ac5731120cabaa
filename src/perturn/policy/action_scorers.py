"""Values and rewards of single actions, for example to choose among candidates at test time."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum, inf
from typing import Any

import torch
from torch import Tensor

from perturn.chat.tokens import NO_TURN, Encoded
from perturn.errors import RunError
from perturn.policy.reference import compute_logprobs, frozen
from perturn.policy.value_heads import action_features, cross_fit, explained_variance, fit_values, folds_by
from perturn.types import Action, Prompt, Trajectory, failed, score, unfinished


class ActionValues:
    """Predicts the score of an episode after an action, by a ridge regression on the policy's hidden states.

        Q(h, a) = w x + b,   x the last hidden state at the last token of a

    Each turn of the training episodes is a row, whose target is the score of its episode. The regression is used on
    tasks that it was not trained on. So a whole task is in one fold of the cross-validation, which chooses the penalty
    and measures the explained variance.

    Source: Perturn; the head comes from `perturn.policy.value_heads`. Values as a guide at test time: Q-guided search,
    QLASS (Lin et al. 2025), arXiv:2502.02584.
    Differs: a linear head on a frozen policy, instead of a trained model.
    """

    def __init__(self, policy: Any, episodes: Sequence[Trajectory]) -> None:
        """Fit the regression.

        Args:
            policy: An open policy; see `perturn.select.protocol.OpenPolicy`.
            episodes: Training episodes. Failed episodes, unfinished episodes and episodes without turns are ignored.

        Raises:
            RunError: If no usable episode is left.
        """
        self._policy = policy
        kept = [one for one in episodes if one.turns and not failed(one) and not unfinished(one)]
        if not kept:
            raise RunError(
                "the episodes that a value head learns from all FAILED, are not over or have no turns; choose by "
                "something else."
            )
        encoded = self._encoded(kept)
        features = self._features(encoded)
        targets = [
            torch.full((len(own),), score(one), dtype=torch.float64)
            for own, one in zip(features, kept, strict=True)
        ]
        folds = _folds(kept)
        self._head = fit_values(features, targets, folds)
        self.episodes = len(kept)
        """Number of training episodes used."""
        self.tokens = sum(len(one.ids) for one in encoded)
        """Number of tokens of these episodes."""
        found, played = (
            [[[float(own[-1])]] for own in each] for each in (cross_fit(features, targets, folds), targets)
        )
        self.explained = explained_variance(found, played)
        """Share of the scores' variance that the values at the last turn explain; None if all scores are equal.

        The values come from cross-fitted regressions, which were not trained on the episode's task.
        """

    def of_episodes(self, episodes: Sequence[Trajectory]) -> list[float]:
        """Return the expected score after the last action of each episode, in units of reward; -inf without turns."""
        played = {i: one for i, one in enumerate(episodes) if one.turns}
        values = [-inf] * len(episodes)
        for i, own in zip(played, self._features(self._encoded(list(played.values()))), strict=True):
            values[i] = float(self._head(own[-1:]))
        return values

    def __call__(self, prompt: Prompt, actions: Sequence[Action]) -> list[float]:
        """Return Q of each action after a prompt, in units of reward; -inf for an action without token ids.

        The prompt is computed once for all actions.
        """
        ids = tuple(self._policy.renderer.prompt_ids(prompt))
        known = {i: one.token_ids for i, one in enumerate(actions) if one.token_ids}
        values = [-inf] * len(actions)
        found = self._features([after_prompt(ids, tokens) for tokens in known.values()])
        for i, own in zip(known, found, strict=True):
            values[i] = float(self._head(own))
        return values

    def _encoded(self, episodes: Sequence[Trajectory]) -> list[Encoded]:
        return [self._policy.renderer.encode(one, every_turn=True) for one in episodes]

    def _features(self, encoded: Sequence[Encoded]) -> list[Tensor]:
        with frozen(self._policy.model, self._policy.precision):
            return action_features(self._policy.model, encoded, self._policy.token_budget)


def _folds(episodes: Sequence[Trajectory]) -> list[int]:
    """Return the fold of each episode; folds are whole tasks, or single episodes if all are of one task."""
    tasks = [one.task.id for one in episodes]
    return folds_by(tasks if len(set(tasks)) > 1 else range(len(tasks)))


class ImplicitReward:
    """Rewards actions by the log-ratio of the sampling policy pi over the policy pi_0 from which its training started.

        r(a) = sum_j log pi(a_j | prompt, a_<j) - log pi_0(a_j | prompt, a_<j)

    Source: Rafailov et al. 2023, arXiv:2305.18290, Eq. 5, for one turn. The factor beta and the term that depends only
    on the prompt are left out, since they do not change the order of actions.
    Differs: log pi comes from the engine at sampling; log pi_0 is computed as in training.
    """

    def __init__(self, start: Any) -> None:
        """Set the policy pi_0.

        Args:
            start: The open policy pi_0; see `perturn.select.protocol.OpenPolicy`.
        """
        self._start = start

    def __call__(self, prompt: Prompt, actions: Sequence[Action]) -> list[float]:
        """Return rewards in nats, one per action; -inf for an action without token ids or log-probabilities.

        The prompt is computed once for all actions.
        """
        start, ids = self._start, tuple(self._start.renderer.prompt_ids(prompt))
        known = {i: one for i, one in enumerate(actions) if one.token_ids and one.logprobs}
        rows = [after_prompt(ids, one.token_ids or ()) for one in known.values()]
        with frozen(start.model, start.precision):
            found = compute_logprobs(start.model, rows, start.token_budget)
        rewards = [-inf] * len(actions)
        for (i, one), theirs in zip(known.items(), found, strict=True):
            rewards[i] = fsum(one.logprobs or ()) - float(theirs.double().sum())
        return rewards


def episode_logprobs(policy: Any, episodes: Sequence[Trajectory]) -> list[float]:
    """Return the sum of the log-probabilities of all actions' tokens for each episode, in nats; 0 without turns.

    Args:
        policy: An open policy; see `perturn.select.protocol.OpenPolicy`.
        episodes: Episodes, in any order.
    """
    rows = [policy.renderer.encode(one, every_turn=True) for one in episodes if one.turns]
    with frozen(policy.model, policy.precision):
        found = iter(compute_logprobs(policy.model, rows, policy.token_budget))
    return [float(next(found).double().sum()) if one.turns else 0.0 for one in episodes]


def after_prompt(prompt: tuple[int, ...], action: tuple[int, ...]) -> Encoded:
    """Return token ids of a prompt and an action as one sequence, with loss on the action's tokens."""
    turn = (NO_TURN,) * len(prompt) + (0,) * len(action)
    return Encoded(prompt + action, turn, ("user",) * len(prompt) + ("assistant",) * len(action))
