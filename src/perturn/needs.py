"""Requests for quantities, such as log-probabilities under the reference, by credits and other table entries."""

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
"""Function from trajectories to the reward of each turn `[trajectories][turns]`, such as
`perturn.credit.returns.Return`."""

Targets = Callable[[Sequence["Trajectory"], Sequence[Sequence[int]]], list[list[list[float]]]]
"""Function from trajectories, and the number of tokens of each turn `[trajectories][turns]`, to the regression targets
of V `[trajectories][turns][tokens]`. The number of targets of a turn is the number of its first tokens at which V is
computed; NaN: not known."""


@dataclass(frozen=True)
class Need:
    """Request for a quantity, by its name in `QUANTITIES` or as `module:Class`.

    A quantity with settings has a subclass with one field per setting. A name alone requests the default settings.
    """

    name: ClassVar[str]


Needs = tuple[str | Need, ...]
"""Quantities that an entry needs: names and requests, at most one per quantity."""

SENSES = ("shortest", "searching")
"""Measure of the distance to a success. shortest: the shortest path, with full knowledge of the environment. searching:
the path of the environment's expert, who knows only the observations."""


def keyword(name: str) -> str:
    """Return the keyword argument of a quantity: `tool_matches` for `tool-matches`, `Mine` for `module:Mine`."""
    return name.rpartition(":")[2].replace("-", "_")


def name_of(need: str | Need) -> str:
    """Return the name of the requested quantity."""
    return need if isinstance(need, str) else need.name


def names_of(needs: Iterable[str | Need]) -> frozenset[str]:
    """Return the names of the requested quantities."""
    return frozenset(map(name_of, needs))


def keywords(needs: Iterable[str | Need]) -> frozenset[str]:
    """Return the keyword arguments of the requested quantities."""
    return frozenset(keyword(name_of(need)) for need in needs)


def request_of(needs: Iterable[str | Need], kind: type[N]) -> N | None:
    """Return the request of a type among the needs, with default settings if the need is a name; None: no request."""
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

    The credit gets them as argument `reference`: `[trajectories][turns]`, each a tensor [tokens].
    """

    name: ClassVar[str] = "reference"


@dataclass(frozen=True)
class Distance(Need):
    """Number of actions to a success before and after each turn, as measured by the environment.

    The measurement is stored in `Turn.remaining`. The credit gets it as argument `distance` `[trajectories][turns]`.
    """

    name: ClassVar[str] = "distance"
    sense: str = "shortest"
    """Measure of the distance, one of SENSES."""


@dataclass(frozen=True)
class Values(Need):
    """V at the first tokens of each turn, from a head on hidden states that is fitted on other episodes.

    The credit gets it as argument `values`, in units of reward `[trajectories][turns][tokens]`.
    """

    name: ClassVar[str] = "values"
    targets: Targets
    """Regression targets of V."""


@dataclass(frozen=True)
class Answer(Need):
    """Mean log-probability of the tokens of the task's gold answer, before each turn and after the last turn.

    The credit gets it as argument `answer`, in nats `[trajectories][turns + 1]`; NaN: not known. A task has its gold
    answer as a text in `data["answer"]`.
    """

    name: ClassVar[str] = "answer"
    last_gain: bool = True
    """Whether to compute the log-probability after the last turn too. False: the last entry is NaN."""


@dataclass(frozen=True)
class Progress(Need):
    """Log-probabilities of the tokens of each turn under a trained policy, in nats.

    The credit gets them as argument `progress`: `[trajectories][turns]`, each [tokens].
    """

    name: ClassVar[str] = "progress"
    checkpoint: str | None = None
    """Trained policy: a policy of the run, a folder, or a Hub id. None: the policy that acted, or the reward model."""
    reward_model: bool = False
    """If there is no checkpoint, whether the policy is the reward model that the run trains in each iteration."""


@dataclass(frozen=True)
class BranchReturns(Need):
    """Mean return of the branches that start at each turn, from this turn on.

    The credit gets it as argument `branch_returns`, in units of reward `[trajectories][turns]`; NaN if no branch starts
    at the turn.
    """

    name: ClassVar[str] = "branch-returns"
    returns: Returns | None = None
    """Function from trajectories to the rewards to count; None: the recorded rewards."""
