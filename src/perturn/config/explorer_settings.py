"""Common part of all explorers: settings of their episodes, and their traits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from perturn.bounds import EntryOf, bounded
from perturn.config.sections import COUNT, Tasks
from perturn.needs import Need, check_declarations
from perturn.table import check_names
from perturn.types import Sampling

EXPLORER = EntryOf("explorers", default="rollouts")
"""Mark of the section `explore`."""
_MEMBERS = frozenset(
    {"traits", "needs", "rounds", "check", "begun", "choose", "jobs", "counts", "forecast", "imposed"}
)
"""Attributes of an explorer that are read, `imposed` by `Brancher`."""


@dataclass(frozen=True)
class ExplorerTraits:
    """Traits of an explorer, from which stages, checks and the alternatives in messages follow."""

    provides: frozenset[str] = frozenset()
    """Kinds of episodes it provides besides plain rollouts, such as branches or tree; row makers and credits need some
    of them."""
    imposes: frozenset[str] = frozenset()
    """Properties of its episodes that row makers and credits must accept; see
    `perturn.config.compatibility.IMPOSED`."""
    policy: str | None = None
    """Policy that plays the rounds after the first one: base or sft; None: the policy that explored."""
    expert: bool = False
    """Whether it reads the expert's episodes of the explored tasks."""
    resumes_earlier: bool = False
    """Whether its rollouts include unfinished episodes of the iteration before."""
    reads_policy: bool = False
    """Whether its `needs` are computed by the policy that explored. The chosen turns are then stored before the
    episodes are played."""
    source: str | None = None
    """File that its episodes are read from; None: they are played."""


@dataclass(frozen=True)
@bounded
class ExploreSettings:
    """Settings of every explorer: which tasks are played, how often and how."""

    tasks: Tasks = field(default_factory=Tasks)
    per_iteration: Annotated[int, COUNT] | None = None
    """Tasks of one iteration, taken in order from a list that is shuffled with the seed; when too few are left, the
    list is shuffled again. None: each iteration plays the whole list."""
    samples: Annotated[int, COUNT] = 1
    """Episodes of each task: the size of a group."""
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=1.0))
    concurrency: Annotated[int, COUNT] = 16
    """Episodes played at the same time."""

    @property
    def traits(self) -> ExplorerTraits:
        """Traits of the episodes; plain rollouts by default."""
        return ExplorerTraits()

    @property
    def needs(self) -> tuple[str | Need, ...]:
        """Quantities of the explored episodes that it reads."""
        return ()

    @property
    def rounds(self) -> int:
        """Rounds of play after the rollouts, in the stage `branch`; each sees the episodes of the rounds before."""
        return 0


def check_explorer(explorer: ExploreSettings) -> None:
    """Reject an explorer with a misspelt name.

    Raises:
        ConfigError: If there is one.
    """
    check_names(type(explorer), kind="explorer", known=_MEMBERS, traits=ExplorerTraits)
    name, protocol = f"explorer {type(explorer).__name__}", "perturn.extend.Explorer"
    check_declarations(explorer, name, ExplorerTraits, "ExplorerTraits()", protocol)
