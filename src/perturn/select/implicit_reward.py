"""Selection by the reward that is implicit in a policy and in the policy from which it was trained."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from perturn.select.protocol import ActionScorer, EpisodeScorer, SelectorInputs, SelectorTraits
from perturn.table import locate
from perturn.types import Action, Prompt, Task, Trajectory

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ImplicitReward:
    """Take the candidate whose log-likelihood training raised most, compared with the policy it started from.

        r = sum_j log pi(y_j) - log pi_0(y_j)

    Source: Rafailov et al. 2023, arXiv:2305.18290, Eq. 5; without beta and what depends on the prompt alone.
    Differs: pi_0 is the policy that the whole training started from. The base has none; its first sample is taken.
    """

    traits: ClassVar[SelectorTraits] = SelectorTraits(needs=frozenset({"logprobs", "policy", "start"}))

    def among_episodes(self, inputs: SelectorInputs) -> EpisodeScorer:
        """Return the function that sums over all tokens that the policy wrote in an episode."""

        def scores(episodes: Sequence[Trajectory]) -> Sequence[float]:
            start = inputs.open_start()
            if start is None:
                _say_untrained(inputs, "sample of each task is scored")
                return _equal(episodes)
            of_episodes = locate("perturn.policy.action_value_head:episode_logprobs")
            theirs = of_episodes(start, episodes)
            del start  # so that one policy is in memory at a time
            ours = of_episodes(inputs.open_policy(), episodes)
            return [own - its for own, its in zip(ours, theirs, strict=True)]

        return scores

    def among_actions(self, inputs: SelectorInputs) -> ActionScorer:
        """Return the function that sums over the tokens of an action, as the engine sampled them."""
        start = inputs.open_start()
        if start is None:
            _say_untrained(inputs, "action of each turn is taken")
        reward = start and locate("perturn.policy.action_value_head:ImplicitReward")(
            start.model, start.renderer
        )

        def scores(task: Task, prompt: Prompt, actions: Sequence[Action]) -> Sequence[float]:
            return reward(prompt, actions) if reward else _equal(actions)

        return scores


def _say_untrained(inputs: SelectorInputs, taken: str) -> None:
    _logger.warning("policy %s was trained from no other; the first %s.", inputs.policy, taken)


def _equal(candidates: Sequence[Any]) -> list[float]:
    return [0.0] * len(candidates)
