"""Interface of a quantity: its computation from episodes, its cost, its checks, and its exact value."""

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
"""Learned state of a quantity, as tensors by name."""

ACTED = "acted"
"""Role of the policy that played the episodes, or of a substitute for this policy."""
EXPLORER = "explorer"
"""Role of the policy that played the episodes of the iteration, without a substitute."""
REFERENCE = "reference"
"""Role of the reference policy."""
START = "start"
"""Role of the policy that the loop started with, which is the same in all iterations."""
REWARD = "reward"
"""Role of the reward model that the run trains in each iteration."""
ROLES = (ACTED, EXPLORER, REFERENCE, START, REWARD)


@dataclass(frozen=True)
class QuantityTraits:
    """Cost and inputs of a quantity, declared by each entry of `QUANTITIES`."""

    cost: str
    """Work besides rollouts and training, in words."""
    passes: int = 0
    """Number of forward passes over the episodes, by the policies in `policies`; 0 if it needs at most a tokenizer."""
    policies: frozenset[str] = frozenset()
    """Policies that the quantity reads: the roles `acted`, `explorer`, `reference`, `start` and `reward`, or names."""
    reads_answers: bool = False
    """Whether the quantity needs the text of a turn that gives an answer."""
    reads_world: bool = False
    """Whether the quantity calls the environment."""
    reads_branches: bool = False
    """Whether the quantity reads branches of the explored episodes."""
    features_alone: bool = False
    """Whether the quantity reads only hidden states of the policies, so another policy may be used in their place."""
    of_rows: bool = False
    """Whether training computes the quantity for each row alone, without a group."""
    carries: bool = False
    """Whether the learned state (`Computed.state`) is kept for the next iteration."""
    note: str = ""
    """Note that `perturn check-credit` prints about the exact value of the quantity."""


@dataclass(frozen=True)
class Computed:
    """Result of the computation of a quantity."""

    entries: Sequence[Any]
    """One entry per episode."""
    state: State | None = None
    """Learned state for the next iteration; None: no state."""
    counts: Mapping[str, float | None] = field(default_factory=dict)
    """Quality figures of the entries, such as explained variance, by name; None: not defined."""


@dataclass(frozen=True)
class Planned:
    """Planned run in which a quantity will be computed."""

    reader: str
    """Part that needs the quantity, such as `credit igpo`, for error messages."""
    recipe: Recipe
    """Recipe of the run."""
    answer_form: Callable[[], str]
    """Function that returns the text of a turn that gives an answer, with `{answer}` in the place of the answer. It
    raises an error if the environment has no such text."""
    references: Mapping[int, str] = field(default_factory=dict)
    """Iteration -> name of its reference policy."""
    env: Environment | None = None
    """Open environment; None: not open, for example because the episodes are stored."""
    tasks: Sequence[Task] = ()
    """Tasks to explore."""
    stored: bool = False
    """Whether the episodes exist already, so nothing else can be explored."""


class Source:
    """Inputs from which quantities are computed. A subclass implements the methods for the inputs that it has."""

    states: Mapping[str, State] = {}
    """Name of a quantity -> its learned state from the previous iteration."""
    iteration: int = 1
    """Number of the iteration, from 1."""

    def policy(self, role: str) -> Reader:
        """Load a policy, given a role or name that the quantity declares."""
        raise self._missing("a policy")

    def policy_name(self, role: str) -> str:
        """Return the name of the policy with a role; a name is returned unchanged."""
        return role

    def answer_form(self) -> str:
        """Return the text of a turn that gives an answer, with `{answer}` in the place of the answer."""
        raise self._missing("how an answer is given")

    def world(self) -> AbstractContextManager[Environment]:
        """Open the environment in which the episodes were played."""
        raise self._missing("the environment")

    def branches(self) -> Sequence[Trajectory]:
        """Return the branches of the explored episodes."""
        raise self._missing("branches")

    def seed(self, name: str) -> int:
        """Return a random seed for a named purpose."""
        return 0

    def tell(self, text: str) -> None:
        """Show a message to the user."""

    def _missing(self, what: str) -> ConfigError:
        return ConfigError(
            f"this quantity reads {what}, which only a run has; give `perturn credit RUN credit.name=...`."
        )


class DeclaredSource:
    """Source for one quantity: the source of the run, restricted to the policies that the quantity declares."""

    def __init__(self, source: Source, name: str, policies: frozenset[str]) -> None:
        """Restrict a source.

        Args:
            source: Inputs of all quantities.
            name: Name of the quantity, for the error message.
            policies: Roles or names of the policies that the quantity declares.
        """
        self._source, self._name, self._policies = source, name, policies

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def policy(self, role: str) -> Reader:
        """Load a policy, given its role or its name.

        Raises:
            ConfigError: If the quantity does not declare the policy.
        """
        if role not in self._policies:
            declared = ", ".join(f'"{each}"' for each in sorted({*self._policies, role}))
            raise ConfigError(
                f"quantity {self._name!r} reads policy {role!r}, and does not declare it; write "
                f"policies=frozenset({{{declared}}}) in its QuantityTraits."
            )
        return self._source.policy(role)


@dataclass(frozen=True)
class Ground:
    """Small decision process for which the exact value of a quantity is computed."""

    episodes: Episodes
    """All episodes of the process."""
    gamma: float
    """Discount of the return whose gradient counts as the true gradient."""
    player: Episodes
    """All episodes under the policy that plays the branches: the same policy, or a prover."""


class Quantity(ABC):
    """Base class of quantities, which are computed from episodes for credits and other entries that need them.

    A subclass sets `traits` and implements `compute`. If it has settings, it also sets `request` to a subclass of
    `Need` with one field per setting.
    """

    traits: ClassVar[QuantityTraits]
    request: ClassVar[type[Need]] = Need

    def policies(self, request: Any) -> frozenset[str]:
        """Return the roles or names of the policies that a request needs."""
        return self.traits.policies

    def check(self, request: Any, planned: Planned) -> None:  # noqa: B027  most check nothing
        """Reject a run in which the quantity cannot be computed, before the run starts.

        Raises:
            PerturnError: If it cannot be computed; the message says what to set.
        """

    @abstractmethod
    def compute(self, request: Any, episodes: Sequence[Trajectory], source: Source) -> Computed:
        """Compute one entry for each episode.

        Args:
            request: Settings of the quantity.
            episodes: Episodes of an iteration. Their order must not change the entries.
            source: Models, branches and other inputs of the computation.
        """

    def exact(self, request: Any, ground: Ground) -> Sequence[Any]:
        """Return the exact entry of each episode of a small process. The bias meter measures credits with it.

        Raises:
            ValueError: If the quantity has no exact value.
        """
        raise ValueError(
            f"quantity {type(self).__name__} has no exact value on a small process; write it as the method `exact` of "
            "the class."
        )
