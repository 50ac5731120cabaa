"""Interface between every selector and the evaluation: candidates in, a score for each of them out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from statistics import fmean
from typing import Any, ClassVar, Literal, Protocol

from perturn.types import Action, Prompt, Task, Trajectory

Among = Literal["episodes", "actions"]
"""The candidates: several episodes of each task, or several actions at each turn."""
SelectorNeed = Literal["logprobs", "policy", "start", "explored"]
"""A thing that a selector reads: log-probabilities of the sampled actions, which the engine gives; the policy, in
memory; the policy from which it was trained; the episodes that were explored last before the evaluation."""
Score = float | tuple[float, ...]
EpisodeScorer = Callable[[Sequence[Trajectory]], Sequence[Score]]
"""The episodes of all tasks, without FAILED ones -> a score of each."""
ActionScorer = Callable[[Task, Prompt, Sequence[Action]], Sequence[Score]]
"""A task, a prompt and the actions that were sampled for it -> a score of each."""


@dataclass(frozen=True)
class SelectorTraits:
    """The kinds of candidates that a selector can score, and the things that it reads."""

    among: tuple[Among, ...] = ("episodes", "actions")
    """The kinds of candidates that it can score."""
    needs: frozenset[SelectorNeed] = frozenset()
    """The things that it reads. A selector that reads explored episodes never scores tasks that were explored."""
    sees_outcome: bool = False
    """Whether it looks at the result of the episodes, as no agent could; the report says so."""


class OpenPolicy(Protocol):
    """A policy in memory."""

    model: Any
    """A transformers model on the device to compute on, prepared for packed sequences."""
    renderer: Any
    """Conversation -> tokens, for the model: a `perturn.chat.tokens.Renderer`."""
    token_budget: int
    """Tokens of one pass."""


@dataclass(frozen=True)
class SelectorInputs:
    """The things that a selector can read about the policy that is scored; each is opened when it is asked for."""

    policy: str
    """Name of the policy in its run."""
    open_policy: Callable[[], OpenPolicy]
    """Open the policy, beside the engine that serves it; for selectors that need `policy`."""
    open_start: Callable[[], OpenPolicy | None]
    """Open the policy from which it was trained; None: it was trained from none. For selectors that need `start`."""
    explored: Callable[[], Sequence[Trajectory]]
    """Read the episodes explored last before the evaluation; for selectors that need `explored`."""
    command: Callable[[Prompt, Action], str | None]
    """The command that the environment is sent for an action after a prompt; None: it broke the format."""
    counts: dict[str, float] = field(default_factory=dict)
    """Numbers on its work, by name, that the selector writes for the manifest."""


class Selector(Protocol):
    """A frozen dataclass of settings that scores candidates. The highest score is taken, of equal ones the first.

    Both methods are called at most once for each policy that is scored, and return the function that scores. A
    selector may leave out the method of candidates that its traits do not name.
    """

    traits: ClassVar[SelectorTraits]

    def among_episodes(self, inputs: SelectorInputs) -> EpisodeScorer:
        """Return the function that scores episodes, which is called once with the episodes of all tasks."""

    def among_actions(self, inputs: SelectorInputs) -> ActionScorer:
        """Return the function that scores actions, which is called at each turn."""


def mean_logprob(actions: Iterable[Action]) -> float:
    """Return the mean log-probability of the tokens of actions, in nats; -inf where the engine gave none."""
    known = [each for action in actions for each in action.logprobs or ()]
    return fmean(known) if known else -inf
