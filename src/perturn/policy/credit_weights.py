"""Ask credits for the weights of turns, and check what they return. No other module sets the weight of a turn."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from perturn.credit import ClipCredit, Credit
from perturn.errors import ConfigError, DataError, PerturnError, check_provided
from perturn.losses import Loss, TurnLogprobs
from perturn.losses.protocol import CoupledLoss
from perturn.needs import Distance, Reference, keywords, reads
from perturn.policy.examples import Example
from perturn.policy.models import load_model
from perturn.policy.reference import compute_logprobs
from perturn.remaining import remaining_of
from perturn.table import guarded
from perturn.types import Trajectory


def weigh(example: Example, credit: Credit) -> Example:
    """Return the example with the weight that a credit gives each turn that carries loss.

    A credit that reads the remaining path, but not the reference, also sees turns without loss: the first error of an
    episode may be among them.

    Args:
        example: A row, with reference log-probabilities if the credit reads them.
        credit: The credit; it gets each side of a pair as a group of its own.

    Raises:
        ConfigError: If the credit does not return one finite number per turn.
    """
    weight: list[Tensor] = []
    for index, trajectory in enumerate(example.trajectories):
        if reads(credit.needs, Reference):
            given: dict[str, Any] = {Reference.name: [turn_logprobs(example, index)]}
            if reads(credit.needs, Distance):
                given[Distance.name] = [remaining_of(trajectory)]
            weight += asked(credit, [trajectory], **given)
        elif reads(credit.needs, Distance):
            kept, whole = sorted(set(example.sides[index].loss_turns)), example.whole[index]
            weight += [each[kept] for each in asked(credit, [whole], distance=[remaining_of(whole)])]
        else:
            weight += asked(credit, [trajectory])
    return replace(example, weight=tuple(weight))


def asked(credit: Credit, group: Sequence[Trajectory], **needed: Any) -> list[Tensor]:
    """Ask a credit for the weights of a group, and check them.

    Args:
        credit: The credit.
        group: Trajectories of one group.
        needed: Inputs that the credit reads besides the trajectories, by name.

    Returns:
        One tensor of weights per trajectory, without gradient [turns].

    Raises:
        ConfigError: If an input is missing, or the credit does not return one finite number per turn.
    """
    name, reads = f"credit {type(credit).__name__}", sorted(keywords(credit.needs))
    remedy = "give rows with weights, which rows.name=groups in a recipe computes before it trains"
    check_provided(name, reads, needed, "training", remedy)
    with guarded(f"{name} cannot weigh {_said(group)}", passes=(PerturnError,)):
        found = credit(group, **needed)
    _check_numbers(found, group, f"{name} must return", "a finite floating-point number")
    return [weight.detach() for weight in found]


def asked_clips(credit: Credit, group: Sequence[Trajectory], **needed: Any) -> list[Tensor | None]:
    """Ask a credit for its factors on the clip range, and check them; arguments as in `asked`.

    Returns:
        One tensor of factors per trajectory [turns], or None for each trajectory if the credit sets no clip ranges.

    Raises:
        ConfigError: If the credit does not return one finite number > 0 per turn.
    """
    if not credit.traits.sets_clip:
        return [None] * len(group)
    name = f"clips of credit {type(credit).__name__}"
    with guarded(f"{name} cannot be computed for {_said(group)}", passes=(PerturnError,)):
        found = cast(ClipCredit, credit).clips(group, **needed)
    if found is None:
        return [None] * len(group)
    _check_numbers(found, group, f"{name} must return", "a finite floating-point number > 0", above=0.0)
    return [factor.detach() for factor in found]


def _said(group: Sequence[Trajectory]) -> str:
    """Return a group's description for messages."""
    count = "one trajectory" if len(group) == 1 else f"the {len(group)} trajectories"
    return f"{count} of task {group[0].task.id!r:.80}"


