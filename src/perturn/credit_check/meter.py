"""Measure the bias and the noise of a credit exactly, by listing every possible group of small decision processes.

The gradient estimate from a group of N trajectories is g = (1/N) sum_i sum_t A_it grad log pi(a_it | s_it). Its
expected value over all groups is compared with the true gradient of the expected return.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations_with_replacement
from math import inf, sqrt
from typing import Any

import torch
from torch import Tensor

from perturn.credit import Credit
from perturn.credit_check.processes import PROCESSES, Episodes, Process
from perturn.credit_check.trees import list_groups, list_trees, orders
from perturn.needs import keyword, names_of
from perturn.policy.credit_weights import asked
from perturn.quantities import Ground, wanted

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-5}
"""Largest relative bias of a credit that counts as unbiased, by the dtype of its weights. Rounding errors are far
smaller."""

_CHECKED = 50
"""Largest number of groups of each size that are weighed again, and in other orders."""
_ORDER = "in another order, or with other sample numbers; each group is listed in one order only"

_NOTHING = 1e-12
"""Length of E[g], relative to the true gradient, below which E[g] counts as 0 up to rounding."""

SIZES = (2, 3, 4)
"""Numbers of trajectories in a group for which a credit is measured."""


@dataclass(frozen=True)
class Measurement:
    """Bias and noise of a credit on one process, for one group size.

    E[g] is the expected gradient estimate, and G the true gradient.
    """

    process: str
    """Name of the process."""
    trajectories: int
    """Number N of trajectories in a group; for a credit that trains on branches, number of trees."""
    cosine: float
    """Cosine between E[g] and G. Below 0, training makes the policy worse."""
    scale: float
    """Projection c = E[g].G / G.G of E[g] on G. The learning rate can compensate for a factor c > 0."""
    relative_bias: float
    """Relative bias |E[g] - c G| / (c |G|), the tangent of the angle between E[g] and G. The learning rate cannot
    compensate for it. It is infinite unless the cosine is above 0."""
    noise: float
    """Square root of the total variance of g, relative to |E[g]|; infinite if E[g] is 0."""
    tolerance: float
    """Largest relative bias that counts as unbiased."""

    @property
    def is_unbiased(self) -> bool:
        """Whether E[g] equals G up to a positive factor."""
        return self.relative_bias <= self.tolerance


def check_credit(
    credit: Credit, gamma: float | None = None, processes: Sequence[Process] = PROCESSES
) -> list[Measurement]:
    """Measure the bias and the noise of a credit on every process, for every group size of `SIZES`.

    Args:
        credit: The credit. It gets the exact value of each quantity that it needs (`Quantity.exact`). With the trait
            `takes_prover`, a prover plays the branches, taking all actions of a state with equal probability. With
            `trains_branches`, the group size is a number of trees. A tree is an episode with a branch
            from its third turn.
        gamma: Discount of the return whose gradient counts as the true gradient; None: the discount of the credit.
        processes: Decision processes on which to measure.

    Returns:
        One measurement for each process and group size.
    """
    return [measure(credit, process, size, gamma) for process in processes for size in SIZES]


def measure(credit: Credit, process: Process, size: int, gamma: float | None = None) -> Measurement:
    """Measure the bias and the noise of a credit on one process, for one group size; see `check_credit`.

    Raises:
        ConfigError: If the credit does not return one number per turn.
        ValueError: If a quantity that the credit needs has no exact value, or the weights depend on the order of the
            group.
    """
    episodes = process.episodes
    discount = credit.traits.discount if gamma is None else gamma
    if credit.traits.trains_branches:
        estimates, chances, tolerance = tree_estimates(credit, episodes, size)
    else:
        estimates, chances, tolerance = _estimates(credit, episodes, size, discount)
    figures = _compare(estimates, chances, episodes.gradient(discount))
    return Measurement(process.name, size, *figures, tolerance)


def tree_estimates(
    credit: Credit, episodes: Episodes, size: int, every: int = 2, samples: int = 1
) -> tuple[Tensor, Tensor, float]:
    """Return the gradient estimate and the probability of each group of trees, and the largest bias to tolerate.

    Args:
        credit: A credit that trains on branches.
        episodes: All episodes of the process.
        size: Number of trees in a group.
        every: Number of turns from one branching turn to the next.
        samples: Number of branches at each branching turn.

    Returns:
        Estimates [groups, parameters], probabilities [groups], and the tolerance for the dtype of the weights.

    Raises:
        ConfigError: If the credit does not return one number per turn.
        ValueError: If the credit needs any quantity.
    """
    if credit.needs:
        raise ValueError(
            f"{type(credit).__name__} trains on branches and needs {', '.join(sorted(names_of(credit.needs)))}, so it "
            "cannot be measured. Measure a setting that needs nothing, such as by=reward of slate."
        )
    estimates, chances, dtypes = [], [], set()
    for group, members, chance in list_groups(episodes, list_trees(episodes, every, samples), size):
        found = asked(credit, group)
        advantages = _padded(found, episodes.process.horizon)
        estimates.append(torch.einsum("nt,ntp->p", advantages, episodes.score[members]) / size)
        chances.append(chance)
        dtypes.add(found[0].dtype)
    tolerance = max(TOLERANCES.get(dtype, 1e-2) for dtype in dtypes)
    return torch.stack(estimates), torch.tensor(chances, dtype=torch.float64), tolerance


def _estimates(credit: Credit, episodes: Episodes, size: int, gamma: float) -> tuple[Tensor, Tensor, float]:
    """Return the gradient estimate and the probability of each group of episodes; see `tree_estimates`."""
    groups = list(combinations_with_replacement(range(len(episodes.steps)), size))
    found, dtypes = zip(*_advantages(credit, episodes, groups, gamma), strict=True)
    tolerance = max(TOLERANCES.get(dtype, 1e-2) for dtype in dtypes)
    some = range(0, len(groups), len(groups) // _CHECKED + 1)
    first, *others = range(size)
    for order, how in (
        ([first, *others], "again; it is random, or it remembers earlier groups"),
        ([*others, first], _ORDER),
        ([*others[:1], first, *others[1:]], _ORDER),
    ):
        again = _advantages(credit, episodes, [[groups[each][i] for i in order] for each in some], gamma)
        for each, (weights, _) in zip(some, again, strict=True):
            before = found[each][order]
            if not torch.allclose(weights, before, rtol=tolerance, atol=tolerance, equal_nan=True):
                raise ValueError(
                    f"{type(credit).__name__} cannot be measured: it gives other weights to the same episodes {how}."
                )
    members = torch.tensor(groups)
    estimates = torch.einsum("gnt,gntp->gp", torch.stack(found), episodes.score[members]) / size
    chances = torch.tensor([orders(group) for group in groups], dtype=torch.float64)
    chances = chances * episodes.probability[members].prod(1)
    return estimates, chances, tolerance


def _padded(found: Sequence[Tensor], horizon: int) -> Tensor:
    """Return the weights of a credit padded with 0 after the end of each episode, float64 [trajectories, turns]."""
    padded = torch.zeros(len(found), horizon, dtype=torch.float64)
    for row, one in zip(padded, found, strict=True):
        row[: len(one)] = one
    return padded


def summary(
    name: str, credit: Credit, gamma: float | None = None, processes: Sequence[Process] = PROCESSES
) -> dict[str, Any]:
    """Return all measurements of a credit as plain data, for JSON.

    Returns: `credit`, `needs`, `notes` (on the exact values of the needed quantities), `gamma` (of the objective),
        `claims_unbiased`, `unbiased` (as measured), `measurements` (each with the fields of Measurement; None for an
        infinite value).
    """
    found = check_credit(credit, gamma, processes)
    return {
        "credit": name,
        "needs": sorted(names_of(credit.needs)),
        "notes": [each.traits.note for each, _ in wanted(credit.needs).values() if each.traits.note],
        "gamma": credit.traits.discount if gamma is None else gamma,
        "claims_unbiased": credit.traits.unbiased,
        "unbiased": all(one.is_unbiased for one in found),
        "measurements": [
            {
                key: None if value in (float("inf"), float("-inf")) else value
                for key, value in asdict(one).items()
            }
            for one in found
        ],
    }


def _advantages(
    credit: Credit, episodes: Episodes, groups: Sequence[Sequence[int]], gamma: float
) -> Iterator[tuple[Tensor, torch.dtype]]:
    """Yield the credit's weights for each group, 0 after an episode's end [trajectories, turns], and their dtype."""
    prover = episodes.process.prover.episodes if credit.traits.takes_prover else episodes
    ground = Ground(episodes, gamma, prover)
    exact = {
        keyword(name): quantity.exact(request, ground)
        for name, (quantity, request) in wanted(credit.needs, type(credit).__name__).items()
    }
    size = len(groups[0])
    recorded = [
        [episodes.trajectory(episode, sample) for sample in range(size)]
        for episode in range(len(episodes.steps))
    ]
    for group in groups:
        needed = {name: [values[episode] for episode in group] for name, values in exact.items()}
        found = asked(credit, [recorded[episode][sample] for sample, episode in enumerate(group)], **needed)
        yield _padded(found, episodes.process.horizon), found[0].dtype


def _compare(estimates: Tensor, chances: Tensor, true: Tensor) -> tuple[float, float, float, float]:
    """Return the cosine, scale, relative bias and noise of the gradient estimates; see `Measurement`.

    Args:
        estimates: Gradient estimate of each group [groups, parameters].
        chances: Probability of each group [groups].
        true: True gradient [parameters].
    """
    expected = chances @ estimates
    length, size = float(expected.norm()), float(true.norm())
    if length <= _NOTHING * max(size, 1.0) or not size:
        return 0.0, 0.0, inf if size or length > _NOTHING else 0.0, inf
    scale = float(expected @ true) / size**2
    bias = float((expected - scale * true).norm()) / (scale * size) if scale > 0 else inf
    variance = float(chances @ (estimates - expected).square().sum(1))
    return float(expected @ true) / (length * size), scale, bias, sqrt(variance) / length
