"""Interface of a quantity: one thing computed about episodes, its cost, its checks and its exact value."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from perturn.config.recipe import Recipe
from perturn.errors import ConfigError
from perturn.needs import Need
from perturn.types import Environment, Task, Trajectory

if TYPE_CHECKING:
    from torch import Tensor

    from perturn.credit_check.processes import Episodes
    from perturn.quantities.readers import Reader

State = Mapping[str, "Tensor"]
"""State that a quantity has learned, as tensors by name."""

ACTED = "acted"
"""The policy that played the episodes, or a policy that stands for it."""
EXPLORER = "explorer"
"""The policy that played the episodes of the iteration, even where another one stands for it."""
REFERENCE = "reference"
"""The reference policy."""
START = "start"
"""The policy that the loop began with, the same in all iterations."""
REWARD = "reward"
"""The reward model that the run trains in each iteration."""


@dataclass(frozen=True)
class QuantityTraits:
    """Cost and inputs of a quantity; each entry of `QUANTITIES` has them."""

    cost: str
    """Work beside playing and training, in words."""
    passes: int = 0
    """Forward passes over the episodes, by policies in `policies`; 0 where it reads a tokenizer alone, or none."""
    policies: frozenset[str] = frozenset()
    """Policies that it reads: `acted`, `explorer`, `reference`, `start`, `reward`, or one by its name."""
    reads_answers: bool = False
    """Whether it must know how a turn that gives an answer is written."""
    reads_world: bool = False
    """Whether it asks the environment."""
    reads_branches: bool = False
    """Whether it reads episodes that branch off from the explored ones."""
    features_alone: bool = False
    """Whether it reads the policies for their hidden states alone, so that another policy may stand for them."""
    of_rows: bool = False
    """Whether training computes it of a row by itself, so that no group is needed."""
    carries: bool = False
    """Whether what it learns in an iteration is kept for the next one: `Computed.state`."""
    note: str = ""
    """Note on a credit that was measured on small processes with its exact value."""


@dataclass(frozen=True)
class Computed:
    """A quantity, as it was computed."""

    entries: Sequence[Any]
    """One for each episode."""
    state: State | None = None
    """State that it has learned for the next iteration; None: nothing."""
    counts: Mapping[str, float | None] = field(default_factory=dict)
    """Figures on how good the entries are, by name; None: not defined."""


@dataclass(frozen=True)
class Planned:
    """A run whose episodes a quantity will be computed of."""

    reader: str
    """Who reads it, such as `credit igpo`."""
    recipe: Recipe
    answer_form: Callable[[], str]
    """Text of a turn that gives an answer, with `{answer}` where that stands; raises where nothing says it."""
    references: Mapping[int, str] = field(default_factory=dict)
    """The reference of each iteration."""
    env: Environment | None = None
    """The world; None where it is not open, as for stored episodes."""
    tasks: Sequence[Task] = ()
    """Tasks to be explored."""
    stored: bool = False
    """Whether the episodes are there already, so that nothing else can be explored."""


class Source:
    """Source that quantities are computed from. A subclass provides what it has; the rest is rejected."""

    states: Mapping[str, State] = {}
    """States that quantities have learned in the iteration before, by the name of the quantity."""
    iteration: int = 1
    """From 1."""

    def policy(self, role: str) -> Reader:
        """Open a policy, by its role or its name."""
        raise self._missing("a policy")

    def policy_name(self, role: str) -> str:
        """Return the name of the policy that has a role; a name is its own."""
        return role

    def answer_form(self) -> str:
        """Return the text of a turn that gives an answer, with `{answer}` where that stands."""
        raise self._missing("how an answer is given")

    def world(self) -> AbstractContextManager[Environment]:
        """Open the environment that the episodes were played in."""
        raise self._missing("the environment")

    def branches(self) -> Sequence[Trajectory]:
        """Return the episodes that branch off from the explored ones."""
        raise self._missing("branches")

    def seed(self, name: str) -> int:
        """Return a seed for what is called so."""
        return 0

    def tell(self, text: str) -> None:
        """Tell the user something."""

    def _missing(self, what: str) -> ConfigError:
        return ConfigError(
            f"this quantity reads {what}, which only a run has; give `perturn credit RUN credit.name=...`."
        )


@dataclass(frozen=True)
class Ground:
    """A small decision process on which the exact value of a quantity is asked for."""

    episodes: Episodes
    """All of its episodes."""
    gamma: float
    """Discount of the return whose gradient is the true one."""
    player: Episodes
    """All episodes under the policy that plays branches: the same policy, or a prover."""


class Quantity(ABC):
    """One thing that is computed about episodes, for credits and other entries that need it.

    A subclass sets `traits` and writes `compute`. Its settings come with each request; where it has any, `request` is
    a subclass of `Need` that holds them.
    """

    traits: ClassVar[QuantityTraits]
    request: ClassVar[type[Need]] = Need

    def policies(self, request: Any) -> frozenset[str]:
        """Return the policies that it reads for a request."""
        return self.traits.policies

    def check(self, request: Any, planned: Planned) -> None:  # noqa: B027  most check nothing
        """Reject a run in which it cannot be computed, before any work.

        Raises:
            PerturnError: Saying what to set.
        """

    @abstractmethod
    def compute(self, request: Any, episodes: Sequence[Trajectory], source: Source) -> Computed:
        """Compute one entry for each episode.

        Args:
            request: The settings.
            episodes: Episodes of an iteration, in any order, which changes nothing.
            source: What it is computed from.
        """

    def exact(self, request: Any, ground: Ground) -> Sequence[Any]:
        """Return the exact value for all episodes of a small process, by which the bias meter measures a credit.

        Raises:
            ValueError: If it has none.
        """
        raise ValueError(f"quantity {type(self).__name__} has no exact value on a small process.")
