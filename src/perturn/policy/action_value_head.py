"""Values of actions: the expected score of an episode once the policy has written an action."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum, inf
from typing import Any

import torch
from torch import Tensor

from perturn.chat.tokens import NO_TURN, Encoded, Renderer
from perturn.errors import RunError
from perturn.policy.reference import compute_logprobs, frozen
from perturn.policy.value_heads import action_features, cross_fit, explained_variance, fit_values, folds_by
from perturn.types import Action, Prompt, Trajectory, failed, score, unfinished


class ActionValues:
    """Predicts the score of an episode at the end of an action, by a ridge head that has learned from other episodes.

        Q(h, a) = w x + b,   x the last hidden state at the last token of a

    Each turn of the episodes that it learns from is a row, with the score of its episode. It is applied to other tasks
    than it was trained on, so whole tasks are left out to choose its penalty and to measure how much it explains.

    Source: Perturn; the head comes from `perturn.policy.value_heads`. Values as a guide at test time: Q-guided search,
    QLASS (Lin et al. 2025), arXiv:2502.02584.
    Differs: a linear head on a frozen policy, instead of a trained model.
    """

    def __init__(
        self, model: object, renderer: Renderer, episodes: Sequence[Trajectory], token_budget: int
    ) -> None:
        """Learn.

        Args:
            model: A causal language model on the device to compute on, prepared for packed sequences.
            renderer: Conversation -> tokens, for the model.
            episodes: To learn from; those that FAILED, are not over or have no turns are left out.
            token_budget: Tokens of one pass.

        Raises:
            RunError: If none is left.
        """
        self._model, self._renderer, self._budget = model, renderer, token_budget
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
        """Episodes that it has learned from."""
        self.tokens = sum(len(one.ids) for one in encoded)
        """Tokens of these."""
        found, played = (
            [[[float(own[-1])]] for own in each] for each in (cross_fit(features, targets, folds), targets)
        )
        self.explained = explained_variance(found, played)
        """Share of the variance of scores that heads of other tasks explain at the end; None: there is none."""

    def of_episodes(self, episodes: Sequence[Trajectory]) -> list[float]:
        """Return the expected score at the end of each one's last action, in units of reward; -inf without turns."""
        played = {i: one for i, one in enumerate(episodes) if one.turns}
        values = [-inf] * len(episodes)
        for i, own in zip(played, self._features(self._encoded(list(played.values()))), strict=True):
            values[i] = float(self._head(own[-1:]))
        return values

    def __call__(self, prompt: Prompt, actions: Sequence[Action]) -> list[float]:
        """Return Q of each action after a prompt, in units of reward; -inf for an action without token ids.

        The prompt is computed once for all of them.
        """
        ids = tuple(self._renderer.prompt_ids(prompt))
        known = {i: one.token_ids for i, one in enumerate(actions) if one.token_ids}
        values = [-inf] * len(actions)
        found = self._features([after_prompt(ids, tokens) for tokens in known.values()])
        for i, own in zip(known, found, strict=True):
            values[i] = float(self._head(own))
        return values

    def _encoded(self, episodes: Sequence[Trajectory]) -> list[Encoded]:
        return [self._renderer.encode(one, every_turn=True) for one in episodes]

    def _features(self, encoded: Sequence[Encoded]) -> list[Tensor]:
        with frozen(self._model):
            return action_features(self._model, encoded, self._budget)


def _folds(episodes: Sequence[Trajectory]) -> list[int]:
    """Return folds of whole tasks; of one task alone, of episodes."""
    tasks = [one.task.id for one in episodes]
    return folds_by(tasks if len(set(tasks)) > 1 else range(len(tasks)))


class ImplicitReward:
    """Rewards actions by the log-ratio of the sampling policy over the policy that it was trained from.

        r(a) = sum_j log pi(a_j | prompt, a_<j) - log pi_0(a_j | prompt, a_<j)

    Source: Rafailov et al. 2023, arXiv:2305.18290, Eq. 5, for one turn; without beta and the term of the prompt alone,
    which do not change the order. Differs: log pi is as the engine sampled, log pi_0 as training computes it.
    """

    def __init__(self, start: Any, renderer: Renderer) -> None:
        """Keep pi_0.

        Args:
            start: A transformers model on the device to compute on, prepared for packed sequences.
            renderer: Conversation -> tokens, for the model.
        """
        self._model, self._renderer = start, renderer

    def __call__(self, prompt: Prompt, actions: Sequence[Action]) -> list[float]:
        """Return rewards in nats, one per action; -inf for an action without token ids or log-probabilities.

        The prompt is computed once for all of them.
        """
        ids = tuple(self._renderer.prompt_ids(prompt))
        known = {i: one for i, one in enumerate(actions) if one.token_ids and one.logprobs}
        with frozen(self._model):
            found = compute_logprobs(
                self._model, [after_prompt(ids, one.token_ids or ()) for one in known.values()]
            )
        rewards = [-inf] * len(actions)
        for (i, one), theirs in zip(known.items(), found, strict=True):
            rewards[i] = fsum(one.logprobs or ()) - float(theirs.double().sum())
        return rewards


def episode_logprobs(policy: Any, episodes: Sequence[Trajectory]) -> list[float]:
    """Return the log-probability of all that was written in each episode, in nats; 0 for one without turns.

    Args:
        policy: An open policy: its `model`, `renderer` and `token_budget`; see `perturn.select.protocol.OpenPolicy`.
        episodes: Episodes, in any order.
    """
    rows = [policy.renderer.encode(one, every_turn=True) for one in episodes if one.turns]
    with frozen(policy.model):
        found = iter(compute_logprobs(policy.model, rows, policy.token_budget))
    return [float(next(found).double().sum()) if one.turns else 0.0 for one in episodes]


def after_prompt(prompt: tuple[int, ...], action: tuple[int, ...]) -> Encoded:
    """Return an action after a prompt, with loss on its tokens."""
    turn = (NO_TURN,) * len(prompt) + (0,) * len(action)
    return Encoded(prompt + action, turn, ("user",) * len(prompt) + ("assistant",) * len(action))
