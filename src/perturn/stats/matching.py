"""Matching of given things with wanted ones by their similarity: one to one, or in shares."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import linear_sum_assignment

_TIE = 1e-9
"""By how much the first row is preferred to the last, relative to a similarity."""
_SMALLEST = 1e-6
"""Smallest regularization, in units of similarity."""
_ROUNDS = 1000
_CLOSE = 1e-10
"""Largest change of a row's factor, relative to it, at which the transport plan is called done."""


def hard_matches(similarity: ArrayLike) -> list[float]:
    """Match one to one, so that the sum of similarities is largest.

    Among matchings of equal sum the one is taken that gives more to earlier rows, so that a repetition is matched less
    than the first of its kind. To that end similarities are raised by at most 1e-9 of themselves: sums that are nearer
    to each other than that count as equal.

    Args:
        similarity: Of each given thing to each wanted thing, in [0, 1] [given, wanted].

    Returns: Similarity of each given thing to its match [given]; 0 if it has no match, or nothing in common with it.
    """
    given = _matrix(similarity)
    rows = len(given)
    first = 1 + _TIE * np.arange(rows, 0, -1) / max(rows, 1)
    matched = linear_sum_assignment(given * first[:, None], maximize=True)
    found = np.zeros(rows)
    found[matched[0]] = given[matched]
    return [float(each) for each in found]


def greedy_matches(similarity: ArrayLike) -> list[float]:
    """Match one to one, the most similar two that are free first; at equal similarity the first row, then column.

    Args:
        similarity: As `hard_matches` has it.

    Returns:
        As `hard_matches` has it; their sum may be less than the largest.
    """
    given = _matrix(similarity)
    found, taken = [0.0] * len(given), set()
    matched = set()
    for lack, i, j in sorted((-given[i, j], i, j) for i, j in np.ndindex(given.shape)):
        if lack < 0 and i not in matched and j not in taken:
            found[i] = float(-lack)
            matched.add(i)
            taken.add(j)
    return found


def soft_matches(similarity: ArrayLike, regularization: float) -> list[float]:
    """Match in shares, by entropic optimal transport from equal masses to equal masses.

        T = argmax_T sum_ij T_ij S_ij + eps H(T),   sum_j T_ij = 1/P,   sum_i T_ij = 1/G

    Source: Cuturi 2013, "Sinkhorn Distances", arXiv:1306.0895, with cost -S.
    Differs: computed with logarithms, so that no small regularization overflows; ends after 1000 rounds if it has not
    converged. The masses of the given are exact.

    Args:
        similarity: As `hard_matches` has it; P given, G wanted.
        regularization: eps, in units of similarity; >= 1e-6. Smaller is nearer to one to one.

    Returns:
        sum_j T_ij S_ij of each given thing; at most 1/P [given].

    Raises:
        ValueError: If the regularization is smaller, where sums of logarithms lose their last digits.
    """
    if not regularization >= _SMALLEST:
        raise ValueError(f"regularization must be >= {_SMALLEST:g}, got {regularization}.")
    given = _matrix(similarity)
    if not given.size:
        return [0.0] * len(given)
    return [float(each) for each in (_plan(given, regularization) * given).sum(1)]


def _plan(given: NDArray[np.float64], regularization: float) -> NDArray[np.float64]:
    """Return T of `soft_matches` [given, wanted]."""
    rows, columns = given.shape
    kernel = given / regularization
    u = np.zeros(rows)
    for _ in range(_ROUNDS):
        before = u
        v = -np.log(columns) - _log_sum(kernel + u[:, None], 0)
        u = -np.log(rows) - _log_sum(kernel + v, 1)
        if np.abs(u - before).max() <= _CLOSE:
            break
    plan: NDArray[np.float64] = np.exp(kernel + u[:, None] + v)
    return plan


def _matrix(similarity: ArrayLike) -> NDArray[np.float64]:
    found = np.asarray(similarity, dtype=np.float64)
    return found if found.ndim == 2 else found.reshape(len(found), 0)


def _log_sum(values: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
    """Return logarithms of the sums of exponentials along an axis."""
    most = values.max(axis, keepdims=True)
    found: NDArray[np.float64] = np.squeeze(most, axis) + np.log(np.exp(values - most).sum(axis))
    return found
