"""Which credit weighs the turns that a loss learns from."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import fields
from typing import Any

from perturn.credit import CREDITS, Credit
from perturn.credit.matchtir import ASSIGNMENTS
from perturn.envs.load import load_object
from perturn.errors import ConfigError
from perturn.losses import LOSSES, Loss
from perturn.settings.parsing import build
from perturn.types import Trajectory

COSTS = {
    "reference": "a pass of the reference over the rows, kept",
    "values": "a pass of the policy that acted over the episodes, and ridge fits",
    "contributions": "a pass of the policy that acted over the episodes, and ridge fits",
    "matches": "the expert's calls, and an assignment an episode",
    "answer": "passes of the policy that acted over the episodes, and over an answer at each turn",
    "answers": "passes of the policy that acted over the episodes, and over some answers at each turn",
    "clusters": "a comparison of the answers of each group",
    "feedback": "passes of the policy that acted over the episodes, and over each turn once more",
    "branches": "episodes that are played on",
    "progress": "a pass of the trained policy, or of the reward model, over the episodes; the latter's training",
    "critics": "a pass over the episodes of the policy that the loop begins with, and many regressions",
}
"""Quantity that a credit may need -> what it costs."""

_COMPUTED = frozenset({"reference"})
"""Quantities that training computes for a credit that needs them."""
OF_GROUPS = frozenset(COSTS) - _COMPUTED
"""Those that are computed of groups before training, each in one place: `perturn.run.quantity_source.compute_needed`."""


def make_credit(section: Mapping[str, Any]) -> Credit:
    """Section `credit` -> the credit; `name` is in CREDITS or is `module:Class`.

    Raises:
        ConfigError: If there is no such credit, a setting is wrong, or it does not say what it reads, or how.
    """
    name = str(section.get("name"))
    table: Mapping[str, Any] = {name: load_object(name)} if ":" in name else CREDITS
    credit: Credit = build(table, section, "credit")
    check_credit(credit, name)
    return credit


def check_credit(credit: Any, name: str) -> None:
    """Refuse a credit that does not say what it reads, or how.

    Raises:
        ConfigError: Naming what it lacks.
    """
    needs = getattr(credit, "needs", None)
    if not isinstance(needs, Set):
        raise ConfigError(
            f"credit {name!r} must have needs, a set of the names of what is computed for it, got {needs!r:.80}; write "
            "needs = frozenset() in its class if there is nothing. See perturn.credit.Credit."
        )
    if sets_clip(credit) and not needs_group(credit):
        raise ConfigError(
            f"credit {name!r} has clips and not needs_group = True, without which clips are not asked for; see "
            "perturn.credit.Credit."
        )
    if "values" in needs and not hasattr(credit, "value_targets"):
        raise ConfigError(
            f"credit {name!r} needs values and has no method value_targets, which says what returns they stand for; "
            "see perturn.credit.Credit."
        )
    if "critics" in needs:
        for setting in ("gamma", "tau", "rounds", "penalty"):
            if not isinstance(getattr(credit, setting, None), int | float):
                raise ConfigError(
                    f"credit {name!r} needs critics and has no setting {setting}, a number that says how they learn; "
                    "see perturn.credit.Credit."
                )
    if "matches" in needs and getattr(credit, "assignment", None) not in ASSIGNMENTS:
        raise ConfigError(
            f"credit {name!r} needs matches and has no setting assignment, {', '.join(ASSIGNMENTS)}; see "
            "perturn.credit.Credit."
        )
    if "feedback" in needs and not isinstance(getattr(credit, "placeholder", None), str):
        raise ConfigError(
            f"credit {name!r} needs feedback and has no setting placeholder, a text to put in its stead; see "
            "perturn.credit.Credit."
        )
    if "progress" in needs and not hasattr(credit, "checkpoint"):
        raise ConfigError(
            f"credit {name!r} needs progress and has no setting checkpoint, the policy that it is of; see "
            "perturn.credit.Credit."
        )
    same = str(getattr(credit, "same", "exact"))
    if "answers" in needs and ":" in same and not callable(load_object(same)):
        raise ConfigError(f"credit.same must be exact or a function as MODULE:FUNCTION, got {same!r:.80}.")


def choose_credit(loss: Loss, settings: Mapping[str, Any], section: Mapping[str, Any] | None) -> Credit:
    """The credit that weighs the turns of a loss.

    Args:
        loss: The loss.
        settings: The section that it was made from.
        section: `name` of a credit and its settings; None: the loss's own.

    Raises:
        ConfigError: If there is no such credit, a setting is wrong, it needs what training does not compute, the loss
            is on pairs and the credit on groups, or the loss's section sets the credit that this one replaces.
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
    credit = make_credit(section)
    of_groups = needs_group(credit)
    if of_groups and loss.needs_rejected:
        raise ConfigError(
            f"credit {section['name']!r} compares the trajectories of a group, and loss {settings['name']!r} the two "
            "of a pair; name a loss on single trajectories, such as ppo-clip, or a credit that weighs turns alone, "
            "such as uniform."
        )
    if sets_clip(credit) and not reads_clip(loss):
        raise ConfigError(
            f"credit {section['name']!r} sets the clip range of a turn, and loss {settings['name']!r} has none; name a "
            "loss that has one, such as ppo-clip."
        )
    computed = frozenset() if of_groups else _COMPUTED
    if getattr(loss, "needs_behavior", False):  # of groups, before training
        computed |= OF_GROUPS | _COMPUTED
    unknown = sorted(credit.needs - computed)
    if unknown:
        raise ConfigError(
            f"credit {section['name']!r} needs {', '.join(unknown)}, which training does not compute"
            f"{' of a group' if of_groups else ''}; it computes {', '.join(sorted(computed)) or 'nothing'}."
        )
    return credit


