"""Loss and credit of a training: how both are built from their settings, and whether they fit together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from inspect import signature
from typing import Any

from perturn.config.parsing import build
from perturn.credit import CREDITS, Credit, CreditTraits
from perturn.errors import ConfigError, check_belongs, check_none
from perturn.losses import LOSSES, Loss
from perturn.losses.protocol import check_loss
from perturn.needs import Distance, Reference, check_declarations, keywords, names_of
from perturn.table import check_names
from perturn.types import Trajectory

CREDIT_NAMES = frozenset({"needs", "traits", "weigh", "clips"})
"""Attributes of a credit that Perturn reads."""

ROW_NEEDS = names_of((Reference.name, Distance.name))
"""Quantities that training can compute for a single row, without its group."""


def make_credit(section: Mapping[str, Any]) -> Credit:
    """Build a credit from the section `credit` of a recipe.

    Args:
        section: Name and settings of the credit; the name is a key of `CREDITS` or `module:Class`.

    Raises:
        ConfigError: If there is no such credit, a setting is wrong, or the credit does not declare its inputs.
    """
    name = str(section.get("name"))
    credit: Credit = build(CREDITS, section, "credit")
    check_credit(credit, name)
    return credit


def check_credit(credit: Any, name: str) -> None:
    """Reject a credit whose declarations `needs` and `traits` are missing or wrong.

    Raises:
        ConfigError: If a declaration is missing or wrong; the message lists the faults.
    """
    check_none(_faults(credit, name))


def _faults(credit: Any, name: str) -> Iterator[str]:
    """Yield an error message for each missing or wrong declaration of a credit."""
    members = set(dir(credit))
    check_names(type(credit), kind="credit", known=CREDIT_NAMES, traits=CreditTraits)
    check_declarations(credit, f"credit {name!r}", CreditTraits, "CreditTraits()", "perturn.credit.Credit")
    keys = sorted(keywords(credit.needs))
    try:
        signature(credit).bind((), **dict.fromkeys(keys))
    except TypeError as error:
        yield (
            f"credit {name!r} must take a group and what it needs by keyword: {error}. Write "
            f"def __call__(self, {', '.join(['group', *(['*'] if keys else []), *keys, '**_'])}) in its class."
        )
    if credit.traits.sets_clip != ("clips" in members):
        yield (
            f"credit {name!r} must have both the trait sets_clip and a method clips, or neither; see "
            "perturn.credit.CreditTraits."
        )
    if credit.traits.sets_clip and not credit.traits.needs_group:
        yield (
            f"credit {name!r} sets clip ranges without needs_group=True, so that clips are not asked for; see "
            "perturn.credit.CreditTraits."
        )


def choose_credit(loss: Loss, settings: Mapping[str, Any], section: Mapping[str, Any] | None) -> Credit:
    """Return the credit that gives the turn weights for a loss.

    Args:
        loss: The loss.
        settings: The section `loss` from which the loss was built.
        section: Name and settings of a credit; None: the loss's default credit.

    Raises:
        ConfigError: If there is no such credit, a setting is wrong, or training does not compute an input of the
            credit. Also if the loss is on pairs and the credit on groups, or the loss's section sets the replaced
            credit.
    """
    if section is None:
        return loss.credit
    replaced: Any = loss.credit
    unread = {f"loss.{each.name}": True for each in fields(replaced) if each.name in settings}
    owner = "the loss's own credit, which `credit:` replaces"
    check_belongs(unread, False, owner, "write it under credit, or leave one of the two out")
    credit = make_credit(section)
    check_none(_misfits(credit, loss, str(section.get("name")), str(settings.get("name"))))
    return credit


def _misfits(credit: Credit, loss: Loss, name: str, trained: str) -> Iterator[str]:
    """Yield an error message for each reason why a credit cannot give the turn weights for a loss."""
    if loss.traits.rows == "labelled":
        yield (
            f"credit {name!r} has no effect with loss {trained!r}, which reads the weights of its labelled rows; leave "
            "the credit out, or give a WeightedTrajectory with the weights."
        )
    if credit.traits.needs_group and loss.traits.needs_rejected:
        yield (
            f"credit {name!r} compares the trajectories of a group, and loss {trained!r} the two "
            "of a pair; name a loss on single trajectories, such as ppo-clip, or a credit that weighs turns alone, "
            "such as uniform."
        )
    if credit.traits.sets_clip and not loss.traits.reads_clip:
        yield (
            f"credit {name!r} sets the clip range of a turn, and loss {trained!r} has none; name a "
            "loss that has one, such as ppo-clip."
        )
    if loss.traits.needs_behavior:  # quantities of groups are computed before training
        return
    of_group = credit.traits.needs_group
    computed = frozenset() if of_group else ROW_NEEDS
    unknown = sorted(names_of(credit.needs) - computed)
    if unknown:
        yield (
            f"credit {name!r} needs {', '.join(unknown)}, which training does not compute"
            f"{' of a group' if of_group else ''}; it computes {', '.join(sorted(computed)) or 'nothing'}. Name a "
            "loss on groups, such as ppo-clip, with rows.name=groups: there it is computed before training."
        )


def make_loss(section: Mapping[str, Any], where: str = "loss") -> Loss:
    """Build a loss from the section `loss` of a recipe.

    Args:
        section: Name and settings of the loss; the name is a key of `LOSSES`.
        where: Path of the section in the recipe, for error messages.

    Raises:
        ConfigError: If there is no such loss, a setting is wrong, or the class does not implement the protocol `Loss`.
    """
    loss: Loss = build(LOSSES, section, where)
    check_loss(loss)
    check_credit(loss.credit, f"{type(loss).__name__}.credit")
    return loss


def loss_and_credit(loss: Mapping[str, Any], section: Mapping[str, Any] | None) -> tuple[Loss, Credit]:
    """Build the loss and the credit from the sections `loss` and `credit` of a recipe; see `choose_credit`.

    Raises:
        ConfigError: If there is no such loss or credit, or a setting is wrong.
    """
    built = make_loss(loss, "loss")
    return built, choose_credit(built, loss, section)


def named_credit(loss: Mapping[str, Any], section: Mapping[str, Any] | None) -> tuple[str, Credit]:
    """Return the name of the credit for a recipe's sections `loss` and `credit`, and the credit; see `choose_credit`.

    Raises:
        ConfigError: If there is no such loss or credit, or a setting is wrong.
    """
    _, credit = loss_and_credit(loss, section)
    kind = type(credit)
    return next((name for name, each in CREDITS.items() if each is kind), kind.__name__), credit


def weighs_alone(credit: Credit) -> bool:
    """Return whether a credit can give useful weights to the only trajectory of a task."""
    traits = credit.traits  # credits for branches compare an episode with its own branches
    return not traits.needs_group or traits.trains_branches or traits.weighs_alone


def trains_own_turns(credit: Credit) -> bool:
    """Return whether a branch carries loss only on its own turns, because the original episode covers the others."""
    return credit.traits.trains_branches or credit.traits.takes_unfinished


def carries_own_turns(credit: Credit, trajectory: Trajectory) -> bool | None:
    """Return whether a trajectory carries loss only on its own turns; None if it is no branch."""
    return None if trajectory.origin is None else trains_own_turns(credit)


def credit_of(loss: Mapping[str, Any], section: Mapping[str, Any] | None) -> Credit:
    """Return the credit for a recipe's sections `loss` and `credit`, for use on single rows; see `choose_credit`.

    Raises:
        ConfigError: If there is no such loss or credit, a setting is wrong, or the credit compares the rows of a group.
    """
    _, credit = named_credit(loss, section)
    if credit.traits.needs_group:
        raise ConfigError(
            f"credit {type(credit).__name__} compares the trajectories of a group, and a row stands alone; name a "
            "credit that weighs turns alone, such as uniform."
        )
    return credit
