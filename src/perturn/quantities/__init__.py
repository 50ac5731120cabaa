"""Quantities: numbers computed from episodes, such as log-probabilities under the reference, that credits need.

>>> from perturn.quantities import QUANTITIES
>>> QUANTITIES["reference"].traits.cost
'a pass of the reference over the rows, kept'
"""

from collections.abc import Collection, Mapping, Sequence, Sized
from typing import Any, cast

from perturn.chat.model_names import is_local, load_config
from perturn.config.recipe import Recipe
from perturn.config.stages import is_of_run
from perturn.errors import (
    ConfigError,
    ModelError,
    PerturnError,
    check_fit,
    check_known,
    check_type,
    closest,
    required,
    within,
)
from perturn.io.user_code import load_object
from perturn.needs import Need, keyword, name_of
from perturn.quantities.protocol import (
    REWARD,
    ROLES,
    Computed,
    DeclaredSource,
    Ground,
    Planned,
    Quantity,
    QuantityTraits,
    Source,
)
from perturn.table import Table, check_names, guarded, making, missing_methods
from perturn.types import Trajectory

QUANTITIES: Table[type[Quantity]] = Table(
    "perturn.quantities",
    {
        "reference": "perturn.quantities.reference_logprobs:ReferenceLogprobs",
        "values": "perturn.quantities.turn_values:TurnValues",
        "answer": "perturn.quantities.answer:GoldAnswer",
        "progress": "perturn.quantities.progress_logprobs:ProgressLogprobs",
        "branch-returns": "perturn.quantities.branch_returns:MeanBranchReturns",
        "distance": "perturn.quantities.distance:GoalDistance",
        "entropy": "perturn.quantities.entropy:TurnEntropy",
    },
)
"""Name of a quantity -> its class. A class is loaded when it is first looked up, since most classes import torch."""


_NAMES = frozenset({"traits", "request", "policies", "check", "compute", "exact"})
"""Names of the public attributes that a quantity may have."""
_NEAR = 0.7
"""Minimum similarity of a policy's name that counts as a misspelt role, in [0, 1]."""


def kind_of(name: str, reader: str = "the credit") -> type[Quantity]:
    """Return the class of a quantity, by its name in QUANTITIES or as `module:Class`.

    Raises:
        ConfigError: If the quantity does not exist, or its class is malformed.
    """
    if ":" not in name:
        remedy = f"A package adds its own as an entry point of perturn.quantities.{missing_methods()}"
        check_known(name, QUANTITIES, f"{reader} needs {name!r}, and nothing computes it", remedy)
    kind: Any = load_object(name) if ":" in name else QUANTITIES[name]
    fits = isinstance(kind, type) and issubclass(kind, Quantity)
    check_fit(fits, f"{name!r}, which {reader} needs,", "be a subclass of perturn.quantities.Quantity", kind)
    check_names(kind, kind="quantity", known=_NAMES, traits=QuantityTraits)
    made = not kind.__abstractmethods__ and "traits" in dir(kind)
    check_fit(made, f"quantity {name!r}", "have traits, a QuantityTraits, and a method compute", kind)
    return cast(type[Quantity], kind)


def find(need: str | Need, reader: str = "the credit") -> tuple[Quantity, Need]:
    """Return the quantity for a need, and the request with its settings.

    Args:
        need: Name of a quantity, or a request.
        reader: Part that needs the quantity, for error messages.

    Raises:
        ConfigError: If the quantity does not exist, if it declares passes and no policies, or if the need is a name and
            the quantity has a setting without a default.
    """
    name = name_of(need)
    kind = kind_of(name, reader)
    with making(kind, f"{reader} needs {name!r}: "):
        quantity = kind()
    request = need if isinstance(need, Need) else _default_request(quantity, name, reader)
    policies = quantity.policies(request)
    remedy = 'Write policies=frozenset({"acted"}) in its QuantityTraits, or another role.'
    must = "declare policies, since it declares passes"
    check_fit(policies or not quantity.traits.passes, f"quantity {name!r}", must, policies, remedy)
    return quantity, request


def _default_request(quantity: Quantity, name: str, reader: str) -> Need:
    """Return the request of a quantity with default settings."""
    try:
        return quantity.request()
    except TypeError as error:
        asked = quantity.request.__name__
        raise ConfigError(
            f"{reader} needs {name!r} by its name alone, and {asked} has settings without a default; write "
            f"{asked}(...) in needs."
        ) from error


