"""Values that the trainer logs: means over passes and processes, and means by the position of a turn."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from perturn.losses import TurnLogprobs

POSITIONS = {"1": 1, "2": 2, "3-4": 4, "5-8": 8, "9-16": 16, "17-32": 32}
"""Names of the positions that are logged together, with the last turn of each; what follows is `33-`."""

LATER = "33-"


class Means:
    """Means by name of values that several passes and processes have; sums and counts stay on each one's device."""

    def __init__(self) -> None:
        self._parts: dict[str, list[Tensor]] = defaultdict(list)

    def add(self, name: str, values: Tensor) -> None:
        """Keep the values of one pass of this process, if any; processes need not add equally often, or equal names."""
        if not values.numel():
            return
        part = torch.stack([values.float().sum(), values.new_tensor(values.numel(), dtype=torch.float)])
        self._parts[name].append(part)

    def take(self) -> dict[str, float]:
        """Mean of all values of all processes since the last call; every process makes it, and waits for the others.

        Of values that are `spread` it is their standard deviation; see `by_position`.
        """
        own = {name: torch.stack(parts).sum(0).tolist() for name, parts in self._parts.items()}
        self._parts.clear()
        sums: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for process in gather_object([own]):
            for name, part in process.items():
                sums[name].append(part)
        means = {
            name: sum(total for total, _ in parts) / sum(count for _, count in parts)
            for name, parts in sums.items()
        }
        return {name: _spread(name, means) if "_spread/" in name else mean for name, mean in means.items()}


@torch.no_grad()
def row_metrics(loss: Any, chosen: TurnLogprobs, rejected: TurnLogprobs | None) -> dict[str, Tensor]:
    """Values of each row of a pack, by name [rows]: log-probabilities, and of pairs the implicit rewards.

    Args:
        loss: The loss.
        chosen: First sides.
        rejected: Second sides; None where the loss reads one.
    """
    found = {"logps/chosen": chosen.sum_by_trajectory(chosen.policy)}
    if rejected is not None:
        rewards, others = loss.rewards(chosen), loss.rewards(rejected)
        found |= {
            "logps/rejected": rejected.sum_by_trajectory(rejected.policy),
            "rewards/chosen": rewards,
            "rewards/rejected": others,
            "rewards/accuracies": (rewards > others).float(),
            "rewards/margins": rewards - others,
        }
    return found


@torch.no_grad()
def step_metrics(
    loss: Any,
    chosen: TurnLogprobs,
    rejected: TurnLogprobs | None,
    step: Mapping[str, Tensor],
    entropy: Tensor,
) -> dict[str, Tensor]:
    """Values of a pack to log beside those of its rows, by name; their mean is logged, see docs/methods/logged.md.

    Entropy has a value for each token, weights a value for each turn. Diagnostics of the loss may have names of
    `row_metrics`, in whose place they are logged, also where they have no value in this pack.

    Args:
        loss: The loss.
        chosen: First sides.
        rejected: Second sides; None where the loss reads one.
        step: What the loss is told of the whole optimizer step, by keyword.
        entropy: Of the policy at each loss token, in nats [loss tokens].
    """
    of_chosen = entropy[: len(chosen.policy)]
    found: dict[str, Any] = {"weight/chosen": chosen.weight, "entropy/chosen": of_chosen}
    if rejected is not None:
        found |= {"weight/rejected": rejected.weight, "entropy/rejected": entropy[len(chosen.policy) :]}
    found |= loss.diagnostics(chosen, rejected, **step) if loss.traits.diagnostics else {}
    if loss.traits.turn_diagnostics:
        values = {**loss.turn_diagnostics(chosen), "entropy": chosen.mean_by_turn(of_chosen)}
        found |= by_position(chosen, values)
        found |= {"kl/turns": values["kl"]} if "kl" in values else {}
    return found


def by_position(side: TurnLogprobs, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Values of turns, those of like position together: in the episode, also where turns before carry no loss.

    Args:
        side: The batch.
        values: Values of each turn, by name [turns].

    Returns:
        By name and position, such as `ratio/turn_3-4` [turns there]. `advantage_spread/turn_1` has the squares of
        `advantage/turn_1`, from which `Means.take` makes the standard deviation.
    """
    ends = torch.tensor(list(POSITIONS.values()), device=side.turn_index.device)
    number = side.turn_index.new_zeros(side.num_turns).scatter(0, side.turn_index, side.turn.long())
    bucket = torch.bucketize(number + 1, ends)
    found = {}
    for index, position in enumerate((*POSITIONS, LATER)):
        there = bucket == index
        if not there.any():
            continue
        for name, of_turns in values.items():
            found[f"{name}/turn_{position}"] = of_turns[there]
        if "advantage" in values:
            found[f"advantage_spread/turn_{position}"] = values["advantage"][there].square()
    return found


def _spread(name: str, means: Mapping[str, float]) -> float:
    """Standard deviation from the mean of the squares and the mean, over all values (population)."""
    variance = means[name] - means[name.replace("_spread/", "/")] ** 2
    return math.sqrt(max(0.0, variance))
