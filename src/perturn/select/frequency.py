"""Selection by frequency: a majority vote among the sampled actions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from perturn.select.protocol import ActionScorer, SelectorInputs, SelectorTraits, mean_logprob
from perturn.types import Action, Prompt, Task


@dataclass(frozen=True)
class Frequency:
    """Take the most frequent of the sampled actions; among equally frequent actions, the most likely.

    Actions count as equal if they send the environment the same command. Actions that break the format come last.

    Source: Wang et al. 2022, "Self-Consistency Improves Chain of Thought Reasoning", arXiv:2203.11171.
    Differs: the vote is on the action of a turn, not on the answer to a question. The likelihood breaks ties.
    """

    traits: ClassVar[SelectorTraits] = SelectorTraits(among=("actions",))

    def among_actions(self, inputs: SelectorInputs) -> ActionScorer:
        """Return the function that counts the votes for each action."""

        def scores(task: Task, prompt: Prompt, actions: Sequence[Action]) -> list[tuple[float, ...]]:
            sent = [inputs.command(prompt, one) for one in actions]
            votes = Counter(sent)
            return [
                (command is not None, votes[command], mean_logprob([one]))
                for command, one in zip(sent, actions, strict=True)
            ]

        return scores
