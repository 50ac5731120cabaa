"""Compare policy gradients from a credit and from measured advantages, and estimate their noise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from perturn.measure.advantages import Flags, Floats, Measured
from perturn.measure.credit_scores import clusters_of, has_few_tasks, within_bounds
from perturn.stats import Estimate, jackknife

ProjectedGradients = NDArray[np.float32]
"""Random projections of the gradient of log pi of each turn's action [turns, numbers]."""

THOUSAND = 1000
"""Number of episodes to which the noise figures refer."""


@dataclass(frozen=True)
class Products:
    """Inner products of the gradients of tasks, each [tasks, tasks]."""

    credit: Floats
    """Products of the credit's gradients with each other."""
    between: Floats
    """Products of the credit's gradients with the gradients from measured advantages."""
    measured: Floats
    """Products of the gradients from measured advantages with each other."""
    halves: Floats
    """Products of the gradients from one half of the continuations with the gradients from the other half, averaged
    over splits."""
    episodes: Floats
    """Number of episodes of each task [tasks]."""


def products(turns: Measured, gradients: ProjectedGradients) -> Callable[[Floats], Products]:
    """Return a function from a credit [turns] to the inner products of the gradients of tasks.

        x_k = sum of c_t grad log pi(a_t | h_t) over the turns of task k

    If there are few tasks, each episode is treated as a task. Products without the credit are computed only once.
    """
    _, number = np.unique(clusters_of(turns), return_inverse=True)
    count = int(number.max()) + 1
    first = np.concatenate([[True], np.diff(turns.episode) != 0])
    episodes = np.bincount(number[first], minlength=count).astype(np.float64)

    def by_task(weight: Floats) -> Floats:
        weights = np.zeros((count, len(number)))
        weights[number, np.arange(len(number))] = weight
        found: Floats = (weights.astype(np.float32) @ gradients).astype(np.float64)
        return found

    theirs = by_task(turns.advantage)
    measured = theirs @ theirs.T
    parts = [by_task(one) @ by_task(other).T for one, other in zip(*turns.halves, strict=True)]
    halves = np.mean(parts, axis=0)
    halves = (halves + halves.T) / 2

    def of(credit: Floats) -> Products:
        own = by_task(credit)
        return Products(own @ own.T, own @ theirs.T, measured, halves, episodes)

    return of


def cosine(of: Products, keep: Flags) -> float | None:
    """Return the cosine between the credit's gradient and the measured gradient of the same episodes.

        X_c . X_A / sqrt(|X_c|^2 X_A1 . X_A2),   X = sum of x_k over tasks

    The cosine shows how well a step on the credit improves these episodes. The halves of the continuations correct it
    for the noise of the measurement.
    """
    size = _total(of.credit, keep) * _total(of.halves, keep)
    return _total(of.between, keep) / sqrt(size) if size > 0 else None


def expected_cosine(of: Products, keep: Flags) -> float | None:
    """Return the cosine between the expected gradient of the credit and the true policy gradient.

        U(c, A) / sqrt(U(c, c) U(A, A)),   U(x, y) = (sum x . sum y - sum_k x_k . y_k) G / (G - 1) / N^2

    G is the number of tasks, N the number of episodes. U uses only products of different tasks, which are independent.
    So its expected value is the product of the expected gradients. The result is None if either squared length is not
    positive, as with few and noisy episodes.

    Source: Perturn. U is the U-statistic of Hoeffding 1948, "A class of statistics with asymptotically normal
    distribution".
    """
    size = _across(of.credit, of, keep) * _across(of.measured, of, keep)
    enough = _across(of.credit, of, keep) > 0 and _across(of.measured, of, keep) > 0
    return _across(of.between, of, keep) / sqrt(size) if enough else None


def signal_to_noise(of: Products, keep: Flags) -> float | None:
    """Return the squared length of the expected gradient, relative to the noise in the gradient of a thousand episodes.

        SNR = U(c, c) / (V N / 1000),   V = (sum_k |x_k|^2 - |sum x|^2 / G) G / (G - 1) / N^2

    V is the variance of the mean gradient of the N measured episodes, summed over all directions. A ratio below 0 means
    that the expected gradient cannot be distinguished from 0.
    """
    noise = _noise(of, keep)
    return _across(of.credit, of, keep) / noise if noise > 0 else None


def step_cosine(of: Products, keep: Flags) -> float | None:
    """Return the expected cosine between the credit's gradient from a thousand episodes and the true policy gradient.

    U(c, A) / sqrt(U(A, A) (U(c, c) + V N / 1000))
    """
    true, whole = _across(of.measured, of, keep), _across(of.credit, of, keep) + _noise(of, keep)
    return _across(of.between, of, keep) / sqrt(true * whole) if true > 0 and whole > 0 else None


FIGURES = {
    "cosine": cosine,
    "expected_cosine": expected_cosine,
    "signal_to_noise": signal_to_noise,
    "step_cosine": step_cosine,
}
"""Functions that compute a figure, by the figure's name."""
COSINES = frozenset({"cosine", "expected_cosine", "step_cosine"})
"""Figures whose true value lies in [-1, 1]."""
ACROSS = ("expected_cosine", "signal_to_noise", "step_cosine")
"""Figures that multiply gradients of different tasks. Episodes cannot replace tasks here, because episodes of one task
share points and therefore the noise of their continuations."""


def figures_of(
    turns: Measured, gradients: ProjectedGradients
) -> Callable[[Floats], Mapping[str, Estimate | None]]:
    """Return a function from a credit [turns] to all figures of its gradient, by name.

    The 95 % intervals are from a jackknife over tasks. With fewer than five tasks, the figures of `ACROSS` are None.
    """
    few, products_of = has_few_tasks(turns), products(turns, gradients)

    def figures(credit: Floats) -> dict[str, Estimate | None]:
        of = products_of(credit)
        return {name: None if few and name in ACROSS else _estimate(name, of) for name in FIGURES}

    return figures


def _estimate(name: str, of: Products) -> Estimate | None:
    """Return a figure with its interval."""
    found = jackknife(lambda keep: FIGURES[name](of, keep), range(len(of.episodes)))
    return within_bounds(found, (-1.0, 1.0)) if found is not None and name in COSINES else found


def _total(product: Floats, keep: Flags) -> float:
    """Return the inner product of the gradients summed over the kept tasks."""
    return float(product[np.ix_(keep, keep)].sum())


def _own(product: Floats, keep: Flags) -> float:
    """Return the sum of each kept task's product with itself."""
    return float(np.trace(product[np.ix_(keep, keep)]))


def _across(product: Floats, of: Products, keep: Flags) -> float:
    """Return the statistic U of `expected_cosine`."""
    tasks, episodes = int(keep.sum()), float(of.episodes[keep].sum())
    if tasks < 2:
        return 0.0
    return (_total(product, keep) - _own(product, keep)) * tasks / (tasks - 1) / episodes**2


def _noise(of: Products, keep: Flags) -> float:
    """Return the variance of the mean gradient of a thousand episodes; see `signal_to_noise`."""
    tasks, episodes = int(keep.sum()), float(of.episodes[keep].sum())
    if tasks < 2:
        return 0.0
    spread = _own(of.credit, keep) - _total(of.credit, keep) / tasks
    return spread * tasks / (tasks - 1) / episodes / THOUSAND
