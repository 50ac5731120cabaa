"""Selection by implicit reward: the log-likelihood ratio between a policy and the policy from which it was trained."""

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
    """Take the candidate whose log-likelihood increased most in training.

        r = sum_j log pi(y_j) - log pi_0(y_j)

    Source: Rafailov et al. 2023, arXiv:2305.18290, Eq. 5, without beta and the term that depends on the prompt alone.
    Differs: pi_0 is the policy at the start of the whole training. For the base model, which has no pi_0, the first
    sample is taken.
    """

    traits: ClassVar[SelectorTraits] = SelectorTraits(needs=frozenset({"logprobs", "policy", "start"}))

    def among_episodes(self, inputs: SelectorInputs) -> EpisodeScorer:
        """Return the function that sums the log-ratios over all action tokens of an episode, in nats."""

        def scores(episodes: Sequence[Trajectory]) -> Sequence[float]:
            start = inputs.open_start()
            if start is None:
                _say_untrained(inputs, "sample of each task is scored")
                return _equal(episodes)
            of_episodes = locate("perturn.policy.action_scorers:episode_logprobs")
            theirs = of_episodes(start, episodes)
            del start  # keeps only one policy in memory
            ours = of_episodes(inputs.open_policy(), episodes)
            return [own - its for own, its in zip(ours, theirs, strict=True)]

        return scores

    def among_actions(self, inputs: SelectorInputs) -> ActionScorer:
        """Return the function that sums the log-ratios over the sampled tokens of an action, in nats."""
        start = inputs.open_start()
        if start is None:
            _say_untrained(inputs, "action of each turn is taken")
        reward = start and locate("perturn.policy.action_scorers:ImplicitReward")(start)

        def scores(task: Task, prompt: Prompt, actions: Sequence[Action]) -> Sequence[float]:
            return reward(prompt, actions) if reward else _equal(actions)

        return scores


def _say_untrained(inputs: SelectorInputs, taken: str) -> None:
    _logger.warning("policy %s was trained from no other; the first %s.", inputs.policy, taken)


def _equal(candidates: Sequence[Any]) -> list[float]:
    return [0.0] * len(candidates)