def loss_and_credit(
    loss: Mapping[str, Any], section: Mapping[str, Any] | None, where: str = "loss"
) -> tuple[Loss, Credit]:
    """The loss and the credit of the sections `loss` and `credit`; see `choose_credit`.

    Raises:
        ConfigError: If there is no such loss or credit, or a setting is wrong; `where` is the loss's place.
    """
    built: Loss = build(LOSSES, loss, where)
    return built, choose_credit(built, loss, section)


def named_credit(loss: Mapping[str, Any], section: Mapping[str, Any] | None) -> tuple[str, Credit]:
    """The credit of a recipe's sections `loss` and `credit`, and its name; see `choose_credit`.

    Raises:
        ConfigError: If there is no such loss or credit, or a setting is wrong.
    """
    _, credit = loss_and_credit(loss, section)
    kind = type(credit)
    return next((name for name, each in CREDITS.items() if each is kind), kind.__name__), credit


def trains_branches(credit: Credit) -> bool:
    """Whether a credit weighs branches as it weighs the explored episodes, so that they are trained on."""
    return bool(getattr(credit, "trains_branches", False))


def weighs_alone(credit: Credit) -> bool:
    """Whether a credit has a baseline, or none, for a trajectory that is alone in its task."""
    by_branches = trains_branches(credit)  # of which an episode has some of its own
    alone = getattr(credit, "singleton", "zero") == "raw" or getattr(credit, "weighs_alone", False)
    return not needs_group(credit) or by_branches or bool(alone)


def takes_unfinished(credit: Credit) -> bool:
    """Whether a credit weighs the turns of episodes that are not over yet."""
    return bool(getattr(credit, "takes_unfinished", False))


def trains_own_turns(credit: Credit) -> bool:
    """Whether of an episode that was played on, the turns that it had before carry no loss: they did in another one."""
    return trains_branches(credit) or takes_unfinished(credit)


def carries_own_turns(credit: Credit, trajectory: Trajectory) -> bool | None:
    """Say whether a row of a credit carries loss on its own turns alone; None where the episode took over none."""
    return None if trajectory.origin is None else trains_own_turns(credit)


def sets_clip(credit: Credit) -> bool:
    """Whether a credit may give turns a clip range of their own."""
    return hasattr(credit, "clips")


def reads_clip(loss: Loss) -> bool:
    """Whether a loss has a clip range that a turn may have its own of."""
    return bool(getattr(loss, "reads_clip", False))


def reads_reward_model(credit: Credit) -> bool:
    """Whether a credit reads a reward model that the run trains in each iteration."""
    return bool(getattr(credit, "reads_reward_model", False))


def needs_group(credit: Credit) -> bool:
    """Whether a credit compares the trajectories of a group."""
    return bool(getattr(credit, "needs_group", False))


def credit_of(loss: Mapping[str, Any], section: Mapping[str, Any] | None) -> Credit:
    """The credit of a recipe's sections `loss` and `credit`, to weigh rows one by one; see `choose_credit`.

    Raises:
        ConfigError: If there is no such loss or credit, a setting is wrong, or the credit compares the rows of a group.
    """
    _, credit = named_credit(loss, section)
    if needs_group(credit):
        raise ConfigError(
            f"credit {type(credit).__name__} compares the trajectories of a group, and a row by itself has none; name "
            "one that weighs turns alone, such as uniform."
        )
    return credit
