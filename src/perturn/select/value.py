"""Selection by value: the expected total reward, predicted by a head trained on explored episodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from perturn.select.protocol import ActionScorer, EpisodeScorer, SelectorInputs, SelectorTraits
from perturn.table import locate
from perturn.types import Action, Prompt, Task


@dataclass(frozen=True)
class Value:
    """Take the candidate with the highest expected total reward, predicted by a ridge head on hidden states.

    The head is trained on the outcomes of explored tasks alone, and sees no results of held-out tasks. See
    `perturn.policy.action_scorers`.

    Source: ours. Values guide the search at test time in Q-guided search, QLASS (Lin et al. 2025), arXiv:2502.02584.
    Differs: a linear head on the frozen policy replaces a trained model.
    """

    traits: ClassVar[SelectorTraits] = SelectorTraits(needs=frozenset({"policy", "explored"}))

    def among_episodes(self, inputs: SelectorInputs) -> EpisodeScorer:
        """Return the function that predicts the value after the last action of an episode."""
        found: EpisodeScorer = self._head(inputs).of_episodes
        return found

    def among_actions(self, inputs: SelectorInputs) -> ActionScorer:
        """Return the function that predicts the value after an action."""
        head = self._head(inputs)

        def scores(task: Task, prompt: Prompt, actions: Sequence[Action]) -> Sequence[float]:
            found: Sequence[float] = head(prompt, actions)
            return found

        return scores

    def _head(self, inputs: SelectorInputs) -> Any:
        """Return the trained head, and write its figures to `inputs.counts`."""
        make = locate("perturn.policy.action_scorers:ActionValues")
        head = make(inputs.open_policy(), inputs.explored())
        inputs.counts.update(value_episodes=head.episodes, value_tokens=head.tokens)
        if head.explained is not None:
            inputs.counts["value_explained"] = round(head.explained, 4)
        return head
