"""Measure bias and noise of a credit exactly, by listing every group that small decision processes can give.

The gradient that a group of N trajectories gives is g = (1/N) sum_i sum_t A_it grad log pi(a_it | s_it). Its
expectation over all groups is compared with the true gradient of the expected return.
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
from perturn.quantities import Ground, wanted

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-5}
"""Largest relative bias that is called none, by the dtype of a credit's numbers; far above rounding here."""

_NOTHING = 1e-12
"""Length of E[g], relative to the true gradient, below which it is rounding alone."""

SIZES = (2, 3, 4)
"""Trajectories in a group."""


@dataclass(frozen=True)
class Measurement:
    """A credit on one process, with groups of one size. E[g] is its expected gradient, G the true one."""

    process: str
    trajectories: int
    """N, in a group."""
    cosine: float
    """Cosine between E[g] and G; below 0 the policy is made worse."""
    scale: float
    """Factor c = E[g].G / G.G that E[g] has on G; learning rates make up for it."""
    relative_bias: float
    """Rest that no positive factor makes up for: |E[g] - c G| / (c |G|), the tangent of the angle between the two;
    infinite where the cosine is not above 0."""
    noise: float
    """Standard deviation of g, over all its directions, relative to |E[g]|; infinite where E[g] is 0."""
    tolerance: float
    """Largest relative bias that is called none."""

    @property
    def is_unbiased(self) -> bool:
        """Whether E[g] equals G up to a positive factor."""
        return self.relative_bias <= self.tolerance


def check_credit(
    credit: Credit, gamma: float | None = None, processes: Sequence[Process] = PROCESSES
) -> list[Measurement]:
    """Measure a credit on every process, with groups of every size.

    Args:
        credit: A credit. It gets the exact value of each quantity that it needs, by `Quantity.exact`. With the trait
            `takes_prover`, branches are played by a prover that takes all actions of a state with equal probability.
            With `trains_branches`, a group has this number of trees: episodes, each with a branch from its third turn.
        gamma: Discount of the return whose gradient is the true one; None: the credit's own.
        processes: What to measure it on.

    Returns:
        A measurement for each process and size.
    """
    return [measure(credit, process, size, gamma) for process in processes for size in SIZES]


def measure(credit: Credit, process: Process, size: int, gamma: float | None = None) -> Measurement:
    """Measure a credit on one process, with groups of one size; see `check_credit`.

    Raises:
        ValueError: If the credit needs what is not known here, or does not give one number per turn.
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
    """Return the gradient that each group of trees gives, its chance, and the tolerance of the credit's numbers.

    Args:
        credit: A credit that trains on branches.
        episodes: All of the process.
        size: Trees of a group.
        every: Turns from one branching turn to the next.
        samples: Branches from each.

    Raises:
        ValueError: If the credit needs anything, or does not give one number per turn.
    """
    if credit.needs:
        raise ValueError(
            f"{type(credit).__name__} trains on branches and needs {', '.join(sorted(names_of(credit.needs)))}."
        )
    estimates, chances, dtypes = [], [], set()
    for group, members, chance in list_groups(episodes, list_trees(episodes, every, samples), size):
        found = credit(group)
        advantages = _padded(credit, found, [len(one.turns) for one in group], episodes.process.horizon)
        estimates.append(torch.einsum("nt,ntp->p", advantages, episodes.score[members]) / size)
        chances.append(chance)
        dtypes.add(found[0].dtype)
    tolerance = max(TOLERANCES.get(dtype, 1e-2) for dtype in dtypes)
    return torch.stack(estimates), torch.tensor(chances, dtype=torch.float64), tolerance


def _estimates(credit: Credit, episodes: Episodes, size: int, gamma: float) -> tuple[Tensor, Tensor, float]:
    """Return the gradient that each group of episodes gives, its chance, and the tolerance of the credit's numbers."""
    groups = list(combinations_with_replacement(range(len(episodes.steps)), size))
    found, dtypes = zip(*_advantages(credit, episodes, groups, gamma), strict=True)
    members = torch.tensor(groups)
    estimates = torch.einsum("gnt,gntp->gp", torch.stack(found), episodes.score[members]) / size
    chances = torch.tensor([orders(group) for group in groups], dtype=torch.float64)
    chances = chances * episodes.probability[members].prod(1)
    return estimates, chances, max(TOLERANCES.get(dtype, 1e-2) for dtype in dtypes)


def _padded(credit: Credit, found: Sequence[Tensor], lengths: Sequence[int], horizon: int) -> Tensor:
    """Return numbers of a credit, 0 after the end of an episode, float64 [trajectories, turns].

    Raises:
        ValueError: If they are not one per turn, or not finite.
    """
    if [len(one) for one in found] != list(lengths):
        raise ValueError(
            f"{type(credit).__name__} must return one number per turn, {list(lengths)} by trajectory, "
            f"got {[len(one) for one in found]}."
        )
    padded = torch.zeros(len(found), horizon, dtype=torch.float64)
    for row, one in zip(padded, found, strict=True):
        row[: len(one)] = one
    if not padded.isfinite().all():
        raise ValueError(f"{type(credit).__name__} must return finite numbers, got {padded.tolist()}.")
    return padded


def summary(
    name: str, credit: Credit, gamma: float | None = None, processes: Sequence[Process] = PROCESSES
) -> dict[str, Any]:
    """Return all measurements of a credit as plain data.

    Returns: `credit`, `needs`, `notes` (on the exact values of these), `gamma` (of the objective), `claims_unbiased`,
        `unbiased` (measured), `measurements` (each with the fields of Measurement; None for infinite values).
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
    credit: Credit, episodes: Episodes, groups: Sequence[tuple[int, ...]], gamma: float
) -> Iterator[tuple[Tensor, torch.dtype]]:
    """Yield the credit's numbers for each group, 0 after an episode's end [trajectories, turns], and their dtype."""
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
        found = credit([recorded[episode][sample] for sample, episode in enumerate(group)], **needed)
        lengths = [len(episodes.steps[episode]) for episode in group]
        yield _padded(credit, found, lengths, episodes.process.horizon), found[0].dtype


def _compare(estimates: Tensor, chances: Tensor, true: Tensor) -> tuple[float, float, float, float]:
    """Return cosine, scale, relative bias and noise of the gradients that all groups give."""
    expected = chances @ estimates
    length, size = float(expected.norm()), float(true.norm())
    if length <= _NOTHING * max(size, 1.0) or not size:
        return 0.0, 0.0, inf if size or length > _NOTHING else 0.0, inf
    scale = float(expected @ true) / size**2
    bias = float((expected - scale * true).norm()) / (scale * size) if scale > 0 else inf
    variance = float(chances @ (estimates - expected).square().sum(1))
    return float(expected @ true) / (length * size), scale, bias, sqrt(variance) / length
