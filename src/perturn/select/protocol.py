"""Interface between a selector and the evaluation. A selector maps candidates to scores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from math import inf
from statistics import fmean
from typing import Any, ClassVar, Literal, Protocol

from perturn.types import Action, Prompt, Task, Trajectory

Among = Literal["episodes", "actions"]
"""Kind of candidates: several episodes of each task, or several actions at each turn."""
SelectorNeed = Literal["logprobs", "policy", "start", "explored"]
"""Input of a selector. logprobs: the engine's log-probabilities of the sampled actions. policy: the policy, loaded in
memory. start: the policy from which it was trained. explored: the last explored episodes before the evaluation."""
Score = float | tuple[float, ...]
"""Score of a candidate; the highest score is selected. Tuples are compared element by element."""
EpisodeScorer = Callable[[Sequence[Trajectory]], Sequence[Score]]
"""Function from the episodes of all tasks, without FAILED episodes, to one score per episode."""
ActionScorer = Callable[[Task, Prompt, Sequence[Action]], Sequence[Score]]
"""Function from a task, a prompt, and the actions sampled for the prompt, to one score per action."""


@dataclass(frozen=True)
class SelectorTraits:
    """Kinds of candidates that a selector can score, and inputs that it needs."""

    among: tuple[Among, ...] = ("episodes", "actions")
    """Kinds of candidates that the selector can score."""
    needs: frozenset[SelectorNeed] = frozenset()
    """Inputs that the selector needs. A selector that needs `explored` never scores an explored task."""
    sees_outcome: bool = False
    """Whether the selector looks at the results of the episodes, which an agent does not know. The report marks it."""


class OpenPolicy(Protocol):
    """Policy loaded in memory."""

    model: Any
    """Transformers model on the device to compute on, prepared for packed sequences."""
    renderer: Any
    """Renderer of conversations to tokens, for the model: a `perturn.chat.tokens.Renderer`."""
    token_budget: int
    """Maximum number of tokens of one pass."""
    precision: Callable[[], AbstractContextManager[Any]]
    """Returns a context manager for the precision of the passes."""


@dataclass(frozen=True)
class SelectorInputs:
    """Inputs of a selector for one evaluated policy. Each input is loaded when its function is called."""

    policy: str
    """Name of the policy in its run."""
    open_policy: Callable[[], OpenPolicy]
    """Loads the policy, in addition to the engine that serves it; for selectors that need `policy`."""
    open_start: Callable[[], OpenPolicy | None]
    """Loads the policy from which the evaluated policy was trained; returns None for the base model. For selectors that
    need `start`."""
    explored: Callable[[], Sequence[Trajectory]]
    """Reads the last explored episodes before the evaluation; for selectors that need `explored`."""
    command: Callable[[Prompt, Action], str | None]
    """Returns the command that an action after a prompt sends to the environment; None: the action broke the format."""
    counts: dict[str, float] = field(default_factory=dict)
    """Figures that the selector writes to the manifest, by name."""


class Selector(Protocol):
    """Frozen dataclass of settings that scores candidates. The first candidate with the highest score is selected.

    Each method is called at most once per evaluated policy, and returns a function that computes scores. A selector
    needs only the methods for the kinds of candidates in its traits.
    """

    traits: ClassVar[SelectorTraits]

    def among_episodes(self, inputs: SelectorInputs) -> EpisodeScorer:
        """Return the function that scores episodes. It is called once, with the episodes of all tasks."""

    def among_actions(self, inputs: SelectorInputs) -> ActionScorer:
        """Return the function that scores actions. It is called at each turn."""


def mean_logprob(actions: Iterable[Action]) -> float:
    """Return the mean log-probability of the tokens of actions, in nats; -inf if no action has log-probabilities."""
    known = [each for action in actions for each in action.logprobs or ()]
    return fmean(known) if known else -inf
