"""Match given items with wanted items by similarity, either one to one or in fractional shares."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import linear_sum_assignment

_TIE = 1e-9
"""Relative increase of the first row's similarity, which breaks ties in favour of earlier rows."""
_SMALLEST = 1e-6
"""Smallest regularization, in units of similarity."""
_ROUNDS = 1000
_CLOSE = 1e-10
"""Relative change of a row's factor below which the transport plan has converged."""


def hard_matches(similarity: ArrayLike) -> list[float]:
    """Match items one to one so that the sum of similarities is largest.

    Of several matchings with equal sums, the matching that favours earlier rows is returned. So a repeated item gets
    less than its first occurrence. For this, similarities are increased by at most a factor of 1 + 1e-9. Sums with a
    smaller relative difference therefore count as equal.

    Args:
        similarity: Similarity of each given item to each wanted item, in [0, 1] [given, wanted].

    Returns: Similarity of each given item to its match [given]; 0 for an item without a match.
    """
    given = _matrix(similarity)
    rows = len(given)
    first = 1 + _TIE * np.arange(rows, 0, -1) / max(rows, 1)
    matched = linear_sum_assignment(given * first[:, None], maximize=True)
    found = np.zeros(rows)
    found[matched[0]] = given[matched]
    return [float(each) for each in found]


def greedy_matches(similarity: ArrayLike) -> list[float]:
    """Match items one to one, always the most similar free pair. Ties go to the first row, then the first column.

    Args:
        similarity: Similarities, as in `hard_matches` [given, wanted].

    Returns:
        Similarity of each given item to its match [given]. The sum may be smaller than in `hard_matches`.
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
    """Match items in fractional shares, by entropic optimal transport between uniform masses.

        T = argmax_T sum_ij T_ij S_ij + eps H(T),   sum_j T_ij = 1/P,   sum_i T_ij = 1/G

    Source: Cuturi 2013, "Sinkhorn Distances", arXiv:1306.0895, with cost -S.
    Differs: sums use logarithms, so that a small regularization does not overflow. The iteration stops after 1000
    rounds even if it has not converged. The masses of the given items are exact.

    Args:
        similarity: Similarities of P given to G wanted items, as in `hard_matches` [given, wanted].
        regularization: Regularization eps >= 1e-6, in units of similarity. A smaller value is closer to a one-to-one
            matching.

    Returns:
        Matched similarity sum_j T_ij S_ij of each given item, at most 1/P [given].

    Raises:
        ValueError: If the regularization is below 1e-6, where sums of logarithms lose precision.
    """
    if not regularization >= _SMALLEST:
        raise ValueError(f"regularization must be >= {_SMALLEST:g}, got {regularization}.")
    given = _matrix(similarity)
    if not given.size:
        return [0.0] * len(given)
    return [float(each) for each in (_plan(given, regularization) * given).sum(1)]


def _plan(given: NDArray[np.float64], regularization: float) -> NDArray[np.float64]:
    """Return the transport plan T of `soft_matches` [given, wanted]."""
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
    """Return the logarithm of the sum of exponentials along an axis."""
    most = values.max(axis, keepdims=True)
    found: NDArray[np.float64] = np.squeeze(most, axis) + np.log(np.exp(values - most).sum(axis))
    return found
