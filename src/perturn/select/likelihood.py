"""Selection by likelihood: the mean log-probability of the sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from perturn.select.protocol import (
    ActionScorer,
    EpisodeScorer,
    SelectorInputs,
    SelectorTraits,
    mean_logprob,
)
from perturn.types import Action, Prompt, Task, Trajectory


@dataclass(frozen=True)
class Likelihood:
    """Take the candidate whose sampled tokens have the highest mean log-probability under the policy.

    Source: none is needed; the usual score of beam search and of best-of-n without a reward model.
    Differs: nothing.
    """

    traits: ClassVar[SelectorTraits] = SelectorTraits(needs=frozenset({"logprobs"}))

    def among_episodes(self, inputs: SelectorInputs) -> EpisodeScorer:
        """Return the function that averages the log-probabilities of all action tokens of an episode, in nats."""
        return _of_episodes

    def among_actions(self, inputs: SelectorInputs) -> ActionScorer:
        """Return the function that averages the log-probabilities of the tokens of an action, in nats."""
        return _of_actions


def _of_episodes(episodes: Sequence[Trajectory]) -> list[float]:
    return [mean_logprob(turn.action for turn in one.turns) for one in episodes]


def _of_actions(task: Task, prompt: Prompt, actions: Sequence[Action]) -> list[float]:
    return [mean_logprob([one]) for one in actions]
