"""Settings and traits that all explorers have in common."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from perturn.bounds import EFFORT, EntryOf, bounded
from perturn.config.sections import COUNT, Tasks
from perturn.needs import Need, check_declarations
from perturn.table import check_names
from perturn.types import Sampling

EXPLORER = EntryOf("explorers", default="rollouts")
"""Mark of the recipe's field `explore`, whose `name` picks an explorer."""
_MEMBERS = frozenset(
    {"traits", "needs", "rounds", "check", "begun", "choose", "jobs", "counts", "forecast", "imposed"}
)
"""Attributes that are read from an explorer. `imposed` is read from a `Brancher` alone."""


@dataclass(frozen=True)
class ExplorerTraits:
    """Traits that an explorer declares. The stages of a run and the checks of a recipe follow from these traits."""

    provides: frozenset[str] = frozenset()
    """Kinds of episodes that the explorer provides besides plain rollouts, such as branches or tree. A row maker or
    credit may need some of these kinds."""
    imposes: frozenset[str] = frozenset()
    """Properties of the episodes that row makers and credits must accept; see
    `perturn.config.compatibility.IMPOSED`."""
    policy: str | None = None
    """Policy that plays the rounds after the rollouts: base or sft. None: the policy that played the rollouts."""
    expert: bool = False
    """Whether the explorer reads the expert's episodes of the explored tasks."""
    resumes_earlier: bool = False
    """Whether the rollouts also resume unfinished episodes of the previous iteration."""
    reads_policy: bool = False
    """Whether the explorer's `needs` are computed with the weights of the exploring policy. The chosen turns are then
    stored before the episodes are played."""
    source: str | None = None
    """File of recorded episodes. None: the episodes are played."""


@dataclass(frozen=True)
@bounded
class ExploreSettings:
    """Settings of every explorer: the tasks to play, and the number and decoding of their episodes."""

    tasks: Tasks = field(default_factory=Tasks)
    per_iteration: Annotated[int, COUNT] | None = None
    """Number of tasks in one iteration. The tasks are taken in order from the task list, shuffled with the run's seed.
    When too few tasks are left, the list is shuffled again. None: each iteration plays all tasks."""
    samples: Annotated[int, COUNT] = 1
    """Number of episodes of each task: the size of a group."""
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=1.0))
    concurrency: Annotated[int, COUNT, EFFORT] = 16
    """Number of episodes played at the same time."""

    @property
    def traits(self) -> ExplorerTraits:
        """Traits of the explorer; by default, an explorer that plays plain rollouts."""
        return ExplorerTraits()

    @property
    def needs(self) -> tuple[str | Need, ...]:
        """Quantities of the explored episodes that the explorer reads."""
        return ()

    @property
    def rounds(self) -> int:
        """Number of rounds after the rollouts, in the stage `branch`. Each round sees the rounds before it."""
        return 0


def check_explorer(explorer: ExploreSettings) -> None:
    """Reject an explorer with a misspelt name.

    Raises:
        ConfigError: If there is one.
    """
    check_names(type(explorer), kind="explorer", known=_MEMBERS, traits=ExplorerTraits)
    name, protocol = f"explorer {type(explorer).__name__}", "perturn.extend.Explorer"
    check_declarations(explorer, name, ExplorerTraits, "ExplorerTraits()", protocol)