def check_needs(needs: Collection[str | Need], planned: Planned) -> None:
    """Reject a run in which a needed quantity cannot be computed, before the run starts.

    Raises:
        PerturnError: If a quantity does not exist, rejects the run, or reads an unknown policy.
    """
    for name, (quantity, request) in wanted(needs, planned.reader).items():
        quantity.check(request, planned)
        for policy in sorted(quantity.policies(request)):
            _check_policy(policy, f"{planned.reader} needs {name!r}, which reads", planned.recipe)


def _check_policy(policy: str, says: str, recipe: Recipe) -> None:
    """Reject a policy that is no role, no policy of the run and no model."""
    if policy == REWARD:
        required(recipe.reward_model, "reward.model", f"{says} it", "add it, such as reward: {model: {}}")
    if policy in ROLES or is_of_run(recipe, policy):
        return
    if "/" not in policy and not is_local(policy) and closest(policy, ROLES, _NEAR) is not None:
        remedy = "It may also be a policy of the run, a local folder or a Hub id."
        check_known(policy, ROLES, f"{says} the unknown policy {policy!r}", remedy)  # without asking the Hub
    with within(
        f"{says} policy {policy!r}, which is no policy of the run and none of {', '.join(ROLES)}: ",
        ModelError,
    ):
        load_config(policy)


def wanted(needs: Collection[str | Need], reader: str = "the credit") -> dict[str, tuple[Quantity, Need]]:
    """Return all needed quantities with their requests, by name.

    Raises:
        ConfigError: If `find` raises it for a need, if a quantity is requested twice, or if two quantities have one
            keyword.
    """
    found: dict[str, tuple[Quantity, Need]] = {}
    for need in sorted(needs, key=name_of):
        if name_of(need) in found:
            raise ConfigError(f"{reader} needs {name_of(need)!r} twice; request it once.")
        found[name_of(need)] = find(need, reader)
        same = [name for name in found if keyword(name) == keyword(name_of(need))]
        must = f"differ in their keyword {keyword(same[0])!r}"
        check_fit(len(same) == 1, f"the needs of {reader}", must, same, "Rename a class.")
    return found


def compute(
    needs: Collection[str | Need], episodes: Sequence[Trajectory], source: Source, reader: str = "the credit"
) -> dict[str, Computed]:
    """Compute all needed quantities of some episodes, and return them by name.

    Args:
        needs: Names and requests.
        episodes: Episodes, in any order.
        source: Models, branches and other inputs of the computation.
        reader: Part that needs the quantities, for error messages.

    Raises:
        PerturnError: If a quantity does not exist, or cannot be computed from the source.
    """
    found = {}
    for name, (quantity, request) in wanted(needs, reader).items():
        declared = DeclaredSource(source, name, quantity.policies(request))
        with guarded(f"quantity {name!r} cannot be computed", passes=(PerturnError,)):
            computed = quantity.compute(request, episodes, cast(Source, declared))
        check_type(f"what quantity {name!r} computes", computed, Computed, "a Computed, with its entries")
        check_type(f"the entries that quantity {name!r} computes", computed.entries, Sized, "a list")
        must = f"be one for each of the {len(episodes)} episodes"
        count = len(computed.entries)
        check_fit(count == len(episodes), f"the entries that quantity {name!r} computes", must, count)
        found[name] = computed
    return found


def given(found: Mapping[str, Computed]) -> dict[str, Sequence[Any]]:
    """Return the entries of computed quantities as keyword arguments of a credit."""
    return {keyword(name): computed.entries for name, computed in found.items()}


def figures_of(found: Mapping[str, Computed]) -> dict[str, float | None]:
    """Return all quality figures of computed quantities, such as explained variance, by name."""
    return {key: figure for computed in found.values() for key, figure in computed.counts.items()}


def carried_by(needs: Collection[str | Need]) -> list[str]:
    """Return the names of the needed quantities that keep a learned state from one iteration to the next."""
    return [name for name, (quantity, _) in wanted(needs).items() if quantity.traits.carries]


def policies_of(needs: Collection[str | Need]) -> frozenset[str]:
    """Return the roles or names of the policies that the needed quantities read."""
    return frozenset(
        role for quantity, request in wanted(needs).values() for role in quantity.policies(request)
    )


__all__ = ["QUANTITIES", "Computed", "Ground", "Need", "Planned", "Quantity", "QuantityTraits", "Source"]