def _check_numbers(
    found: Any, group: Sequence[Trajectory], whose: str, number: str, above: float = -math.inf
) -> None:
    fits = isinstance(found, list | tuple) and len(found) == len(group)
    if isinstance(found, list | tuple) and not fits:
        raise ConfigError(
            f"{whose} one tensor per trajectory, with {number} for each of its turns; for {len(group)} trajectories it "
            f"returned {len(found)}."
        )
    for index, trajectory in enumerate(group):
        if not (fits and _are_numbers(found[index], len(trajectory.turns), above)):
            raise ConfigError(
                f"{whose} one tensor per trajectory, with {number} for each of its turns; for the "
                f"{len(trajectory.turns)} turns of task {trajectory.task.id!r:.80} it returned "
                f"{found[index] if fits and len(group) > 1 else found!r:.200}."
            )


def _are_numbers(found: Any, turns: int, above: float) -> bool:
    """Return whether `found` is a tensor with one finite floating-point number above a bound for each turn."""
    if not (isinstance(found, Tensor) and found.is_floating_point() and found.shape == (turns,)):
        return False
    return bool((found.isfinite() & (found > above)).all())


def weigh_all(examples: Sequence[Example], loss: Loss, credit: Credit) -> list[Example]:
    """Return the examples of an optimizer step with turn weights, and with the loss's statistic over all examples.

    Examples that already have weights keep them.

    Raises:
        ConfigError: If the credit does not return one finite number per turn.
    """
    weighed = [example if example.weight else weigh(example, credit) for example in examples]
    if not loss.traits.step_statistic:
        return weighed
    weight = [example.weight[0] for example in weighed]
    if weighed[0].reference:
        reference = [turn_logprobs(example, 0) for example in weighed]
        chosen = TurnLogprobs.from_nested(reference, reference, weight)
    else:  # the statistic reads only weights and numbers of tokens
        nothing = [_by_turn(one, 0, torch.zeros(len(one.chosen.loss_turns))) for one in weighed]
        chosen = TurnLogprobs.from_nested(nothing, weight=weight)
    has_spread = torch.tensor([example.has_spread for example in weighed])
    inputs = {name: torch.cat([each.inputs[name][0] for each in weighed]) for name in weighed[0].inputs}
    chosen = replace(chosen, has_spread=has_spread, inputs=inputs)
    statistics = cast(CoupledLoss, loss).step_statistic(chosen).tolist()
    return [replace(one, statistic=found) for one, found in zip(weighed, statistics, strict=True)]


def turn_logprobs(example: Example, side: int) -> list[Tensor]:
    """Return the reference log-probabilities of one side, in nats, one tensor per turn that carries loss [tokens]."""
    return _by_turn(example, side, example.reference[side])


def _by_turn(example: Example, side: int, values: Tensor) -> list[Tensor]:
    """Split values of one side's loss tokens [loss tokens] into one tensor per turn [tokens]."""
    carried = torch.tensor(example.sides[side].loss_turns)
    return list(values.split(carried.unique_consecutive(return_counts=True)[1].tolist()))


def turn_weigher(
    model_name: str, credit: Credit | None
) -> Callable[[Example], list[dict[int, tuple[float, float]]]]:
    """Return a function that gives confidence and weight of each turn of a row, computed as in training.

    The confidence of a turn is the geometric mean of its tokens' probabilities under the reference policy. Rows that
    already have weights keep them and need no credit.

    Args:
        model_name: Name of the reference policy; it is loaded for the first row.
        credit: Credit for rows without weights; None if all rows have weights.

    Returns:
        A function from a row to one mapping per side, from the index of a turn to (confidence, weight).
    """
    model = cache(lambda: load_model(model_name))
    return lambda example: _side_weights(model(), example, credit)


def _side_weights(
    model: Any, example: Example, credit: Credit | None
) -> list[dict[int, tuple[float, float]]]:
    known, largest = model.get_input_embeddings().num_embeddings, max(max(side.ids) for side in example.sides)
    if largest >= known:
        raise DataError(
            f"token id {largest} is none of the model, which knows {known}; name the model that sampled the rows."
        )
    with torch.no_grad():
        example = replace(example, reference=tuple(compute_logprobs(model, example.sides)))
    found = []
    if not example.weight:
        assert credit is not None
        example = weigh(example, credit)
    for index, (side, weight) in enumerate(zip(example.sides, example.weight, strict=True)):
        confidence = [float(turn.mean().exp()) for turn in turn_logprobs(example, index)]
        both = zip(confidence, weight.tolist(), strict=True)
        found.append(dict(zip(sorted(set(side.loss_turns)), both, strict=True)))
    return found
