"""Requests for quantities by entries of a table: a name, or a name with the settings of the quantity."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from perturn.errors import ConfigError, check_fit
from perturn.table import guarded

if TYPE_CHECKING:
    from perturn.types import Trajectory

N = TypeVar("N", bound="Need")

Returns = Callable[[Sequence["Trajectory"]], list[list[float]]]
"""Rewards that count, of each turn `[trajectories][turns]`, such as `perturn.credit.returns.Return`."""

Targets = Callable[[Sequence["Trajectory"], Sequence[Sequence[int]]], list[list[list[float]]]]
"""Function from trajectories, and the tokens of each turn `[trajectories][turns]`, to the returns that V predicts
`[trajectories][turns][tokens]`. It covers as many first tokens of each turn as V is read at; NaN: not known."""


@dataclass(frozen=True)
class Need:
    """A request for a quantity, by its name in `QUANTITIES`, or as `module:Class`.

    The settings of the quantity are fields of a subclass. A name alone requests a quantity with its defaults.
    """

    name: ClassVar[str]


Needs = tuple[str | Need, ...]
"""Needs of an entry: names and requests, at most one for each quantity."""

SENSES = ("shortest", "searching")
"""How far an episode is from a success, with full knowledge of the world or by searching."""


def keyword(name: str) -> str:
    """Return the keyword by which a quantity is given: `tool_matches` for `tool-matches`, `Mine` for `module:Mine`."""
    return name.rpartition(":")[2].replace("-", "_")


def name_of(need: str | Need) -> str:
    """Return the name of the requested quantity."""
    return need if isinstance(need, str) else need.name


def names_of(needs: Iterable[str | Need]) -> frozenset[str]:
    """Return the names of the requested quantities."""
    return frozenset(map(name_of, needs))


def keywords(needs: Iterable[str | Need]) -> frozenset[str]:
    """Return the keywords by which the requested quantities are given."""
    return frozenset(keyword(name_of(need)) for need in needs)


def request_of(needs: Iterable[str | Need], kind: type[N]) -> N | None:
    """Return the request of a type that is among the needs; None: none is. A name alone requests the defaults."""
    found = next((need for need in needs if name_of(need) == kind.name), None)
    return found if found is None or isinstance(found, kind) else kind()


def reads(needs: Iterable[str | Need], kind: type[Need]) -> bool:
    """Return whether the needs include a request of this type."""
    return kind.name in names_of(needs)


def check_declarations(entry: Any, said: str, traits: type, example: str, protocol: str) -> None:
    """Reject an entry that does not declare its needs and traits.

    Args:
        entry: The entry, made with its settings.
        said: What it is, such as `credit 'mine'`.
        traits: Class of its traits.
        example: Traits that it may write, such as `CreditTraits()`.
        protocol: Where its protocol is defined.

    Raises:
        ConfigError: With the first missing declaration, or with the exception of a property that raises.
    """
    remedy = (
        f"write needs = () and traits = {example} in its class if there is nothing to say. See {protocol}."
    )
    for member in ("needs", "traits"):
        if member not in dir(entry):
            raise ConfigError(f"{said} must have {member}; {remedy}")
    with guarded(f"needs and traits of {said} cannot be read", f". Correct its class; see {protocol}."):
        needs, own = entry.needs, entry.traits
    if not isinstance(needs, tuple) or not all(isinstance(one, str | Need) for one in needs):
        raise ConfigError(
            f"{said} must have needs, a tuple of names and requests of what is computed for it, got {needs!r:.80}; "
            f"write needs = () in its class if there is nothing. See {protocol}."
        )
    check_fit(
        isinstance(own, traits), said, f"have traits, such as traits = {example}", own, f"See {protocol}."
    )


@dataclass(frozen=True)
class Reference(Need):
    """Log-probabilities of the tokens of each turn under the reference policy, in nats.

    Given as `reference`, `[trajectories][turns]`, each [tokens].
    """

    name: ClassVar[str] = "reference"


@dataclass(frozen=True)
class Distance(Need):
    """Actions that the way to a success still takes around each turn, as measured by the environment.

    It is measured into `Turn.remaining`. It is given as `distance`, the distance of each turn `[trajectories][turns]`.
    """

    name: ClassVar[str] = "distance"
    sense: str = "shortest"
    """`shortest`, with full knowledge of the world, or `searching`, by the expert, who knows only the observations."""


@dataclass(frozen=True)
class Values(Need):
    """V at the first tokens of each turn, by a head on hidden states that is fitted on other episodes.

    Given as `values`, in units of reward `[trajectories][turns][tokens]`.
    """

    name: ClassVar[str] = "values"
    targets: Targets
    """Targets that V is fitted to."""


@dataclass(frozen=True)
class Answer(Need):
    """Mean log-probability of the tokens of the task's gold answer before each turn and after the last one.

    Given as `answer`, in nats `[trajectories][turns + 1]`; NaN: not known. Tasks hold their gold answer as a text in
    `data["answer"]`.
    """

    name: ClassVar[str] = "answer"
    last_gain: bool = True
    """Whether the policy is asked after the last turn too; else that entry is NaN."""


@dataclass(frozen=True)
class Progress(Need):
    """Log-probabilities of the tokens of each turn under a policy that has learned, in nats.

    Given as `progress`, `[trajectories][turns]`, each [tokens].
    """

    name: ClassVar[str] = "progress"
    checkpoint: str | None = None
    """The policy: one of the run, a folder or a Hub id. None: the policy that acted, or the reward model."""
    reward_model: bool = False
    """Whether, without a checkpoint, it is the reward model that the run trains in each iteration."""


@dataclass(frozen=True)
class BranchReturns(Need):
    """Mean return of the episodes that branch off before each turn, from there on.

    Given as `branch_returns`, in units of reward `[trajectories][turns]`; NaN where none does.
    """

    name: ClassVar[str] = "branch-returns"
    returns: Returns | None = None
    """Rewards that count; None: as recorded."""
