"""Exact coverage of the interval of a state's value: every possible sample of returns is weighted by its probability.

    python benchmarks/value_intervals.py

Each row has the probability that the 95 % interval contains the true value, and its mean half-width in brackets, for
the score interval alone (`mean_interval`), and for the interval of `perturn measure` (`value_interval`) with three
typical variances of the returns of other states.
"""

from collections.abc import Iterator, Sequence
from math import comb

from perturn.measure.advantages import value_interval
from perturn.stats import mean_interval

CASES: dict[str, tuple[Sequence[float], Sequence[float], tuple[float, float]]] = {
    "0 or 1, success 0.1": ((0.0, 1.0), (0.9, 0.1), (0.0, 1.0)),
    "0 or 1, success 0.5": ((0.0, 1.0), (0.5, 0.5), (0.0, 1.0)),
    "step penalties, success 0.1": ((-0.03, -0.02, 0.97, 0.98), (0.4, 0.5, 0.04, 0.06), (-0.05, 0.98)),
    "step penalties, success 0.5": ((-0.03, -0.02, 0.97, 0.98), (0.25, 0.25, 0.25, 0.25), (-0.05, 0.98)),
    "similar partial scores, one of ten high": ((0.1, 0.15, 0.2, 0.9), (0.3, 0.3, 0.3, 0.1), (0.0, 1.0)),
    "similar partial scores": ((0.4, 0.5, 0.6), (0.3, 0.4, 0.3), (0.0, 1.0)),
}
"""Returns with their probabilities, and the lowest and the highest return of all points."""


def samples(values: Sequence[float], chances: Sequence[float], n: int) -> Iterator[tuple[list[float], float]]:
    """Yield each sample of n returns in ascending order, with its probability."""
    if len(values) == 1:
        yield [values[0]] * n, chances[0] ** n
        return
    for many in range(n + 1):
        here = comb(n, many) * chances[0] ** many
        for rest, chance in samples(values[1:], chances[1:], n - many):
            yield [values[0]] * many + rest, here * chance


def coverage(case: str, n: int, typical: float | None) -> tuple[float, float]:
    """Return the probability that the interval contains the true value, and the mean half-width.

    Args:
        case: Key of `CASES`.
        n: Number of continuations.
        typical: Typical variance of the returns of other states. None: the score interval alone.
    """
    values, chances, bounds = CASES[case]
    true = sum(value * chance for value, chance in zip(values, chances, strict=True))
    inside = width = 0.0
    for sample, chance in samples(values, chances, n):
        found = (
            mean_interval(sample, bounds=bounds)
            if typical is None
            else value_interval(tuple(sample), bounds, typical)
        )
        inside += chance * (found.low <= true <= found.high)
        width += chance * (found.high - found.low) / 2
    return inside, width


def main() -> None:
    """Print a row for each case and number of continuations."""
    print("| returns | continuations | score interval | 0.05 | 0.1 | 0.2 |\n|---|---|---|---|---|---|")
    for case in CASES:
        for n in (4, 8, 16):
            found = (coverage(case, n, typical) for typical in (None, 0.05, 0.1, 0.2))
            print(
                f"| {case} | {n} | {' | '.join(f'{inside:.2f} ({width:.2f})' for inside, width in found)} |"
            )


if __name__ == "__main__":
    main()
