"""Implicit rewards of actions and episodes: how much likelier training has made them."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum, inf
from typing import Any

from perturn.chat.tokens import NO_TURN, Encoded, Renderer
from perturn.policy.reference import compute_logprobs, frozen
from perturn.types import Action, Prompt, Trajectory


class ImplicitReward:
    """Rewards actions by the policy that sampled them, over the one that it was trained from.

        r(a) = sum_j log pi(a_j | prompt, a_<j) - log pi_0(a_j | prompt, a_<j)

    Source: Rafailov et al. 2023, arXiv:2305.18290, Eq. 5, for one turn; without beta and what depends on the prompt
    alone, which change no order.
    Differs: log pi is as the engine sampled, log pi_0 as training computes it.
    """

    def __init__(self, start: Any, renderer: Renderer) -> None:
        """Keep pi_0.

        Args:
            start: A transformers model on the device to compute on, prepared for packed sequences.
            renderer: Conversation -> tokens, for the model.
        """
        self._model, self._renderer = start, renderer

    def __call__(self, prompt: Prompt, actions: Sequence[Action]) -> list[float]:
        """Rewards in nats, one an action; -inf for one of which the engine gave no tokens or log-probabilities.

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
    """An action after a prompt, with loss on its tokens."""
    turn = (NO_TURN,) * len(prompt) + (0,) * len(action)
    return Encoded(prompt + action, turn, ("user",) * len(prompt) + ("assistant",) * len(action))
