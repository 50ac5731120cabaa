r"""Simulate how often a study detects a true gain and how often it errs, with Holm over all or primary comparisons.

    python benchmarks/families.py --out benchmarks/families.json      a quarter of a minute on one core

Studies with known true gains are simulated. All methods are compared with one baseline on the same base models, so that
the comparisons share the noise of the baseline. For each base model, the difference of a method varies around its gain
with a standard deviation of 5.5 points. Half of this variance comes from the baseline. The standard deviation differs
between methods, by up to a factor of e^0.5 in two of three methods. Either one method gains 6 points, or none does. The
test is Student's t over base models, to which `crossed_comparison` converges with many tasks. *Found* is the share of
4,000 studies in which the gain has a corrected p-value below 0.05. *Family* is the share in which any comparison has
such a p-value although no method gains. `moderated` is Smyth's test, which shrinks the variances towards each other.
The standard error of a share of 0.05 is 0.003.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special, stats

from perturn.stats import benjamini_hochberg, holm

Floats = NDArray[np.float64]
SPREAD, GAIN, LEVEL, PRIMARY = 5.5, 6.0, 0.05, 3
STUDIES = 4000
SIZES = tuple((bases, comparisons) for bases in (3, 5, 10) for comparisons in (3, 16, 31))


def differences(draw: np.random.Generator, bases: int, comparisons: int, gain: float) -> Floats:
    """Return differences from the baseline in points [studies, comparisons, bases]. The first method has the gain."""
    spread = SPREAD * np.exp(draw.normal(0, 0.5, (STUDIES, comparisons, 1))) / np.exp(0.25)
    own = draw.normal(0, 1, (STUDIES, comparisons, bases)) * spread
    shared = draw.normal(0, SPREAD, (STUDIES, 1, bases))
    found: Floats = (own + shared) / np.sqrt(2)
    found[:, 0] += gain
    return found


def student(values: Floats) -> Floats:
    """Return two-sided p-values of Student's t over base models [studies, comparisons]."""
    return np.asarray(stats.ttest_1samp(values, 0.0, axis=-1).pvalue)


def moderated(values: Floats) -> Floats:
    """Return two-sided p-values of the moderated t-test [studies, comparisons].

    Source: Smyth 2004, "Linear models and empirical Bayes methods", Section 6.2 (d0 and s0 by moments of log s^2).
    """
    bases = values.shape[-1]
    freedom, variance = bases - 1.0, values.var(-1, ddof=1)
    logs = np.log(variance) - special.digamma(freedom / 2) + np.log(freedom / 2)
    excess = logs.var(-1, ddof=1) - special.polygamma(1, freedom / 2)
    prior = np.array([_prior_freedom(each) for each in excess])[:, None]
    centre = logs.mean(-1, keepdims=True)
    finite = np.where(np.isinf(prior), 1e10, prior)
    scale = np.exp(centre + special.digamma(finite / 2) - np.log(finite / 2))
    posterior = (finite * scale + freedom * variance) / (finite + freedom)
    t = values.mean(-1) / np.sqrt(posterior / bases)
    return np.asarray(2 * stats.t.sf(np.abs(t), finite + freedom))


def _prior_freedom(excess: float) -> float:
    """Return d0 with trigamma(d0 / 2) = excess; infinite if variances differ no more than by chance."""
    if excess <= 1e-6:
        return float("inf")
    return 2 * float(optimize.brentq(lambda x: float(special.polygamma(1, x)) - excess, 1e-4, 1e8))


def row(bases: int, comparisons: int) -> dict[str, Any]:
    """Return the shares for one kind of study."""
    draw = np.random.default_rng([bases, comparisons])
    gained, alike = (differences(draw, bases, comparisons, gain) for gain in (GAIN, 0.0))
    with_gain, without = student(gained), student(alike)

    def found(p_values: Floats, correction: Any) -> float:
        return float(np.mean([correction(each)[0] < LEVEL for each in p_values.tolist()]))

    def errs(p_values: Floats, correction: Any) -> float:
        return float(np.mean([min(correction(each)) < LEVEL for each in p_values.tolist()]))

    return {
        "bases": bases,
        "comparisons": comparisons,
        "found_alone": float(np.mean(with_gain[:, 0] < LEVEL)),
        "found_primary": found(with_gain[:, :PRIMARY], holm),
        "found_holm": found(with_gain, holm),
        "found_q": found(with_gain, benjamini_hochberg),
        "family_primary": errs(without[:, :PRIMARY], holm),
        "family_holm": errs(without, holm),
        "family_alone": float(np.mean((without < LEVEL).any(-1))),
        "family_moderated": errs(moderated(alike), holm),
    }


def main() -> None:
    """Print a table, and write it."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--out", type=Path)
    args = words.parse_args()
    rows = [row(*size) for size in SIZES]
    print(f"| {' | '.join(rows[0])} |\n{'|---' * len(rows[0])}|")
    for each in rows:
        print(f"| {' | '.join(f'{x:.3f}' if isinstance(x, float) else str(x) for x in each.values())} |")
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
