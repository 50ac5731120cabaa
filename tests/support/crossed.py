"""Cases of a test with several parameters: a few for the fast tier, and all of them for the slow tier."""

import itertools
from collections.abc import Sequence

import pytest
from _pytest.mark import ParameterSet


def crossed(*axes: Sequence[object]) -> list[ParameterSet]:
    """Return every combination of values. Combinations that the fast tier can omit are marked slow.

    The fast tier gets a diagonal, in which each value occurs. It has as many cases as the longest axis has values.
    """
    lengths = [len(axis) for axis in axes]
    diagonal = {tuple(i % length for length in lengths) for i in range(max(lengths))}
    return [
        pytest.param(
            *(axis[i] for axis, i in zip(axes, at, strict=True)),
            marks=[] if at in diagonal else [pytest.mark.slow],
        )
        for at in itertools.product(*map(range, lengths))
    ]
