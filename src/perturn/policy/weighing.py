"""The weight of each turn of a training row: which credit writes it, and the one place where it is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from perturn.credit import CREDITS, Credit
from perturn.errors import ConfigError
from perturn.losses import LOSSES, Loss
from perturn.policy.tokens import NO_TURN, Example
from perturn.settings.recipe import build
from perturn.types import Trajectory

_COMPUTED = frozenset({"reference"})
"""Quantities that training computes for a credit that needs them."""


def choose_credit(loss: Loss, settings: Mapping[str, Any], section: Mapping[str, Any] | None) -> Credit:
    """The credit that weighs the turns of a loss.

    Args:
        loss: The loss.
        settings: The section it was made from.
        section: `name` of a credit and its settings; None: the loss's own.

    Raises:
        ConfigError: If there is no such credit, a setting is wrong, it needs what training does not compute, or the
            loss's section sets the credit that this one replaces.
    """
    if section is None:
        return loss.credit
    replaced: Any = loss.credit
    unread = sorted(settings.keys() & {each.name for each in fields(replaced)})
    if unread:
        raise ConfigError(
            f"loss.{unread[0]} is a setting of the loss's own credit, which `credit:` replaces; write it under "
            "credit, or leave one of the two out."
        )
    credit: Credit = build(CREDITS, section, "credit")
    unknown = sorted(credit.needs - _COMPUTED)
    if unknown:
        raise ConfigError(
            f"credit {section['name']!r} needs {', '.join(unknown)}, which training does not compute; it computes "
            f"{', '.join(sorted(_COMPUTED))}."
        )
    return credit


def credit_of(loss: Mapping[str, Any], section: Mapping[str, Any] | None) -> Credit:
    """The credit of a recipe's sections `loss` and `credit`; see `choose_credit`.

    Raises:
        ConfigError: If there is no such loss or credit, or a setting is wrong.
    """
    return choose_credit(build(LOSSES, loss, "loss"), loss, section)


def weigh(example: Example, credit: Credit) -> Example:
    """The example with the weight of each turn: what losses read, and what is recorded and shown.

    Args:
        example: With its reference, where the credit needs one.
        credit: What weighs; each side is a group of its own.

    Raises:
        ConfigError: If the credit gives anything but one finite number a turn, which would weigh turns of others.
    """
    weight = []
    for index, trajectory in enumerate(example.trajectories):
        needed = {"reference": [turn_logprobs(example, index)]} if "reference" in credit.needs else {}
        found = credit([trajectory], **needed)
        _check_weights(found, trajectory, credit)
        weight.append(found[0].detach())
    return replace(example, weight=tuple(weight))


def _check_weights(found: Any, trajectory: Trajectory, credit: Credit) -> None:
    """Refuse what does not hold one finite number for each turn of one trajectory."""
    turns = len(trajectory.turns)
    one = found[0] if isinstance(found, list | tuple) and len(found) == 1 else None
    if isinstance(one, Tensor) and one.is_floating_point() and one.shape == (turns,) and one.isfinite().all():
        return
    raise ConfigError(
        f"credit {type(credit).__name__} must return one tensor a trajectory, with a finite floating-point number for "
        f"each of its turns; for the {turns} turns of task {trajectory.task.id!r:.80} it returned {found!r:.200}."
    )


def turn_logprobs(example: Example, side: int) -> list[Tensor]:
    """Reference log-probabilities of one side, turn by turn, in nats; one tensor a turn that carries loss [tokens]."""
    carried = torch.tensor([turn for turn in example.sides[side].turn if turn != NO_TURN])
    lengths = carried.unique_consecutive(return_counts=True)[1].tolist()
    return list(example.reference[side].split(lengths))
