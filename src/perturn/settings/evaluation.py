"""The section `evaluate` of a recipe: the tasks that score policies, how these decode, and what they may choose by."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from perturn.bounds import CODE, bounded, check_bounds
from perturn.rules import TurnControl
from perturn.settings.sections import COUNT, SEVERAL, HeldOutTasks, require
from perturn.types import Sampling


@dataclass(frozen=True)
@bounded
class BestOf:
    """Play each task several times, and score one of its episodes."""

    samples: Annotated[int, SEVERAL] = 8
    """Episodes of each task."""
    by: Annotated[str, CODE] = "outcome"
    """The one that is scored has the highest: total reward (`outcome`), which bounds what any choice could reach; mean
    log-probability of the tokens that the policy wrote (`likelihood`); log-probability of these less what the policy
    that it was trained from gives them (`implicit`); total reward that a head on the policy's hidden states expects at
    the end, learned from the last explored episodes (`value`); or `module:function`, from episodes to a number each."""


@dataclass(frozen=True)
@bounded
class Rerank:
    """Sample several actions at each turn, and take one of them."""

    samples: Annotated[int, SEVERAL] = 4
    """Actions at each turn."""
    by: Annotated[str, CODE] = "likelihood"
    """The one that is taken has the highest: mean log-probability of its tokens (`likelihood`); number of those that
    send the world the same, and of equal ones the likelihood (`frequency`); log-probability of its tokens less what the
    policy that this one was trained from gives them (`implicit`); total reward that such a head as for best_of expects
    at its end (`value`); or `module:function`, from a task, a prompt and different actions to a number each."""


@dataclass(frozen=True)
class Evaluate:
    """Score every policy of the run on one panel of held-out tasks."""

    tasks: HeldOutTasks = field(default_factory=HeldOutTasks)
    sampling: Sampling | None = None
    """How actions are decoded; None: as the protocol has it, else greedily. A score says where it departs from its
    protocol."""
    concurrency: Annotated[int, COUNT] = 16
    every: Annotated[int, COUNT] = 1
    """Score the policy of every so many iterations, and of the last one."""
    best_of: BestOf | None = None
    """Score the best of several episodes of each task, at a temperature above 0. None: one episode of each."""
    rerank: Rerank | None = None
    """Take the best of several actions at each turn, at a temperature above 0. None: one is sampled."""
    turns: TurnControl | None = None
    """Another turn limit than the protocol's, reminders of it, and extensions on demand. None: the protocol's limit."""

    def __post_init__(self) -> None:
        check_bounds(self)
        require(
            self.best_of is None or self.rerank is None,
            "best_of and rerank are both set; leave one of them out.",
        )
