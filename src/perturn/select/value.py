"""Selection by value: what an episode is expected to earn, learned from explored episodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from perturn.select.protocol import ActionScorer, EpisodeScorer, SelectorInputs, SelectorTraits
from perturn.table import locate
from perturn.types import Action, Prompt, Task


@dataclass(frozen=True)
class Value:
    """Take the candidate with the highest expected total reward, by a ridge head on the policy's hidden states.

    The head learns from the outcomes of explored tasks and of no other. On held-out tasks it looks at no result. See
    `perturn.policy.action_value_head`.

    Source: ours. Values as a guide at test time: Q-guided search, QLASS (Lin et al. 2025), arXiv:2502.02584.
    Differs: a linear head on a frozen policy, instead of a trained model.
    """

    traits: ClassVar[SelectorTraits] = SelectorTraits(needs=frozenset({"policy", "explored"}))

    def among_episodes(self, inputs: SelectorInputs) -> EpisodeScorer:
        """Return the function that reads the value after the last action of an episode."""
        found: EpisodeScorer = self._head(inputs).of_episodes
        return found

    def among_actions(self, inputs: SelectorInputs) -> ActionScorer:
        """Return the function that reads the value after an action."""
        head = self._head(inputs)

        def scores(task: Task, prompt: Prompt, actions: Sequence[Action]) -> Sequence[float]:
            found: Sequence[float] = head(prompt, actions)
            return found

        return scores

    def _head(self, inputs: SelectorInputs) -> Any:
        """Return the head, as it has learned; its counts are written down."""
        policy = inputs.open_policy()
        make = locate("perturn.policy.action_value_head:ActionValues")
        head = make(policy.model, policy.renderer, inputs.explored(), policy.token_budget)
        inputs.counts.update(value_episodes=head.episodes, value_tokens=head.tokens)
        if head.explained is not None:
            inputs.counts["value_explained"] = round(head.explained, 4)
        return head
